//! `pageferry tunnel`, with VMMs that are threads of the test.

use crate::json_document::Document;
use crate::support::{Dir, Process, ask, pageferry, status};
use pageferry_testkit::{wait_for, wait_until};
use rustix::process::Signal;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(30);

/// Two tunnels, and the sockets of their VMMs.
struct Pair {
    dir: Dir,
    near: Process,
    far: Process,
    vmm: UnixListener,
    listen: PathBuf,
}

impl Pair {
    fn start(near_flags: &[&str], far_flags: &[&str]) -> Self {
        Self::start_in(Dir::new(), near_flags, far_flags)
    }

    fn start_in(dir: Dir, near_flags: &[&str], far_flags: &[&str]) -> Self {
        let (listen, connect) = (dir.path("out"), dir.path("in"));
        let vmm = UnixListener::bind(&connect).unwrap();
        let connect = format!("unix:{}", connect.display());
        let args = ["tunnel", "--accept", "127.0.0.1:0", "--connect", &connect];
        let far = Process::start(&[&args[..], far_flags].concat(), &dir);
        let at = address_of(&far);
        let out = format!("unix:{}", listen.display());
        let args = ["tunnel", "--listen", &out, "--to", &at];
        let near = Process::start(&[&args[..], near_flags].concat(), &dir);
        near.wait_until_said("listening at ");
        Self {
            dir,
            near,
            far,
            vmm,
            listen,
        }
    }

    fn open(&self) -> (UnixStream, UnixStream) {
        let near = UnixStream::connect(&self.listen).unwrap();
        let (far, _) = self.vmm.accept().unwrap();
        for stream in [&near, &far] {
            stream.set_read_timeout(Some(LIMIT)).unwrap();
        }
        (near, far)
    }
}

/// Moves some bytes, and ends the stream in both directions.
fn use_up((mut near, mut far): (UnixStream, UnixStream)) {
    near.write_all(b"QEVM\0\0\0\x03").unwrap();
    near.shutdown(Shutdown::Write).unwrap();
    let mut got = Vec::new();
    far.read_to_end(&mut got).unwrap();
    assert_eq!(got, b"QEVM\0\0\0\x03");
    far.shutdown(Shutdown::Write).unwrap();
    near.read_to_end(&mut got).unwrap();
}

fn metrics_at(socket: &Path) -> String {
    let mut metrics = UnixStream::connect(socket).unwrap();
    metrics
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    let mut page = String::new();
    metrics.read_to_string(&mut page).unwrap();
    page
}

/// Where a far end listens.
fn address_of(far: &Process) -> String {
    let said = far.wait_until_said("listening at ");
    let at = said.split(',').next().unwrap();
    at.trim_start_matches("tcp:").to_owned()
}

#[test]
fn one_migration_is_carried_and_its_result_is_described() {
    let pair = Pair::start(&["--once", "--json"], &["--once", "--events"]);
    use_up(pair.open());
    let near = pair.near.end();
    near.assert_ok();
    let section = Document::read().section("tunnel");
    section.assert_describes(&near.json(), &[], &[]);
    let result = near.json();
    assert_eq!(result["streams"][0]["kind"], "qemu-main");
    assert_eq!(result["error"], serde_json::Value::Null);
    let far = pair.far.end();
    far.assert_ok();
    let events: Vec<serde_json::Value> = far
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(events.first().unwrap()["event"], "began");
    // A connection that comes after the session has ended is a stranger's, and told after it. Such
    // an event has an object in place of a name.
    let of_session = |event: &&serde_json::Value| event["event"].is_string();
    let last = events.iter().rfind(of_session).unwrap();
    assert_eq!(last["event"], "ended");
    assert_eq!(last["session"]["session"], result["session"]);
    drop(pair.vmm);
    std::fs::remove_file(pair.dir.path("in")).unwrap();
    pair.dir.assert_empty();
}

