//! `pageferry pager share`, and a pager that reads from it.

use crate::support::certificates::{Authority, Now, SideFlags};
use crate::support::{Dir, Process, pageferry};
use pageferry_testkit::firecracker::{Config, Double, Fields, Task, write_memory_file};
use pageferry_testkit::wait_until;
use rustix::process::Signal;

const MIB: u64 = 1 << 20;
const SEED: u64 = 31;

fn all<'a>(parts: &[&'a str], flags: &'a [String]) -> Vec<&'a str> {
    let flags = flags.iter().map(String::as_str);
    parts.iter().copied().chain(flags).collect()
}

#[test]
fn a_vm_starts_from_a_snapshot_of_another_host_and_outlives_both_processes() {
    let authority = Authority::new("test");
    let here = authority.issue(&["here"], Now);
    let there = authority.issue(&["there"], Now);
    let (here, there) = (here.flags("there"), there.flags("here"));
    let dir = Dir::new();
    let shared = dir.path("shared");
    std::fs::create_dir_all(shared.join("web")).unwrap();
    write_memory_file(&shared.join("web/memory"), SEED, 6 * MIB / 4096).unwrap();
    let config = Config {
        seed: SEED,
        regions: vec![4 * MIB, 2 * MIB],
        vcpus: 2,
        ..Config::default()
    };
    let Some(mut double) = Double::start(&config) else {
        return;
    };
    let directory = shared.to_str().unwrap();
    let share = |at: &str| {
        let args = ["pager", "share", "--listen", at, "--directory", directory];
        let process = Process::start(&all(&args, &there), &dir);
        let address = process.wait_until_said("sharing at ");
        (process, address)
    };
    let (server, address) = share("127.0.0.1:0");
    let memory = format!("pageferry://{address}/web/memory");
    let socket = dir.path("vm.sock");
    let run = ["pager", "run", "--json", "--memory", &memory, "--socket"];
    let run = all(&[&run[..], &[socket.to_str().unwrap()]].concat(), &here);
    let pager = Process::start(&run, &dir);
    pager.wait_until_said("waiting for a VMM at ");
    double.connect(&socket, Fields::Both).unwrap();
    double.run();
    pager.wait_until_said("serving process ");
    let goes_on = |double: &mut Double| {
        let before = double.status().touches;
        wait_until("every vCPU to touch 20 pages more", || {
            let now = double.status().touches;
            let mut both = now.iter().zip(&before);
            both.all(|(now, before)| *now >= before + 20)
        });
    };
    goes_on(&mut double);
    for process in [server, pager] {
        process.signal(Signal::KILL);
        process.end();
    }
    let (server, _) = share(&address);
    let pager = Process::start(&run, &dir);
    pager.wait_until_said("serving process ");
    goes_on(&mut double);
    double.pause();
    double.perform(Task::VerifyAll);
    let status = double.status();
    assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
    assert!(double.quit().success());
    let ended = pager.end();
    ended.assert_ok();
    assert_eq!(ended.json()["vm"]["missing"], 0);
    server.interrupt();
    server.end().assert_ok();
}

#[test]
fn a_pager_says_why_it_cannot_read_from_another_host() {
    let authority = Authority::new("test");
    let here = authority.issue(&["here"], Now);
    let there = authority.issue(&["there"], Now);
    let (here, there) = (here.flags("there"), there.flags("here"));
    let dir = Dir::new();
    let memory = dir.path("memory");
    std::fs::write(&memory, vec![7; 8192]).unwrap();
    let named = format!("web/memory={}", memory.display());
    let args = ["pager", "share", "--listen", "127.0.0.1:0", &named];
    let server = Process::start(&all(&args, &there), &dir);
    let address = server.wait_until_said("sharing at ");
    let socket = dir.path("socket");
    let run = |memory: &str, flags: &[String]| {
        let socket = socket.to_str().unwrap();
        let args = ["pager", "run", "--memory", memory, "--socket", socket];
        Process::start(&all(&args, flags), &dir).end()
    };
    let absent = format!("pageferry://{address}/web/other");
    run(&absent, &here).assert_failed(2, "no file is shared under this name");
    let right = format!("pageferry://{address}/web/memory");
    run(&right, &[]).assert_failed(2, "the destination requires TLS");
    let wrong = "pageferry://192.0.2.1:7440/web/memory";
    run(wrong, &[]).assert_failed(2, "plain TCP to 192.0.2.1:7440 would show");
    run("pageferry://nowhere/web", &here).assert_failed(2, "expected pageferry://HOST:PORT/NAME");
    let mut no_key = here.clone();
    no_key[3] = memory.to_str().unwrap().to_owned();
    run(&right, &no_key).assert_failed(2, "has no private key");
    server.interrupt();
    server.end().assert_ok();
}

#[test]
fn nothing_is_shared_unprotected_or_by_accident() {
    let dir = Dir::new();
    let memory = dir.path("memory");
    std::fs::write(&memory, vec![7; 8192]).unwrap();
    let named = format!("memory={}", memory.display());
    let share = |more: &[&str]| pageferry(&[&["pager", "share"], more].concat());
    share(&["--listen", "0.0.0.0:0", &named]).assert_failed(2, "or --insecure");
    share(&["--listen", "127.0.0.1:0", "memory=/nowhere/file"]).assert_failed(2, "No such file");
    share(&["--listen", "127.0.0.1:0", "../x=/etc/hostname"]).assert_failed(2, "is no name");
    share(&["--listen", "nowhere", &named]).assert_failed(2, "the port is missing");
    let link_local = ["--listen", "[fe80::1]:0", &named];
    share(&link_local).assert_failed(2, "a link-local address needs its zone");
    for usage in [
        &["--listen", "127.0.0.1:0"][..],
        &["--listen", "127.0.0.1:0", "no-file"],
    ] {
        assert_eq!(share(usage).code, Some(2));
    }
    let insecure = [
        "pager",
        "share",
        "--listen",
        "0.0.0.0:0",
        "--insecure",
        &named,
    ];
    let server = Process::start(&insecure, &dir);
    server.wait_until_said("sharing at ");
    server.interrupt();
    server.end().assert_ok();
}
