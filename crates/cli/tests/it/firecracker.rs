//! `migrate --vm fc:..` and `receive --for fc:..`: two doubles of Firecracker, two processes.

use crate::support::{Dir, Process, pageferry};
use pageferry_testkit::firecracker::{Quirk, VmmConfig, VmmDouble};

struct Hosts {
    source: VmmDouble,
    target: VmmDouble,
    receive: Process,
    address: String,
    dir: Dir,
}

/// Two doubles, and a `receive` that listens. The VM runs.
fn hosts(source: Quirk, target: Quirk) -> Option<Hosts> {
    let dir = Dir::new();
    let config = |name: &str, regions: Vec<u64>, quirk| VmmConfig {
        api: dir.path(name),
        seed: 3,
        vcpus: if regions.is_empty() { 0 } else { 2 },
        regions,
        balloon_us: None,
        quirk,
    };
    let mut source = VmmDouble::start(&config("source", vec![4 << 20, 4 << 20], source))?;
    let target = VmmDouble::start(&config("target", Vec::new(), target))?;
    source.run();
    let api = format!("fc:{}", dir.path("target").display());
    let listen = "127.0.0.1:0";
    let args = ["receive", "--for", &api, "--listen", listen, "--json"];
    let receive = Process::start(&args, &dir);
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
    let parts = "Firecracker's parts of the pause: ";
    assert!(ended.stderr.contains(parts), "{ended:?}");
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
    ended.assert_failed(12, "PUT /snapshot/load by 400: the snapshot is");
    assert_eq!(hosts.source.status().state, "Running");
    hosts.receive.wait_until_said("still listening");
    assert!(hosts.receive.is_running());
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
        .assert_failed(17, "huge_pages is 2M: expected None");
    assert_eq!(hosts.source.status().state, "Running");
}
