//! `migrate --vm ch:..` and `receive --for ch:..`: two doubles of Cloud Hypervisor, two processes.

use crate::support::peer::Peer;
use crate::support::vmms::{self, Hosts};
use crate::support::{Dir, Process, pageferry, wait_during};
use pageferry_testkit::cloud_hypervisor::{Config, Double, Quirk};

/// Two doubles, and a `receive` that listens. The VM runs.
fn hosts(source: Quirk, target: Quirk) -> Option<Hosts> {
    hosts_with(4 << 20, source, target)
}

/// The same, with two regions of so many bytes.
fn hosts_with(bytes: u64, source: Quirk, target: Quirk) -> Option<Hosts> {
    let dir = Dir::new();
    let config = |name: &str, regions: Vec<u64>, quirk| Config {
        api: dir.path(name),
        seed: 3,
        vcpus: 2,
        regions,
        quirk,
    };
    let source = Double::start(&config("source", vec![bytes, bytes], source))?;
    let target = Double::start(&config("target", Vec::new(), target))?;
    Some(Hosts::new("ch", dir, source, target))
}

#[test]
fn a_vm_moves_between_two_processes_and_both_report_it() {
    let Some(mut hosts) = hosts(Quirk::Right, Quirk::Right) else {
        return;
    };
    let ended = hosts.migrate(&["--json", "--precopy-passes", "0"]).end();
    ended.assert_ok();
    let sent = ended.json();
    assert_eq!(sent["engine"], "cloud-hypervisor", "{sent}");
    assert_eq!(sent["vcpus"], 2, "{sent}");
    assert_eq!(sent["memory_bytes"], 8 << 20, "{sent}");
    let received = hosts.receive.end();
    received.assert_ok();
    assert_eq!(received.json()["engine"], "cloud-hypervisor");
    let status = hosts.target.verify();
    assert_eq!((status.wrong, &status.state[..]), (0, "Running"));
    assert!(status.served.is_some());
    assert_eq!(hosts.source.outcome().outcome, "sent");
}

#[test]
fn events_are_told_line_by_line() {
    let Some(hosts) = hosts(Quirk::Right, Quirk::Right) else {
        return;
    };
    let flags = ["--events", "--precopy-passes", "0", "--preserve-source"];
    let ended = hosts.migrate(&flags).end();
    ended.assert_ok();
    let lines: Vec<serde_json::Value> = ended
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(lines.last().unwrap()["result"].is_object(), "{ended:?}");
    assert!(
        lines.iter().any(|line| line["event"].is_object()),
        "{ended:?}"
    );
    hosts.receive.end().assert_ok();
}

/// A receiver that refuses leaves the VM running, and `receive` listens on.
#[test]
fn a_refusal_is_a_sentence_and_the_vm_runs_on() {
    let Some(mut hosts) = hosts(Quirk::Right, Quirk::RefuseConfig) else {
        return;
    };
    let ended = hosts.migrate(&["--precopy-passes", "0"]).end();
    ended.assert_failed(8, "refused to take the VM's Config");
    assert_eq!(hosts.source.outcome().state, "Running");
    hosts.receive.wait_until_said("still listening");
    assert!(hosts.receive.is_running());
}

#[test]
fn what_cannot_move_has_its_exit_code() {
    let dir = Dir::new();
    let none = format!("ch:{}", dir.path("none").display());
    let to = ["--to", "127.0.0.1:1"];
    let migrate = |vm: &str| pageferry(&["migrate", "--vm", vm, to[0], to[1]]);
    migrate(&none).assert_failed(11, "cannot reach the API socket");
    migrate("ch:").assert_failed(2, "expected ch:API_SOCKET");
    for (quirk, code, part) in [
        (Quirk::NotShared, 17, "start it with --memory shared=on"),
        (
            Quirk::Version,
            7,
            "migration protocol version 7: expected 0",
        ),
    ] {
        let Some(mut hosts) = hosts(quirk, Quirk::Right) else {
            return;
        };
        hosts.migrate(&[]).end().assert_failed(code, part);
        assert_eq!(hosts.source.outcome().state, "Running");
    }
}

/// The control socket serves the migration while it waits, and `cancel` lets the VM run on.
#[test]
fn a_move_can_be_watched_and_cancelled() {
    let Some(mut hosts) = hosts(Quirk::Right, Quirk::Right) else {
        return;
    };
    // It says nothing about the VM, for which the move waits a minute.
    let (address, silent) = Peer::start(|mut peer| peer.until_closed());
    hosts.address = address;
    let mut migrate = hosts.migrate(&["--precopy-passes", "0"]);
    let name = format!("ch-{}", migrate.pid());
    let ask = |command: &str| Process::start(&[command, "--vm", &name], &hosts.dir).end();
    // Its control socket is there before the move begins.
    wait_during(&mut migrate, "the move", || {
        Some(ask("status")).filter(|ended| ended.stdout.contains("leaving"))
    });
    ask("cancel").assert_ok();
    migrate.end().assert_failed(9, "cancelled");
    silent.join().unwrap();
    assert_eq!(hosts.source.outcome().state, "Running");
}

fn large() -> Option<Hosts> {
    hosts_with(32 << 20, Quirk::Right, Quirk::Right)
}

#[test]
fn a_vm_outlives_the_processes_that_bring_its_pages() {
    vmms::outlives_receivers(large);
}

#[test]
fn a_move_outlives_the_processes_that_send_its_pages() {
    vmms::outlives_senders(large, |hosts| {
        assert_eq!(hosts.source.outcome().outcome, "sent");
    });
}

#[test]
fn a_killed_receiver_leaves_one_vm() {
    vmms::a_killed_receiver_leaves_one(|| hosts(Quirk::Right, Quirk::Right));
}

#[test]
fn a_killed_sender_leaves_one_vm() {
    vmms::a_killed_sender_leaves_one(large);
}
