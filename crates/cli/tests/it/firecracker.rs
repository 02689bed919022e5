//! `migrate --vm fc:..` and `receive --for fc:..`: two doubles of Firecracker, two processes.

use crate::support::{Dir, Process, pageferry};
use pageferry_testkit::firecracker::{Config, Double, Quirk};
use pageferry_testkit::{Random, rotating_seeds, wait_until};
use rustix::process::Signal;
use std::time::Duration;

struct Hosts {
    source: Double,
    target: Double,
    receive: Process,
    address: String,
    dir: Dir,
}

fn receive(dir: &Dir, address: &str) -> Process {
    let api = format!("fc:{}", dir.path("target").display());
    let listen = ["--listen", address, "--give-up-after", "2m", "--json"];
    let args = [&["receive", "--for", &api][..], &listen].concat();
    Process::start(&args, dir)
}

/// Two doubles, and a `receive` that listens. The VM runs.
fn hosts(source: Quirk, target: Quirk) -> Option<Hosts> {
    hosts_with(8 << 20, source, target)
}

/// The same, with so many bytes, of which a balloon takes some.
fn hosts_with(bytes: u64, source: Quirk, target: Quirk) -> Option<Hosts> {
    let dir = Dir::new();
    let config = |name: &str, regions: Vec<u64>, quirk| Config {
        api: Some(dir.path(name)),
        seed: 3,
        vcpus: if regions.is_empty() { 0 } else { 2 },
        balloon_us: (regions.iter().sum::<u64>() > 8 << 20).then_some(500),
        regions,
        quirk,
        ..Config::default()
    };
    let mut source = Double::start(&config("source", vec![bytes], source))?;
    let target = Double::start(&config("target", Vec::new(), target))?;
    source.run();
    let receive = receive(&dir, "127.0.0.1:0");
    let address = receive.wait_until_said("listening on ");
    Some(Hosts {
        source,
        target,
        receive,
        address,
        dir,
    })
}

impl Hosts {
    fn migrate(&self, flags: &[&str]) -> Process {
        let vm = format!("fc:{}", self.dir.path("source").display());
        let mut args = vec!["migrate", "--vm", &vm, "--to", &self.address];
        args.extend(flags);
        Process::start(&args, &self.dir)
    }
}

#[test]
fn a_vm_of_firecracker_moves_between_two_processes() {
    let Some(mut hosts) = hosts(Quirk::Right, Quirk::Right) else {
        return;
    };
    let ended = hosts.migrate(&["--json"]).end();
    ended.assert_ok();
    let sent = ended.json();
    assert_eq!(sent["engine"], "firecracker", "{sent}");
    assert_eq!(sent["vcpus"], 2, "{sent}");
    assert_eq!(sent["memory_bytes"], 8 << 20, "{sent}");
    assert!(sent["pages"]["precopy"].as_u64() > Some(0), "{sent}");
    assert!(sent["vmm_pause"]["save_ms"].as_f64() > Some(0.0), "{sent}");
    let remark = "the old Firecracker process has the paused VM";
    assert!(ended.stderr.contains(remark), "{ended:?}");
    let received = hosts.receive.end();
    received.assert_ok();
    assert_eq!(received.json()["engine"], "firecracker");
    // Nobody serves its memory any more.
    let status = hosts.target.verify();
    assert_eq!((status.wrong, &status.state[..]), (0, "Running"));
    assert_eq!(hosts.source.status().state, "Paused");
}

/// A receiver that refuses leaves the VM running, and `receive` listens on.
#[test]
fn a_refusal_of_firecracker_is_a_sentence_and_the_vm_runs_on() {
    let Some(mut hosts) = hosts(Quirk::Right, Quirk::RefuseLoad) else {
        return;
    };
    let ended = hosts.migrate(&[]).end();
    ended.assert_failed(8, "PUT /snapshot/load by 400: the snapshot is");
    assert_eq!(hosts.source.status().state, "Running");
    hosts.receive.wait_until_said("still listening");
    assert!(hosts.receive.is_running());
}

impl Hosts {
    /// Starts a slow move, and waits until it is in post-copy.
    fn migrate_slowly(&self) -> Process {
        let flags = ["--json", "--precopy-passes", "0", "--max-bandwidth", "1M"];
        let migrate = self.migrate(&flags);
        wait_until("post-copy", || {
            migrate.said_on_stderr().contains("post-copy")
        });
        migrate
    }

    /// The VM runs at the destination with all its memory, and at the source it is paused.
    fn check_moved(mut self, seed: u64) {
        self.receive.end().assert_ok();
        let status = self.target.verify();
        let runs = (status.wrong, &status.state[..]);
        assert_eq!(
            runs,
            (0, "Running"),
            "seed {seed}: {:?}",
            status.first_wrong
        );
        assert_eq!(self.source.status().state, "Paused", "seed {seed}");
    }
}

