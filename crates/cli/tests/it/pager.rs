//! `pageferry pager`, with a double of Firecracker as the VMM.

use crate::support::{Dir, Ended, PAGEFERRY, Process, is_alive};
use pageferry_testkit::firecracker::{Config, Double, Fields, Task, write_memory_file};
use pageferry_testkit::wait_until;
use rustix::process::Signal;
use serde_json::Value;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;
const SEED: u64 = 29;

/// A memory file, and a VM that expects its contents. `None` if userfaultfd is not usable here.
struct Vm {
    double: Double,
    memory: PathBuf,
    socket: PathBuf,
}

impl Vm {
    fn start(dir: &Dir) -> Option<Self> {
        let regions = vec![4 * MIB, 2 * MIB];
        let (memory, socket) = (dir.path("memory"), dir.path("vm.sock"));
        write_memory_file(&memory, SEED, 6 * MIB / 4096).unwrap();
        let double = Double::start(&Config {
            seed: SEED,
            regions,
            vcpus: 2,
            balloon_us: Some(500),
            ..Config::default()
        })?;
        Some(Self {
            double,
            memory,
            socket,
        })
    }

    /// The flags that name its memory and its socket.
    fn flags(&self) -> [String; 4] {
        let path = |path: &Path| path.to_str().unwrap().to_owned();
        [
            "--memory".to_owned(),
            path(&self.memory),
            "--socket".to_owned(),
            path(&self.socket),
        ]
    }

    fn connect(&mut self) {
        self.double.connect(&self.socket, Fields::Both).unwrap();
    }

    /// Waits until its vCPUs have touched more.
    #[track_caller]
    fn assert_goes_on(&mut self) {
        let touches = |vm: &mut Self| vm.double.status().touches;
        let before = touches(self);
        wait_until("every vCPU to touch 50 pages more", || {
            let now = touches(self);
            now.iter()
                .zip(&before)
                .all(|(now, before)| *now >= before + 50)
        });
    }

    /// Checks every page, and ends the VM.
    #[track_caller]
    fn assert_whole(mut self) {
        self.double.pause();
        self.double.perform(Task::VerifyAll);
        let status = self.double.status();
        assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
        assert!(self.double.quit().success());
    }
}

fn words<'a>(first: &[&'a str], more: &'a [String]) -> Vec<&'a str> {
    first
        .iter()
        .copied()
        .chain(more.iter().map(String::as_str))
        .collect()
}

/// A pager for many VMs.
struct Server {
    process: Process,
    api: String,
}

impl Server {
    fn start(dir: &Dir) -> Self {
        Self::start_by(Command::new(PAGEFERRY), dir, &[])
    }

    fn start_by(command: Command, dir: &Dir, more: &[&str]) -> Self {
        let api = dir.path("api").to_str().unwrap().to_owned();
        let args = [&["pager", "serve", "--api", &api][..], more].concat();
        let process = Process::start_by(command, &args, dir);
        process.wait_until_said("listening at ");
        Self { process, api }
    }

    fn ask(&self, command: &[&str], dir: &Dir) -> Ended {
        let args = [&["pager"], command, &["--api", &self.api]].concat();
        Process::start(&args, dir).end()
    }

    fn status(&self, name: &str, dir: &Dir) -> Value {
        self.ask(&["status", name, "--json"], dir).json()
    }

    fn kill(self) {
        self.process.signal(Signal::KILL);
        self.process.end();
    }
}

#[test]
fn one_vm_is_served_and_the_same_command_takes_it_up_again_after_a_kill() {
    let dir = Dir::new();
    let Some(mut vm) = Vm::start(&dir) else {
        return;
    };
    let flags = vm.flags();
    let args = words(&["pager", "run", "--json"], &flags);
    let first = Process::start(&args, &dir);
    first.wait_until_said("waiting for a VMM at ");
    vm.connect();
    vm.double.run();
    vm.assert_goes_on();
    first.wait_until_said("serving process ");
    first.signal(Signal::KILL);
    first.end();
    // An ordinary end leaves the VM as a kill does.
    let second = Process::start(&args, &dir);
    vm.assert_goes_on();
    second.interrupt();
    second
        .end()
        .assert_failed(9, "the same command takes it up again");
    let third = Process::start(&args, &dir);
    third.wait_until_said("serving process ");
    vm.assert_goes_on();
    let pid = vm.double.pid();
    vm.assert_whole();
    let ended = third.end();
    ended.assert_ok();
    let status = ended.json();
    assert_eq!(
        (&status["phase"], &status["vm"]["pid"]),
        (&"ended".into(), &pid.into())
    );
    assert_eq!(status["vm"]["death_of_pager"], "taken", "{status}");
    std::fs::remove_file(flags[1].as_str()).unwrap();
    dir.assert_empty();
}

