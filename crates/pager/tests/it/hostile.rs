//! Handshakes that are wrong. Each has one clear refusal and costs nothing.
#![expect(
    unsafe_code,
    reason = "maps memory and registers it with a userfaultfd"
)]

use crate::process::{Order, PagerProcess};
use crate::scene::{MIB, Scene, config, name, verify};
use pageferry_addr::Hva;
use pageferry_pager::Phase;
use pageferry_testkit::firecracker::{Double, Fields, Region, handshake_text, send_handshake};
use pageferry_testkit::process::{descriptors, runs_in_child};
use pageferry_testkit::{LIMIT, skip, wait_until};
use pageferry_userfault::uffd::{Features, RegisterMode, Userfaultfd};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;

/// An address at which nothing is mapped.
const NOWHERE: u64 = 1 << 40;

fn text(regions: &[(u64, u64, u64)], page_size: u64) -> String {
    let regions: Vec<_> = regions
        .iter()
        .map(|&(base, size, offset)| Region { base, size, offset })
        .collect();
    handshake_text(&regions, page_size, Fields::Both)
}

/// Checks that a connection was refused for a reason, on the socket and in the status.
#[track_caller]
fn assert_refused(scene: &Scene, mut stream: &UnixStream, reason: &str) {
    stream.set_read_timeout(Some(LIMIT)).expect("a limit");
    let mut answer = Vec::new();
    // Bytes that the pager has not read reset the connection, behind the answer.
    let _ = stream.read_to_end(&mut answer);
    let answer: serde_json::Value = serde_json::from_slice(&answer).expect("JSON");
    let error = answer["error"].as_str().expect("an error");
    assert!(error.contains(reason), "{error}");
    // The answer comes first.
    wait_until("the status", || {
        scene.status().fault.as_deref() == Some(error)
    });
    assert_eq!(scene.status().phase, Phase::Waiting);
}

#[test]
fn each_wrong_handshake_is_refused_and_the_next_vm_is_served() {
    if runs_in_child() {
        return;
    }
    let scene = Scene::new("hostile", config(41));
    let Some(mut double) = Double::start(&scene.config) else {
        return;
    };
    let uffd = match Userfaultfd::open(Features::EVENT_REMOVE) {
        Ok(uffd) => uffd,
        Err(why) => {
            skip("uffd", why);
            return;
        }
    };
    let other = Userfaultfd::open(Features::EVENT_REMOVE).expect("a userfaultfd");
    let null = File::open("/dev/null").expect("a file");
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses an unused address.
    let memory = unsafe {
        mmap_anonymous(std::ptr::null_mut(), 8192, access, MapFlags::PRIVATE).expect("memory")
    };
    let foreign = memory.expose_provenance() as u64;
    // SAFETY: nobody touches the mapping, which stays until the process ends.
    unsafe { other.register(Hva(foreign), 8192, RegisterMode::MISSING) }.expect("registered");

    let unread = Features::EVENT_REMOVE | Features::EVENT_FORK | Features::EVENT_UNMAP;
    let forks = Userfaultfd::open(unread).expect("a userfaultfd with CAP_SYS_PTRACE");

    let one = |size, offset| text(&[(NOWHERE, size, offset)], 4096);
    let good = one(MIB, 0);
    let beside = NOWHERE + 2 * MIB;
    let (uffd, null, forks) = (uffd.as_fd(), null.as_fd(), forks.as_fd());
    let cases: Vec<(&str, String, Vec<BorrowedFd<'_>>)> = vec![
        ("EVENT_FORK, EVENT_UNMAP, and", good.clone(), vec![forks]),
        ("0 descriptors", good.clone(), vec![]),
        ("4 descriptors", good.clone(), vec![uffd; 4]),
        ("descriptor 0 is '/dev/null'", good.clone(), vec![null]),
        ("descriptor 1 is", good.clone(), vec![uffd; 2]),
        ("is empty", one(0, 0), vec![uffd]),
        ("not aligned", one(4095, 0), vec![uffd]),
        ("behind the memory file", one(MIB, 7 * MIB), vec![uffd]),
        (
            "behind the memory file",
            one(MIB, 0_u64.wrapping_sub(4096)),
            vec![uffd],
        ),
        (
            "overlaps another in memory",
            text(&[(NOWHERE, MIB, 0), (NOWHERE + 4096, MIB, MIB)], 4096),
            vec![uffd],
        ),
        (
            "overlaps another in the memory file",
            text(&[(NOWHERE, MIB, 0), (beside, MIB, 4096)], 4096),
            vec![uffd],
        ),
        (
            "pages of 0 bytes",
            text(&[(NOWHERE, MIB, 0)], 0),
            vec![uffd],
        ),
        (
            "pages of 3 bytes",
            text(&[(NOWHERE, MIB, 0)], 3),
            vec![uffd],
        ),
        ("there are 0 regions", "[]".to_owned(), vec![uffd]),
        ("no JSON array", "no text".to_owned(), vec![uffd]),
        ("does not serve the regions", good.clone(), vec![uffd]),
        (
            "does not serve the regions",
            text(&[(foreign, 8192, 0)], 4096),
            vec![uffd],
        ),
    ];

    scene
        .pager
        .restore(&name("vm"), scene.request())
        .expect("begun");
    let socket = scene.scratch.path("socket");
    let before = descriptors();
    for (reason, text, fds) in &cases {
        let stream = send_handshake(&socket, text.as_bytes(), fds).expect("sent");
        assert_refused(&scene, &stream, reason);
    }
    too_many(&scene, &good, uffd);
    truncated(&scene, &good, uffd);
    endless(&scene);
    wait_until("all descriptors to be closed", || descriptors() == before);

    double.connect(&socket, Fields::Both).expect("connected");
    wait_until("the VM to be served", || {
        scene.status().phase == Phase::Serving
    });
    assert_eq!(scene.status().fault, None);
    verify(&mut double);
    assert!(double.quit().success());
    scene.assert_ended();
}