/// A VMM may run as another user, as libvirt's QEMU does.
#[test]
fn the_socket_of_a_vmm_has_its_owner_and_mode() {
    use std::os::unix::fs::MetadataExt;
    let mut flags = vec!["--mode", "660"];
    let is_root = rustix::process::geteuid().is_root();
    if is_root {
        flags.extend(["--owner", "65534", "--group", "65534"]);
    }
    let pair = Pair::start(&flags, &[]);
    let found = std::fs::metadata(&pair.listen).unwrap();
    assert_eq!(found.mode() & 0o777, 0o660);
    if is_root {
        assert_eq!((found.uid(), found.gid()), (65534, 65534));
    }
    let streams = pair.open();
    (&streams.0).write_all(b"QEVM").unwrap();
    (&streams.1).read_exact(&mut [0; 4]).unwrap();
    let pairs = [pair.near, pair.far];
    drop(streams);
    for process in pairs {
        process.interrupt();
        process.end();
    }
    assert!(!pair.listen.exists());
}

#[test]
fn a_tunnel_answers_as_a_vm_does() {
    let dir = Dir::new();
    let socket = dir.path("near.sock");
    let metrics = format!("unix:{}", dir.path("near.metrics").display());
    let flags = ["--control", socket.to_str().unwrap(), "--metrics", &metrics];
    let pair = Pair::start_in(dir, &flags, &[]);
    assert_eq!(status(&socket).unwrap()["state"], "waiting");
    let refused = ask(&socket, "{\"command\":\"cancel\"}\n").unwrap();
    assert_eq!(refused["error"]["kind"], "declined");
    let streams = pair.open();
    (&streams.0).write_all(b"QEVM").unwrap();
    (&streams.1).read_exact(&mut [0; 4]).unwrap();
    // The state is published from time to time.
    wait_until("the status to count the bytes", || {
        let now = status(&socket).unwrap();
        now["tunnel"]["sessions"][0]["streams"][0]["sent_bytes"] == 4
    });
    assert_eq!(status(&socket).unwrap()["state"], "carrying");
    let shown = pageferry(&["status", "--vm", socket.to_str().unwrap()]);
    shown.assert_ok();
    assert!(
        shown.stdout.contains("1 (qemu-main): 4 B sent"),
        "{}",
        shown.stdout
    );
    let watched = pageferry(&["watch", "--vm", socket.to_str().unwrap(), "--for", "100ms"]);
    watched.assert_ok();
    assert!(
        watched.stdout.contains("default: 4 B sent"),
        "{}",
        watched.stdout
    );
    for command in ["pause", "migrate", "console"] {
        let more = if command == "migrate" {
            r#","to":"127.0.0.1:1""#
        } else {
            ""
        };
        let refused = ask(&socket, &format!("{{\"command\":\"{command}\"{more}}}\n")).unwrap();
        assert_eq!(refused["error"]["kind"], "declined", "{command}");
    }
    let page = metrics_at(&pair.dir.path("near.metrics"));
    assert!(page.contains("pageferry_tunnel_sessions 1\n"), "{page}");
    assert!(
        page.contains("pageferry_tunnel_session_sent_bytes_total{route=\"default\",session=\""),
        "{page}"
    );
    // The end of the command waits for the migration.
    pair.near.signal(Signal::TERM);
    pair.near.wait_until_said("waiting for 1 migration");
    use_up(streams);
    pair.near.end().assert_ok();
    let far = pair.far;
    far.interrupt();
    far.end().assert_ok();
}

#[test]
fn streams_are_cut_when_somebody_asks_twice() {
    let pair = Pair::start(&[], &["--once"]);
    let (mut near, _far) = pair.open();
    pair.near.interrupt();
    pair.near.wait_until_said("waiting for 1 migration");
    pair.near.interrupt();
    let mut rest = Vec::new();
    near.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
    pair.near.end().assert_ok();
    pair.far
        .end()
        .assert_failed(8, "cancelled: the streams were cut");
}