#[test]
fn a_pager_that_no_vmm_asked_leaves_nothing() {
    let dir = Dir::new();
    let memory = dir.path("memory");
    std::fs::write(&memory, vec![7; 8192]).unwrap();
    let socket = dir.path("socket");
    let flags = [
        memory.to_str().unwrap(),
        "--socket",
        socket.to_str().unwrap(),
    ];
    let run = Process::start(&[&["pager", "run", "--memory"], &flags[..]].concat(), &dir);
    run.wait_until_said("waiting for a VMM at ");
    run.interrupt();
    run.end().assert_failed(9, "cancelled before a VMM came");
    let server = Server::start(&dir);
    server.process.interrupt();
    server.process.end().assert_ok();
    std::fs::remove_file(memory).unwrap();
    dir.assert_empty();
}

#[test]
fn many_vms_are_served_as_requests_say() {
    let dir = Dir::new();
    let server = Server::start(&dir);
    let Some(mut vm) = Vm::start(&dir) else {
        return;
    };
    let flags = vm.flags();
    server
        .ask(&words(&["restore", "web"], &flags), &dir)
        .assert_ok();
    assert_eq!(server.status("web", &dir)["phase"], "waiting");
    let again = server.ask(&words(&["restore", "web"], &flags), &dir);
    again.assert_failed(17, "there is a restore web already");
    vm.connect();
    wait_until("the VM to be served", || {
        server.status("web", &dir)["phase"] == "serving"
    });
    // Later a VM on a busy host may have all its pages.
    server
        .ask(&["end", "web"], &dir)
        .assert_failed(17, "pages of the VM are missing");
    vm.double.run();
    vm.assert_goes_on();
    let status = server.status("web", &dir);
    assert_eq!(status["phase"], "serving", "{status}");
    assert!(status["vm"]["resident"].as_u64().unwrap() > 0, "{status}");
    let table = server.ask(&["status"], &dir);
    table.assert_ok();
    assert!(
        table.stdout.contains("the VM outlives the pager"),
        "{table:?}"
    );
    // An upgrade: the newer pager ends the older, and takes up its VM.
    let newer = Server::start_by(Command::new(PAGEFERRY), &dir, &["--take-over"]);
    server.process.end().assert_ok();
    vm.assert_goes_on();
    assert_eq!(newer.status("web", &dir)["phase"], "serving");
    newer.ask(&["end", "web", "--kill"], &dir).assert_ok();
    newer
        .ask(&["end", "web"], &dir)
        .assert_failed(17, "there is no restore web");
    newer
        .ask(&["status", "web"], &dir)
        .assert_failed(17, "there is no restore web");
    assert!(!is_alive(vm.double.pid()), "the VM was killed");
    newer.process.interrupt();
    newer.process.end().assert_ok();
    Process::start(&["pager", "status", "--api", &newer.api], &dir)
        .end()
        .assert_failed(11, "no pager listens");
}

#[test]
fn a_vm_that_runs_is_freed_of_its_pager() {
    let dir = Dir::new();
    let server = Server::start(&dir);
    let Some(mut vm) = Vm::start(&dir) else {
        return;
    };
    let flags = vm.flags();
    server
        .ask(&words(&["restore", "web"], &flags), &dir)
        .assert_ok();
    let absent = ["set", "other", "--background", "idle"];
    server
        .ask(&absent, &dir)
        .assert_failed(17, "there is no restore other");
    vm.connect();
    vm.double.run();
    vm.assert_goes_on();
    server.kill();
    let server = Server::start(&dir);
    server
        .ask(&["set", "web", "--background", "64M"], &dir)
        .assert_ok();
    let rate = server.status("web", &dir)["restore"]["background"].clone();
    assert_eq!(rate, serde_json::json!({"rate": 64 * MIB}));
    server
        .ask(&["end", "web", "--when-loaded"], &dir)
        .assert_ok();
    server.kill();
    vm.assert_goes_on();
    vm.assert_whole();
    std::fs::remove_file(&flags[1]).unwrap();
}