/// More descriptors than the pager has room for.
fn too_many(scene: &Scene, good: &str, uffd: BorrowedFd<'_>) {
    let stream = UnixStream::connect(scene.scratch.path("socket")).expect("connected");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(9))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let nine = [uffd; 9];
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&nine)));
    let bytes = [IoSlice::new(good.as_bytes())];
    sendmsg(&stream, &bytes, &mut ancillary, SendFlags::NOSIGNAL).expect("sent");
    assert_refused(scene, &stream, "more descriptors");
}

fn truncated(scene: &Scene, good: &str, uffd: BorrowedFd<'_>) {
    let socket = scene.scratch.path("socket");
    let part = &good.as_bytes()[..good.len() - 1];
    let stream = send_handshake(&socket, part, &[uffd]).expect("sent");
    stream.shutdown(Shutdown::Write).expect("closed");
    let reason = format!("ended after {} bytes", part.len());
    assert_refused(scene, &stream, &reason);
}

/// A text that would have a gigabyte.
fn endless(scene: &Scene) {
    let mut stream = UnixStream::connect(scene.scratch.path("socket")).expect("connected");
    stream.set_write_timeout(Some(LIMIT)).expect("a limit");
    stream.write_all(b"[{\"a\":\"").expect("sent");
    let mut sent = 0;
    while sent < 1 << 30 && stream.write_all(&[b'a'; 4096]).is_ok() {
        sent += 4096;
    }
    assert!(sent < 16 << 20, "{sent} bytes were taken");
    assert_refused(scene, &stream, "more than 65536 bytes");
}

#[test]
fn a_silent_peer_is_refused_after_a_while() {
    let scene = Scene::new("silent", config(42));
    scene
        .pager
        .restore(&name("vm"), scene.request())
        .expect("begun");
    let mut stream = UnixStream::connect(scene.scratch.path("socket")).expect("connected");
    stream.write_all(b"[").expect("sent");
    assert_refused(&scene, &stream, "not whole after 5s and 1 bytes");
    scene.pager.end(&name("vm"), false).expect("ended");
}

/// A pager in a PID namespace of its own has no number for the VMM.
#[test]
fn a_vmm_of_another_pid_namespace_is_refused_by_a_sentence() {
    let scene = Scene::new("namespace", config(43));
    let mut order = Order {
        directory: scene.scratch.path("inner"),
        ..Order::default()
    };
    order.restores.insert("vm".to_owned(), scene.request());
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child"]);
    let works = command.arg("true").output();
    if !works.as_ref().is_ok_and(|works| works.status.success()) {
        skip("namespaces", format!("{works:?}"));
        return;
    }
    let mut wrapper = Command::new("unshare");
    wrapper.args(["--pid", "--fork", "--kill-child"]);
    let mut pager = PagerProcess::start_by(wrapper, &order);
    pager.wait_ready();
    let stream = UnixStream::connect(scene.scratch.path("socket")).expect("connected");
    stream.set_read_timeout(Some(LIMIT)).expect("a limit");
    let mut answer = String::new();
    let _ = (&stream).read_to_string(&mut answer);
    assert!(answer.contains("another PID namespace"), "{answer}");
    pager.end();
}
