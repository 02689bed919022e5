//! `migrate --vm fc:..` and `receive --for fc:..`: two doubles of Firecracker, two processes.

use crate::support::vmms::{self, Hosts};
use crate::support::{Dir, pageferry};
use pageferry_testkit::firecracker::{Config, Double, Quirk};

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
    let source = Double::start(&config("source", vec![bytes], source))?;
    let target = Double::start(&config("target", Vec::new(), target))?;
    Some(Hosts::new("fc", dir, source, target))
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

/// A balloon works meanwhile.
fn large() -> Option<Hosts> {
    hosts_with(32 << 20, Quirk::Right, Quirk::Right)
}

#[test]
fn a_vm_of_firecracker_outlives_the_processes_that_bring_its_pages() {
    vmms::outlives_receivers(large);
}

#[test]
fn a_move_of_firecracker_outlives_the_processes_that_send_its_pages() {
    vmms::outlives_senders(large, |hosts| {
        // The paused copy does not move again.
        let again = hosts.migrate(&[]).end();
        again.assert_failed(17, "the VM was handed over to tcp:127.0.0.1");
        assert_eq!(hosts.source.status().state, "Paused");
    });
}

#[test]
fn a_killed_receiver_leaves_one_vm_of_firecracker() {
    vmms::a_killed_receiver_leaves_one(|| hosts(Quirk::Right, Quirk::Right));
}

/// Half of the destinations refuse the VM, behind the pause.
#[test]
fn a_killed_sender_leaves_one_vm_of_firecracker() {
    vmms::a_killed_sender_leaves_one(large);
    vmms::a_killed_sender_leaves_one(|| hosts(Quirk::Right, Quirk::RefuseDevice));
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