#[test]
fn a_vm_starts_from_a_packed_snapshot() {
    let dir = Dir::new();
    let Some(mut vm) = Vm::start(&dir) else {
        return;
    };
    let packed = dir.path("packed").to_str().unwrap().to_owned();
    let memory = vm.memory.to_str().unwrap();
    Process::start(&["snapshot", "pack", memory, &packed], &dir)
        .end()
        .assert_ok();
    std::fs::remove_file(&vm.memory).unwrap();
    let mut flags = vm.flags();
    flags[1] = packed;
    let pager = Process::start(&words(&["pager", "run", "--packed"], &flags), &dir);
    pager.wait_until_said("waiting for a VMM at ");
    vm.connect();
    vm.double.run();
    vm.assert_goes_on();
    vm.assert_whole();
    pager.end().assert_ok();
}

#[test]
fn restores_are_watched_and_reported() {
    let dir = Dir::new();
    let server = Server::start(&dir);
    let watch = |more: &[&str]| {
        let words = [&["pager", "watch", "--api", &server.api][..], more].concat();
        Process::start(&words, &dir)
    };
    let (table, events) = (watch(&[]), watch(&["--json"]));
    let Some(mut vm) = Vm::start(&dir) else {
        return;
    };
    let flags = vm.flags();
    server
        .ask(&words(&["restore", "web"], &flags), &dir)
        .assert_ok();
    vm.connect();
    vm.double.run();
    vm.assert_goes_on();
    wait_until("a line of a VM that is served", || {
        let said = table.said();
        said.lines()
            .any(|line| line.starts_with("web") && line.contains("serving"))
    });
    table.interrupt();
    table.end().assert_ok();

    let file = dir.path("report.html");
    let report = ["report", "web", "--output", file.to_str().unwrap()];
    server.ask(&report, &dir).assert_ok();
    let page = std::fs::read_to_string(&file).unwrap();
    for part in [
        "Restore web",
        "<svg",
        "faults at hand",
        "When its pages came",
    ] {
        assert!(page.contains(part), "{part} in {page}");
    }
    server
        .ask(&["report", "absent"], &dir)
        .assert_failed(17, "there is no restore absent");

    server.ask(&["end", "web", "--kill"], &dir).assert_ok();
    wait_until("the last event", || events.said().contains("ended"));
    events.interrupt();
    let events = events.end();
    events.assert_ok();
    let events: Vec<Value> = events
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let names: Vec<_> = events.iter().map(|event| event["event"].as_str()).collect();
    assert_eq!(names, [Some("waiting"), Some("serving"), Some("ended")]);
    assert_eq!(events[1]["pid"], vm.double.pid());
}

#[test]
fn a_second_pager_on_the_directory_is_refused() {
    let dir = Dir::new();
    let server = Server::start(&dir);
    let state = format!("{}.state", server.api);
    let other = dir.path("other");
    let args = [
        "pager",
        "serve",
        "--api",
        other.to_str().unwrap(),
        "--state",
        &state,
    ];
    let pid = server.process.pid();
    Process::start(&args, &dir)
        .end()
        .assert_failed(5, &format!("process id {pid}"));
    server.kill();
    // A socket and a lock that a killed pager left are no obstacle.
    Server::start(&dir).kill();
}

