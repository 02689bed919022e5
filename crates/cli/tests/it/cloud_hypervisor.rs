//! `migrate --vm ch:..` and `receive --for ch:..`: two doubles of Cloud Hypervisor, two processes.

use crate::support::peer::Peer;
use crate::support::{Dir, Process, pageferry, wait_during};
use pageferry_testkit::cloud_hypervisor::{Config, Double, Quirk};
use pageferry_testkit::{Random, rotating_seeds, wait_for, wait_until};
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
    let api = format!("ch:{}", dir.path("target").display());
    let listen = ["--listen", address, "--give-up-after", "2m", "--json"];
    let args = [&["receive", "--for", &api][..], &listen].concat();
    Process::start(&args, dir)
}

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
    let mut source = Double::start(&config("source", vec![bytes, bytes], source))?;
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
        let vm = format!("ch:{}", self.dir.path("source").display());
        let mut args = vec!["migrate", "--vm", &vm, "--to", &self.address];
        args.extend(flags);
        Process::start(&args, &self.dir)
    }
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

/// Kills of the receiving end at seeded moments behind the hand-over. The next one goes on.
/// `PAGEFERRY_RECEIVE_KILLS` is a range of seeds.
#[test]
fn a_vm_outlives_the_processes_that_bring_its_pages() {
    for seed in rotating_seeds("PAGEFERRY_RECEIVE_KILLS", 1, 15) {
        let Some(hosts) = hosts_with(32 << 20, Quirk::Right, Quirk::Right) else {
            return;
        };
        kill_receivers(hosts, seed);
    }
}

fn kill_receivers(mut hosts: Hosts, seed: u64) {
    let mut random = Random::new(seed);
    let flags = ["--json", "--precopy-passes", "0", "--max-bandwidth", "1M"];
    let migrate = hosts.migrate(&flags);
    wait_for("the guest to ask for pages", || {
        (hosts.target.status().faults > 4).then_some(())
    });
    for _ in 0..6 {
        std::thread::sleep(Duration::from_micros(random.below(60_000)));
        hosts.receive.signal(Signal::KILL);
        wait_for("the end of the killed process", || {
            (!hosts.receive.is_running()).then_some(())
        });
        hosts.receive = receive(&hosts.dir, &hosts.address);
        hosts.receive.wait_until_said("left behind");
    }
    let sent = migrate.end();
    sent.assert_ok();
    assert!(
        sent.json()["reconnects"].as_u64() > Some(0),
        "seed {seed}: {sent:?}"
    );
    hosts.receive.end().assert_ok();
    let status = hosts.target.verify();
    assert_eq!(
        (status.wrong, &status.state[..]),
        (0, "Running"),
        "seed {seed}: {:?}",
        status.first_wrong
    );
    assert!(status.served.is_some());
    // Nothing of ours is left beside the API socket.
    wait_for("the end of the keeper", || {
        let beside = std::fs::read_dir(hosts.dir.path("target").parent()?).ok()?;
        let ours = |name: std::ffi::OsString| name.to_string_lossy().contains("pageferry-");
        (!beside.flatten().any(|entry| ours(entry.file_name()))).then_some(())
    });
}

/// Kills of the receiving end at seeded moments of the set-up and of the switch-over: the VM is in
/// one process, and runs there.
#[test]
fn a_kill_before_the_hand_over_leaves_one_vm() {
    let mut ends = [0, 0];
    for seed in rotating_seeds("PAGEFERRY_RECEIVE_KILLS", 3, 15) {
        let Some(mut hosts) = hosts(Quirk::Right, Quirk::Right) else {
            return;
        };
        let mut random = Random::new(seed);
        let migrate = hosts.migrate(&["--json", "--precopy-passes", "0"]);
        std::thread::sleep(Duration::from_micros(random.below(45_000)));
        hosts.receive.signal(Signal::KILL);
        wait_for("the end of the killed process", || {
            (!hosts.receive.is_running()).then_some(())
        });
        let receive = receive(&hosts.dir, &hosts.address);
        let sent = migrate.end();
        let here = sent.code == Some(0);
        ends[usize::from(here)] += 1;
        let (runs, ends) = match here {
            true => (&mut hosts.target, &mut hosts.source),
            false => (&mut hosts.source, &mut hosts.target),
        };
        let status = runs.verify();
        assert_eq!(
            (status.wrong, &status.state[..]),
            (0, "Running"),
            "seed {seed}: {:?} {sent:?}",
            status.first_wrong
        );
        assert_ne!(ends.status().state, "Running", "seed {seed}: {sent:?}");
        if !here {
            receive.interrupt();
        }
        let received = receive.end();
        assert_eq!(received.code == Some(0), here, "seed {seed}: {received:?}");
    }
    println!("{} stayed and {} moved", ends[0], ends[1]);
}