fn kill(process: &mut Process) {
    process.signal(Signal::KILL);
    wait_until("the end of the killed process", || !process.is_running());
}

/// Kills of the receiving end at seeded moments behind the hand-over. The next one goes on.
#[test]
fn a_vm_of_firecracker_outlives_the_processes_that_bring_its_pages() {
    for seed in rotating_seeds("PAGEFERRY_RECEIVE_KILLS", 1, 15) {
        let Some(mut hosts) = hosts_with(32 << 20, Quirk::Right, Quirk::Right) else {
            return;
        };
        let mut random = Random::new(seed);
        let migrate = hosts.migrate_slowly();
        for _ in 0..6 {
            std::thread::sleep(Duration::from_micros(random.below(60_000)));
            kill(&mut hosts.receive);
            hosts.receive = receive(&hosts.dir, &hosts.address);
            hosts.receive.wait_until_said("left behind");
        }
        let sent = migrate.end();
        sent.assert_ok();
        assert!(sent.json()["reconnects"].as_u64() > Some(0), "{sent:?}");
        hosts.check_moved(seed);
    }
}

/// Kills of the sending end at seeded moments behind the hand-over. The next one goes on.
#[test]
fn a_move_of_firecracker_outlives_the_processes_that_send_its_pages() {
    for seed in rotating_seeds("PAGEFERRY_RECEIVE_KILLS", 1, 15) {
        let Some(hosts) = hosts_with(32 << 20, Quirk::Right, Quirk::Right) else {
            return;
        };
        let mut random = Random::new(seed);
        for _ in 0..5 {
            let mut migrate = hosts.migrate_slowly();
            std::thread::sleep(Duration::from_micros(random.below(40_000)));
            kill(&mut migrate);
        }
        let sent = hosts.migrate(&["--json"]).end();
        sent.assert_ok();
        assert!(sent.stderr.contains("left behind"), "seed {seed}: {sent:?}");
        // The paused copy does not move again.
        let again = hosts.migrate(&[]).end();
        again.assert_failed(17, "the VM was handed over to tcp:127.0.0.1");
        hosts.check_moved(seed);
    }
}

/// Kills of the sending end before the hand-over, also in the pause: the VM runs on by itself.
#[test]
fn a_kill_of_the_sender_before_the_hand_over_leaves_firecrackers_vm_running() {
    for seed in rotating_seeds("PAGEFERRY_RECEIVE_KILLS", 3, 15) {
        let Some(mut hosts) = hosts(Quirk::Right, Quirk::RefuseDevice) else {
            return;
        };
        let mut random = Random::new(seed);
        let mut migrate = hosts.migrate(&["--precopy-passes", "0"]);
        let behind = ["setup", "switch-over"][seed as usize % 2];
        wait_until(behind, || migrate.said_on_stderr().contains(behind));
        std::thread::sleep(Duration::from_micros(random.below(10_000)));
        kill(&mut migrate);
        wait_until("the VM to run on", || {
            !hosts.dir.path("source.pageferry").exists() && hosts.source.status().state == "Running"
        });
        let status = hosts.source.verify();
        assert_eq!(status.wrong, 0, "seed {seed}: {:?}", status.first_wrong);
    }
}

#[test]
fn a_vm_of_firecracker_that_cannot_move_has_its_exit_code() {
    let dir = Dir::new();
    let none = format!("fc:{}", dir.path("none").display());
    let to = ["--to", "127.0.0.1:1"];
    let migrate = |vm: &str| pageferry(&["migrate", "--vm", vm, to[0], to[1]]);
    migrate(&none).assert_failed(11, "cannot reach the API socket");
    migrate("fc:").assert_failed(2, "expected ch:API_SOCKET or fc:API_SOCKET");
    let Some(mut hosts) = hosts(Quirk::HugePages, Quirk::Right) else {
        return;
    };
    hosts
        .migrate(&["--preserve-source"])
        .end()
        .assert_failed(2, "--preserve-source is for VMs of Cloud Hypervisor");
    hosts
        .migrate(&[])
        .end()
        .assert_failed(17, "huge_pages is 1G: expected None");
    assert_eq!(hosts.source.status().state, "Running");
}

#[test]
fn overrides_are_for_vms_of_firecracker() {
    let receive = |more: &[&str]| {
        let mut args = vec!["receive", "--listen", "127.0.0.1:0"];
        args.extend(more);
        pageferry(&args)
    };
    let sentence = "are for VMs of Firecracker: expected --for fc:API_SOCKET";
    receive(&["--clock-realtime"]).assert_failed(2, sentence);
    let ch = ["--for", "ch:/run/ch", "--network-override", "eth0=tap7"];
    receive(&ch).assert_failed(2, sentence);
    receive(&["--vsock-path", "/run/v"]).assert_failed(2, sentence);
    let wrong = "expected IFACE=TAP, such as eth0=tap7";
    receive(&["--network-override", "eth0="]).assert_failed(2, wrong);
}