/// Sends bytes to the API. Returns the answer until the connection's end.
fn exchange(api: &str, request: &[u8]) -> String {
    let mut stream = UnixStream::connect(api).unwrap();
    stream
        .set_read_timeout(Some(pageferry_testkit::LIMIT))
        .unwrap();
    // A server that has seen enough closes before it has read all.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(why) if why.kind() == ErrorKind::ConnectionReset => {}
        Err(why) => panic!("{why}"),
    }
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn malformed_requests_are_answered_and_cost_nothing() {
    let dir = Dir::new();
    let server = Server::start(&dir);
    let put = |length: usize, body: &str| {
        format!(
            "PUT /restores/a HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\
             \r\n\r\n{body}"
        )
    };
    let long = "x".repeat(1 << 20);
    let head = |bytes: usize| {
        let field = "x".repeat(bytes);
        format!("GET /restores HTTP/1.1\r\nConnection: close\r\nX: {field}\r\n\r\n")
    };
    for (request, part) in [
        (put(2, "{}"), "missing field `memory`"),
        (put(1 << 20, &long), "413"),
        (format!("GET /{long} HTTP/1.1\r\n\r\n"), "HTTP/1.1 4"),
        (head(70_000), "HTTP/1.1 431"),
        (head(17_000), "HTTP/1.1 431"),
        (head(16_000), "200 OK"),
        ("\0\0\0\0\r\n\r\n".to_owned(), "HTTP/1.1 400"),
        (
            "GET /restores HTTP/1.1\r\nConnection: close\r\n\r\n".to_owned(),
            "200 OK",
        ),
        (
            "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".to_owned(),
            "# TYPE pageferry_restore_phase gauge",
        ),
    ] {
        let answer = exchange(&server.api, request.as_bytes());
        let shown: String = request.chars().take(80).collect();
        assert!(answer.contains(part), "{shown}: {answer}");
    }
    // Silent clients are ended, and later ones are served.
    let silent: Vec<_> = (0..40).map(|_| UnixStream::connect(&server.api)).collect();
    server.ask(&["status"], &dir).assert_ok();
    drop(silent);
    server.kill();
}

#[cfg(target_arch = "x86_64")]
mod as_a_service {
    use super::*;
    use crate::support::service_filter::filtered;
    use crate::support::service_manager::Manager;
    use std::os::fd::AsRawFd;
    use std::os::unix::process::CommandExt;

    #[test]
    fn kept_descriptors_serve_where_a_filter_forbids_to_take_them() {
        let dir = Dir::new();
        let Some(mut vm) = Vm::start(&dir) else {
            return;
        };
        let manager = Manager::new(&dir);
        let mut command = filtered();
        command
            .env("NOTIFY_SOCKET", &manager.path)
            .env("FDSTORE", "16");
        command.env("WATCHDOG_USEC", "200000");
        let server = Server::start_by(command, &dir, &[]);
        manager.wait_for("READY=1");
        manager.wait_for("WATCHDOG=1");
        let flags = vm.flags();
        server
            .ask(&words(&["restore", "web"], &flags), &dir)
            .assert_ok();
        vm.connect();
        vm.double.run();
        let mut fds = manager.wait_for("FDNAME=uffd-web");
        assert_eq!(fds.len(), 1);
        let memory = manager.wait_for("FDNAME=uffd-web/memory").remove(0);
        // A name that is gone costs nothing, since the store has the file.
        std::fs::remove_file(&vm.memory).unwrap();
        vm.assert_goes_on();
        std::thread::sleep(std::time::Duration::from_secs(1));
        assert_eq!(server.status("web", &dir)["vm"]["death_of_pager"], "kept");
        server.kill();
        // As systemd does: the descriptors are numbers 3 and 4 of the new process.
        let script = format!(
            "exec 3<&0 0</dev/null 4</proc/{}/fd/{}; LISTEN_FDS=2 LISTEN_PID=$$ \
             LISTEN_FDNAMES=uffd-web:uffd-web/memory exec {PAGEFERRY} pager serve --api {}",
            std::process::id(),
            memory.as_raw_fd(),
            dir.path("api").display()
        );
        let mut command = Command::new("sh");
        crate::support::service_filter::restrict(&mut command);
        command.args(["-c", &script]).env("TMPDIR", dir.path(""));
        command
            .env("NOTIFY_SOCKET", &manager.path)
            .env("FDSTORE", "16")
            .arg0("sh");
        let again = Process::spawn_reading(command, fds.remove(0).into());
        again.wait_until_said("listening at ");
        vm.assert_goes_on();
        vm.assert_whole();
        manager.wait_for("FDSTOREREMOVE=1\nFDNAME=uffd-web");
        again.interrupt();
        manager.wait_for("STOPPING=1");
        again.end().assert_ok();
    }