/// Starts a move, and kills its process a moment after it has said something.
fn kill_sender(hosts: &Hosts, behind: &str, moment: u64) -> String {
    let flags = ["--precopy-passes", "0", "--max-bandwidth", "1M"];
    let mut migrate = hosts.migrate(&flags);
    wait_for(behind, || {
        let said = migrate.said_on_stderr().contains(behind);
        (said || !migrate.is_running()).then_some(())
    });
    std::thread::sleep(Duration::from_micros(moment));
    if migrate.is_running() {
        migrate.signal(Signal::KILL);
    }
    wait_for("the end of the killed process", || {
        (!migrate.is_running()).then_some(())
    });
    migrate.said_on_stderr()
}

/// Kills of the sending end at seeded moments behind the hand-over. The next one goes on.
#[test]
fn a_move_outlives_the_processes_that_send_its_pages() {
    for seed in rotating_seeds("PAGEFERRY_RECEIVE_KILLS", 1, 15) {
        let Some(mut hosts) = hosts_with(32 << 20, Quirk::Right, Quirk::Right) else {
            return;
        };
        let mut random = Random::new(seed);
        for kill in 0..5 {
            let said = kill_sender(&hosts, "post-copy", random.below(40_000));
            assert_eq!(
                said.contains("left behind"),
                kill > 0,
                "seed {seed}: {said}"
            );
        }
        let sent = hosts.migrate(&["--json"]).end();
        sent.assert_ok();
        assert!(sent.stderr.contains("left behind"), "seed {seed}: {sent:?}");
        assert!(
            sent.json()["blackout_ms"].is_null(),
            "seed {seed}: {sent:?}"
        );
        hosts.receive.end().assert_ok();
        let status = hosts.target.verify();
        let runs = (status.wrong, &status.state[..]);
        assert_eq!(
            runs,
            (0, "Running"),
            "seed {seed}: {:?}",
            status.first_wrong
        );
        assert!(status.served.is_some());
        assert_eq!(hosts.source.outcome().outcome, "sent", "seed {seed}");
    }
}

/// A kill of the sending end at a seeded moment of the set-up, of the switch-over or right behind
/// it: the VM runs in one process.
#[test]
fn a_kill_of_the_sender_leaves_one_vm() {
    let mut ends = [0, 0];
    for seed in rotating_seeds("PAGEFERRY_RECEIVE_KILLS", 3, 15) {
        let Some(mut hosts) = hosts_with(32 << 20, Quirk::Right, Quirk::Right) else {
            return;
        };
        let mut random = Random::new(seed);
        let behind = ["", "setup", "switch-over"][seed as usize % 3];
        kill_sender(&hosts, behind, random.below(8_000));
        let keeper = hosts.dir.path("source.pageferry");
        // A keeper whose process had not handed the VM over ends.
        let stays = |source: &mut Double| !keeper.exists() && source.status().state == "Running";
        wait_until("the keeper to end or the VM to be there", || {
            stays(&mut hosts.source) || hosts.target.status().state != "None"
        });
        let mut here = stays(&mut hosts.source);
        if !here {
            let moved = hosts.migrate(&[]).end();
            // This move may have met a keeper that was about to end.
            here = moved.code != Some(0);
            let what = format!("the VM to stay: {moved:?}");
            wait_until(&what, || !here || stays(&mut hosts.source));
        }
        ends[usize::from(!here)] += 1;
        let runs = if here {
            &mut hosts.source
        } else {
            &mut hosts.target
        };
        let status = runs.verify();
        let runs = (status.wrong, &status.state[..]);
        assert_eq!(
            runs,
            (0, "Running"),
            "seed {seed}: {:?}",
            status.first_wrong
        );
        let other = if here {
            &mut hosts.target
        } else {
            &mut hosts.source
        };
        assert_ne!(other.status().state, "Running", "seed {seed}");
    }
    println!("{} stayed and {} moved", ends[0], ends[1]);
}