#[test]
fn a_tunnel_says_why_it_cannot_carry() {
    let dir = Dir::new();
    let out = format!("unix:{}", dir.path("out").display());
    // Nobody listens there, and nobody ever will.
    let args = ["tunnel", "--listen", &out, "--to", "127.0.0.1:1", "--once"];
    let near = Process::start(&args, &dir);
    near.wait_until_said("listening at ");
    let _stream = UnixStream::connect(dir.path("out")).unwrap();
    near.end().assert_failed(6, "refused the connection");
    // No VMM at the far end.
    let nowhere = format!("unix:{}", dir.path("nowhere").display());
    let args = [
        "tunnel",
        "--accept",
        "127.0.0.1:0",
        "--connect",
        &nowhere,
        "--once",
    ];
    let far = Process::start(&args, &dir);
    let at = address_of(&far);
    let near = Process::start(&["tunnel", "--listen", &out, "--to", &at, "--once"], &dir);
    near.wait_until_said("listening at ");
    let _stream = UnixStream::connect(dir.path("out")).unwrap();
    far.end().assert_failed(11, "stream 1 cannot be opened");
    near.end()
        .assert_failed(8, "the other end of the tunnel: stream 1 cannot be opened");
    for flags in [
        &["--listen", &out][..],
        &["--to", "127.0.0.1:1"],
        &["--to", "127.0.0.1:1", "--connect", &out],
        &["--accept", "127.0.0.1:0", "--listen", &out],
        &[
            "--to",
            "127.0.0.1:1",
            "--accept",
            "127.0.0.1:0",
            "--listen",
            &out,
        ],
        &["--to", "127.0.0.1:1", "--route", "x"],
        &["--to", "127.0.0.1:1", "--listen", &out, "--window", "4k"],
    ] {
        assert_eq!(
            pageferry(&[&["tunnel"], flags].concat()).code,
            Some(2),
            "{flags:?}"
        );
    }
    for (flags, code, part) in [
        (
            &["--to", "127.0.0.1:1", "--listen", "/nowhere/x"][..],
            5,
            "does not exist",
        ),
        (
            &["--accept", "192.0.2.1:1", "--connect", &out],
            5,
            "192.0.2.1:1",
        ),
    ] {
        pageferry(&[&["tunnel"], flags].concat()).assert_failed(code, part);
    }
}

/// The destination has all of the VM, and its last word is under way.
#[test]
fn a_vm_that_may_run_at_the_destination_is_cut_by_force_only() {
    let dir = Dir::new();
    let socket = dir.path("near.sock");
    let socket = socket.to_str().unwrap().to_owned();
    let pair = Pair::start_in(dir, &["--control", &socket], &[]);
    let (mut near, mut far) = pair.open();
    near.write_all(b"QEVM").unwrap();
    far.read_exact(&mut [0; 4]).unwrap();
    let cancel = |flags: &[&str]| pageferry(&[&["cancel", "--vm", &socket], flags].concat());
    cancel(&["--route", "other"]).assert_failed(17, "no migration of those that were chosen");
    wait_until("the doubt", || {
        let now = status(socket.as_ref()).unwrap();
        now["tunnel"]["sessions"][0]["in_doubt"] == true
    });
    cancel(&["--route", "default"]).assert_failed(17, "the destination may run the VM");
    let now = status(socket.as_ref()).unwrap();
    let id = now["tunnel"]["sessions"][0]["session"].as_str().unwrap();
    // The second one declines too, and the third is by force.
    pair.near.interrupt();
    pair.near.wait_until_said("waiting for 1 migration");
    pair.near.interrupt();
    pair.near.wait_until_said("again: cut them all");
    pair.near.wait_until_said("default: cancelled");
    cancel(&["--session", id, "--force"]).assert_ok();
    assert_eq!(near.read(&mut [0]).unwrap(), 0);
    pair.near.end().assert_ok();
    pair.far.interrupt();
    pair.far.end().assert_ok();
}