    #[test]
    fn the_units_start_commands_that_there_are() {
        for unit in ["pager", "mount"] {
            let dist = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist");
            let text = std::fs::read_to_string(format!("{dist}/pageferry-{unit}.service")).unwrap();
            let value = |key: &str| {
                let mut lines = text.lines();
                lines.find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
            };
            let (program, args) = value("ExecStart").unwrap().split_once(' ').unwrap();
            assert!(program.ends_with("/pageferry"), "{program}");
            let args: Vec<&str> = args.split(' ').chain(["--help"]).collect();
            crate::support::pageferry(&args).assert_ok();
            let room = value("FileDescriptorStoreMax").unwrap().parse::<u32>();
            assert!(room.unwrap() > 0);
            match (unit, value("SystemCallFilter")) {
                // The call without which a VM is taken over only from the store.
                ("pager", Some(calls)) => {
                    assert!(calls.split(' ').any(|call| call == "pidfd_getfd"));
                }
                ("mount", None) => {
                    // They give a service a mount namespace, where VMs do not see its mount.
                    for key in [
                        "ProtectSystem",
                        "ProtectHome",
                        "PrivateTmp",
                        "PrivateDevices",
                    ] {
                        assert_eq!(value(key), None, "{key}");
                    }
                }
                (unit, calls) => panic!("{unit}: {calls:?}"),
            }
        }
    }

    #[test]
    fn a_filter_without_a_keeper_kills_nothing_and_the_risk_is_told() {
        let dir = Dir::new();
        let Some(mut vm) = Vm::start(&dir) else {
            return;
        };
        let server = Server::start_by(filtered(), &dir, &[]);
        let said = server.process.said_on_stderr();
        assert!(said.contains("a filter forbids pidfd_getfd"), "{said}");
        let flags = vm.flags();
        let restore = words(&["restore", "web"], &flags);
        server
            .ask(&[&restore[..], &["--background", "idle"]].concat(), &dir)
            .assert_ok();
        vm.connect();
        vm.double.run();
        vm.assert_goes_on();
        let status = server.status("web", &dir);
        let risk = status["vm"]["death_of_pager"]["lost"]
            .as_str()
            .unwrap_or_default();
        assert!(
            risk.contains("a filter of system calls forbids"),
            "{status}"
        );
        vm.double.pause();
        wait_until("all memory to be there", || {
            server.status("web", &dir)["vm"]["missing"] == 0
        });
        // Its VM needs no pager any more.
        server.ask(&["end", "web"], &dir).assert_ok();
        vm.double.run();
        vm.assert_goes_on();
        vm.assert_whole();
        server.kill();
    }
}

#[test]
fn recordings_are_shown_and_merged() {
    use pageferry_pager::{Fingerprint, Recording};
    let dir = Dir::new();
    let [first, second, both] = ["first", "second", "both"].map(|name| dir.path(name));
    Recording::of([8192, 0]).save(&first).unwrap();
    Recording::of([0, 4096, 1 << 20]).save(&second).unwrap();
    let command = |args: &[&Path]| {
        let mut command = Command::new(PAGEFERRY);
        command.args(["pager", "recording"]).args(args);
        command.output().unwrap()
    };
    let merged = command(&[Path::new("merge"), &both, &first, &second]);
    assert!(merged.status.success(), "{merged:?}");
    assert_eq!(merged.stdout, b"4 pages, 16 KiB\n");
    let places = Recording::load(&both).unwrap();
    assert!(places.offsets().eq([8192, 0, 4096, 1 << 20]));
    let info = command(&[Path::new("info"), &both, Path::new("--json")]);
    let info: Value = serde_json::from_slice(&info.stdout).unwrap();
    let expected = serde_json::json!({
        "pages": 4, "bytes": 16384, "runs": 2, "end": (1 << 20) + 4096, "snapshot": null,
    });
    assert_eq!(info, expected);
    for (file, bytes) in [(&first, 1 << 20), (&second, 2 << 20)] {
        let snapshot = Some(Fingerprint { bytes, sum: 7 });
        Recording::of([0]).about(snapshot).save(file).unwrap();
    }
    let refused = command(&[Path::new("merge"), &both, &first, &second]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    let info = command(&[Path::new("info"), &first, Path::new("--json")]);
    let info: Value = serde_json::from_slice(&info.stdout).unwrap();
    assert_eq!(
        info["snapshot"],
        serde_json::json!({"bytes": 1 << 20, "sum": 7})
    );

    std::fs::write(&second, b"no recording").unwrap();
    let refused = command(&[Path::new("merge"), &both, &first, &second]);
    assert_eq!(refused.status.code(), Some(7), "{refused:?}");
    assert!(places == Recording::load(&both).unwrap(), "it is as it was");
    let absent = command(&[Path::new("info"), &dir.path("absent")]);
    assert_eq!(absent.status.code(), Some(2), "{absent:?}");
}
