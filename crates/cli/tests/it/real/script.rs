//! One script for the real programs and for their doubles: what a load shows to those who watch it.
//!
//! **Guarantee.** The double and the real program show the same in a load that they take, and in
//! one that they refuse. So the order of the double's steps is not only written by hand.
//!
//! **Mechanism.** The script loads a paused VM by the program's own API. It holds back the first
//! page. So a load that has got a page before it is answered waits for its memory: the program
//! touches that before it opens what it lacks.

use super::vmm::{Api, Devices, Kind, Vmm};
use crate::support::Dir;
use Kind::{CloudHypervisor, Firecracker};
use pageferry_addr::Hva;
use pageferry_pager::Handshake;
use pageferry_testkit::two_hosts::Host;
use pageferry_testkit::{LIMIT, cloud_hypervisor as ch, firecracker as fc, wait_for};
use pageferry_userfault::uffd::{Event, EventReader, Wait, Wake};
use serde_json::json;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long the first page is held back.
const HOLD: Duration = Duration::from_millis(300);

/// The signs of a load.
#[derive(Debug, PartialEq)]
struct Load {
    /// It got a page before it was answered.
    waits_for_memory: bool,
    /// Whether it was taken: by the answer of State, if there is one, and by that of the API.
    taken: [bool; 2],
    /// What the program says of its VM then, and behind a resume of one that was taken.
    states: [&'static str; 2],
}

fn expected(kind: Kind, good: bool) -> Load {
    Load {
        waits_for_memory: true,
        taken: [good; 2],
        states: match kind {
            _ if good => ["Paused", "Running"],
            Firecracker => ["ended"; 2],
            CloudHypervisor => ["VM is not created"; 2],
        },
    }
}

/// The program `pid` at the socket `target` loads the paused VM of the one at `source`.
#[track_caller]
fn assert_load(kind: Kind, pid: u32, dir: &Dir, good: bool, case: &str) {
    let expected = expected(kind, good);
    let [source, target] = ["source", "target"].map(|name| Api(kind, dir.path(name)));
    let (pages, taken) = match kind {
        Firecracker => load(&source, &target, dir),
        CloudHypervisor => receive(&source, &target, dir),
    };
    let seen = || {
        let process = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        match process.is_empty() || process.contains(") Z ") {
            true => "ended".into(),
            false => target.state(),
        }
    };
    // Firecracker ends a moment behind its refusal.
    let states = expected.states.map(|state| {
        super::within(state, || seen().contains(state).then_some(()), seen);
        if taken == [true; 2] && state == "Paused" {
            target.resume();
        }
        state
    });
    let load = Load {
        waits_for_memory: pages > 0,
        taken,
        states,
    };
    assert_eq!(load, expected, "{kind:?}, {case}");
}

fn accept(listener: &UnixListener) -> UnixStream {
    listener.set_nonblocking(true).unwrap();
    let stream = wait_for("a connection", || Some(listener.accept().ok()?.0));
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

/// Loads a snapshot of Firecracker. Returns the pages that it got before the answer.
fn load(source: &Api, target: &Api, dir: &Dir) -> (u64, [bool; 2]) {
    let [files, socket] = ["snapshot", "pages"].map(|name| dir.path(name));
    source.snapshot(&files);
    let memory = File::open(files.join("memory")).unwrap();
    let bytes = memory.metadata().unwrap().len();
    let listener = UnixListener::bind(&socket).unwrap();
    let served = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&served);
    std::thread::spawn(move || {
        let stream = accept(&listener);
        let handshake = Handshake::receive(stream.as_fd(), bytes, None).unwrap();
        let (mut events, mut page) = (EventReader::new(16), [0; 4096]);
        let wait = Wait {
            limit: Some(LIMIT),
            ..Wait::default()
        };
        while let Ok(Some(Event::PageFault(fault))) = events.next(&handshake.uffd, wait) {
            let at = fault.address.0 & !4095;
            let before = handshake.regions.iter().filter(|each| each.address <= at);
            let region = before.max_by_key(|each| each.address).unwrap();
            let place = region.offset + (at - region.address);
            memory.read_exact_at(&mut page, place).unwrap();
            if count.load(Ordering::SeqCst) == 0 {
                std::thread::sleep(HOLD);
            }
            count.fetch_add(1, Ordering::SeqCst);
            // Another thread may have asked for it too.
            let _ = handshake.uffd.copy(Hva(at), &page, Wake::Now);
        }
    });
    let body = json!({
        "snapshot_path": files.join("state"),
        "mem_backend": {"backend_type": "Uffd", "backend_path": socket},
    });
    let taken = target.put("snapshot/load", &body).is_ok();
    (served.load(Ordering::SeqCst), [taken; 2])
}

/// Lets one Cloud Hypervisor send its VM to another one. Returns the pages that this one asked for
/// before State was answered.
fn receive(source: &Api, target: &Api, dir: &Dir) -> (u64, [bool; 2]) {
    let [from, to] = ["from", "to"].map(|name| dir.path(name));
    let [from_url, to_url] = [&from, &to].map(|path| format!("unix:{}", path.display()));
    let listener = UnixListener::bind(&from).unwrap();
    std::thread::scope(|scope| {
        let body = json!({"receiver_url": to_url, "memory_mode": "Postcopy"});
        let api = scope.spawn(move || target.put("vm.receive-migration", &body));
        wait_for("the receiver", || to.exists().then_some(()));
        let body = json!({"destination_url": from_url, "local": true, "preserve_source": true});
        scope.spawn(move || source.put("vm.send-migration", &body));
        let (pages, passed) = ch::relay(&accept(&listener), &to, HOLD);
        (pages, [passed.is_ok(), api.join().unwrap().is_ok()])
    })
}

/// A double that refuses every load, or none.
fn double(kind: Kind, api: std::path::PathBuf, has_vm: bool, refuses: bool) -> Option<fc::Double> {
    let regions = if has_vm { vec![4 << 20] } else { Vec::new() };
    match kind {
        Firecracker => fc::Double::start(&fc::Config {
            api: Some(api),
            regions,
            quirk: [fc::Quirk::Right, fc::Quirk::RefuseDevice][usize::from(refuses)],
            ..fc::Config::default()
        }),
        CloudHypervisor => ch::Double::start(&ch::Config {
            api,
            seed: 3,
            regions,
            vcpus: 1,
            quirk: [ch::Quirk::Right, ch::Quirk::RefuseDisk][usize::from(refuses)],
        }),
    }
}

/// The double of a program, and the program with one thing after another that is not to be had.
fn script(kind: Kind) {
    for good in [true, false] {
        let dir = Dir::new();
        let source = double(kind, dir.path("source"), true, false);
        if let (Some(_source), Some(target)) =
            (source, double(kind, dir.path("target"), false, !good))
        {
            assert_load(kind, target.pid(), &dir, good, "double");
        }
    }
    let Some(program) = kind.program("") else {
        return;
    };
    let _turn = super::turn();
    let run = |case: &str, devices: fn(&Dir) -> Devices, host: Option<&str>| {
        let dir = Dir::new();
        // It keeps its devices.
        let source = Vmm::start(kind, &program, &dir, "source", host);
        source.boot(&devices(&dir));
        source.pause();
        let target = Vmm::start(kind, &program, &dir, "target", host);
        if case == "no disk" {
            std::fs::remove_file(dir.path("disk")).unwrap();
        }
        assert_load(kind, target.pid(), &dir, case == "good", case);
    };
    run("good", |_| Devices::default(), None);
    run("no disk", super::with_disk, None);
    run("the vsock path is in use", super::with_vsock, None);
    if kind == CloudHypervisor {
        run("the disk is locked", super::with_disk, None);
    }
    if let Some(hosts) = super::taps() {
        run("the tap is busy", super::on_tap0, Some(hosts.name(Host::A)));
    }
}

#[test]
fn a_load_of_firecracker_has_the_steps_of_its_double() {
    script(Firecracker);
}

#[test]
fn a_load_of_cloud_hypervisor_has_the_steps_of_its_double() {
    script(CloudHypervisor);
}