/// A hundred of them wait, and one carries.
#[test]
fn routes_of_a_directory_come_and_go() {
    let dir = Dir::new();
    let of = |name: &str| {
        let path = dir.path(name);
        std::fs::create_dir(&path).unwrap();
        path
    };
    let (near_dir, far_dir) = (of("near"), of("far"));
    let unix = |path: &Path| format!("unix:{}\n", path.display());
    for number in 0..100 {
        let socket = dir.path(&format!("out-{number}"));
        std::fs::write(near_dir.join(format!("vm-{number}")), unix(&socket)).unwrap();
    }
    std::fs::write(near_dir.join("wrong"), "nowhere").unwrap();
    let metrics = format!("unix:{}", dir.path("metrics").display());
    let at_far = ["tunnel", "--accept", "127.0.0.1:0", "--route-dir"];
    let far = Process::start(&[&at_far[..], &[far_dir.to_str().unwrap()]].concat(), &dir);
    let to = address_of(&far);
    let at_near = ["tunnel", "--to", &to, "--metrics", &metrics, "--route-dir"];
    let near = Process::start(
        &[&at_near[..], &[near_dir.to_str().unwrap()]].concat(),
        &dir,
    );
    near.wait_until_said("wrong is no route: ");
    let last = dir.path("out-99");
    wait_until("the last socket", || last.exists());
    let threads = std::fs::read_dir(format!("/proc/{}/task", near.pid())).unwrap();
    let threads = threads.count();
    assert!(threads < 12, "{threads} threads for idle routes");
    let connect = dir.path("in");
    let vmm = UnixListener::bind(&connect).unwrap();
    std::fs::write(far_dir.join("vm-99"), unix(&connect)).unwrap();
    // A route that is not there is told. The far end looks once a second.
    let streams = wait_for("the route at the far end", || {
        let near = UnixStream::connect(&last).unwrap();
        near.set_read_timeout(Some(LIMIT)).unwrap();
        vmm.set_nonblocking(true).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        let (far, _) = vmm.accept().ok()?;
        far.set_nonblocking(false).unwrap();
        far.set_read_timeout(Some(LIMIT)).unwrap();
        Some((near, far))
    });
    use_up(streams);
    let ended = "pageferry_tunnel_migrations_total{route=\"vm-99\",result=\"ended\"} 1\n";
    let carried = "pageferry_tunnel_sent_bytes_total{route=\"vm-99\"} 8\n";
    wait_until("the totals", || {
        let page = metrics_at(&dir.path("metrics"));
        page.contains(ended) && page.contains(carried)
    });
    std::fs::remove_file(near_dir.join("vm-99")).unwrap();
    wait_until("the socket to go", || !last.exists());
    for process in [near, far] {
        process.interrupt();
        process.end().assert_ok();
    }
}

/// A far end that is gone is given up after two seconds in which the near end runs.
#[test]
fn time_in_which_a_tunnel_does_not_run_is_no_silence() {
    let pair = Pair::start(&["--give-up-after", "2s", "--once"], &[]);
    let (near, far) = pair.open();
    // By then the near end has heard the far one.
    (&far).write_all(&[1]).unwrap();
    (&near).read_exact(&mut [0]).unwrap();
    pair.far.signal(Signal::KILL);
    pair.near.wait_until_said("the connections broke");
    pair.near.signal(Signal::STOP);
    std::thread::sleep(Duration::from_secs(3));
    pair.near.signal(Signal::CONT);
    near.set_read_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    let read = (&near).read(&mut [0]).map_err(|why| why.kind());
    assert_eq!(read, Err(std::io::ErrorKind::WouldBlock));
    pair.near
        .end()
        .assert_failed(13, "the connections were lost for 2 s");
}
