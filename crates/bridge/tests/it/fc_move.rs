//! VMs of Firecracker move, and continue with their memory.

use crate::fc::{Hosts, PAGES, route_by};
use pageferry_bridge::foreign::Overrides;
use pageferry_migration::{Observer, Phase, Switch};
use pageferry_testkit::HugePages;
use pageferry_testkit::firecracker::Quirk;
use pageferry_testkit::shaper::Which;
use pageferry_testkit::wait_until;
use std::sync::Mutex;

/// The VM has moved, each of its pages is right, and its old process keeps it paused.
fn check_arrived(hosts: &mut Hosts, state: &str) {
    let status = hosts.target.verify();
    assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
    assert_eq!(status.state, state);
    assert_eq!(hosts.source.status().state, "Paused");
}

/// The VM goes on, though nobody serves its memory any more.
fn check_goes_on(hosts: &mut Hosts) {
    let touches = hosts.target.status().touched();
    wait_until("the guest to go on", || {
        hosts.target.status().touched() > touches + 500
    });
    let status = hosts.target.status();
    assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
}

#[test]
fn a_running_vm_of_firecracker_moves_and_runs_on() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::Right) else {
        return;
    };
    wait_until("the guest to work", || {
        hosts.source.status().touched() > 500
    });
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    let sent = moved.sent.unwrap();
    assert!(!sent.paused);
    // Its regions are not found.
    assert_eq!(sent.pages.precopy, 0);
    assert_eq!(moved.received.unwrap().missing_at_start, PAGES);
    let pause = moved.pause.unwrap();
    println!("Firecracker's parts of the pause, by a double: {pause:?}");
    assert!(!pause.save.is_zero());
    check_goes_on(&mut hosts);
    check_arrived(&mut hosts, "Running");
}

/// No snapshot of Firecracker has these.
#[test]
fn metadata_and_the_log_of_dirty_pages_move_too() {
    struct Notes(Mutex<Vec<String>>);
    impl Observer for Notes {
        fn phase(&self, _: Phase) {}
        fn progress(&self, _: Phase, _: u64, _: u64) {}
        fn note(&self, text: &str) {
            self.0.lock().unwrap().push(text.into());
        }
    }
    let Some(mut hosts) = Hosts::start(Quirk::Settings, Quirk::Right) else {
        return;
    };
    let notes = Notes(Mutex::default());
    let route = hosts.route();
    let mut target = hosts.receiver_options();
    let moved = hosts.migrate_told(&mut target, &route, &notes, |_| ());
    moved.sent.unwrap();
    moved.received.unwrap();
    let status = hosts.target.status();
    assert_eq!(status.loaded["track_dirty_pages"], true);
    assert_eq!(status.mmds["name"], "web");
    let notes = notes.0.into_inner().unwrap().join("\n");
    for sentence in [
        "the VM moves without its logger's settings",
        "the disk /none was not flushed",
    ] {
        assert!(notes.contains(sentence), "{notes}");
    }
}

#[test]
fn a_vm_of_firecracker_finds_other_devices_at_its_destination() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::Right) else {
        return;
    };
    let mut target = hosts.receiver_options();
    target.overrides = Overrides {
        network: vec![("eth0".into(), "tap7".into())],
        vsock: Some("/run/new.vsock".into()),
        clock_realtime: true,
    };
    let route = hosts.route();
    let moved = hosts.migrate_to(&mut target, &route, |_| ());
    moved.sent.unwrap();
    moved.received.unwrap();
    let loaded = hosts.target.status().loaded;
    let network = &loaded["network_overrides"][0];
    assert_eq!(network["host_dev_name"], "tap7", "{loaded}");
    assert_eq!(network["iface_id"], "eth0", "{loaded}");
    assert_eq!(loaded["vsock_override"]["uds_path"], "/run/new.vsock");
    assert_eq!(loaded["clock_realtime"], true, "{loaded}");
}

/// Its pages have 4 KiB at the destination.
#[test]
fn a_vm_with_huge_pages_of_a_pool_moves() {
    let Some(_pool) = HugePages::at_least(6) else {
        return;
    };
    let quirks = [Quirk::Pool, Quirk::Right];
    let Some(mut hosts) = Hosts::with(&[12 << 20], None, quirks) else {
        return;
    };
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    let sent = moved.sent.unwrap();
    assert!(sent.pages.precopy > 0, "{:?}", sent.pages);
    moved.received.unwrap();
    let loaded = hosts.target.status().loaded;
    assert_eq!(loaded["huge_pages"], "Transparent", "{loaded}");
    check_arrived(&mut hosts, "Running");
}

#[test]
fn a_paused_vm_of_firecracker_arrives_paused() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::Right) else {
        return;
    };
    hosts.source.pause();
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    assert!(moved.sent.unwrap().paused);
    assert!(moved.received.unwrap().paused);
    check_arrived(&mut hosts, "Paused");
    hosts.target.run();
    check_goes_on(&mut hosts);
}

/// The guest gives pages back before and behind the move, and while its pages arrive.
fn check_balloon(regions: &[u64]) {
    let Some(mut hosts) = Hosts::with(regions, Some(300), [Quirk::Right; 2]) else {
        return;
    };
    hosts.switch = Switch::AfterPasses(1);
    wait_until("removals", || hosts.source.status().removals > 20);
    let shaper = hosts.slow_link();
    let route = route_by(&shaper);
    let moved = hosts.migrate(&route, |_| ());
    moved.sent.unwrap();
    moved.received.unwrap();
    let removals = hosts.target.status().removals;
    assert!(removals > 20, "{removals} removals while pages arrived");
    wait_until("removals that nobody serves", || {
        hosts.target.status().removals > removals + 20
    });
    check_goes_on(&mut hosts);
    check_arrived(&mut hosts, "Running");
}

#[test]
fn pages_that_the_guest_gave_back_stay_zero() {
    check_balloon(&[8 << 20, 4 << 20]);
}

#[test]
fn pages_that_were_copied_and_then_given_back_stay_zero() {
    check_balloon(&[12 << 20]);
}

/// A VM that changes nothing: its pages travel before the pause, and are confirmed behind it.
#[test]
fn pages_travel_while_the_vm_is_not_paused_by_us() {
    let Some(mut hosts) = Hosts::with(&[12 << 20], None, [Quirk::Right; 2]) else {
        return;
    };
    wait_until("the guest to work", || {
        hosts.source.status().touched() > 500
    });
    hosts.source.pause();
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    let sent = moved.sent.unwrap();
    let pages = sent.pages;
    // The double reads a page while it loads.
    assert!(pages.urgent <= 1 && pages.background == 0, "{pages:?}");
    assert_eq!(pages.confirmed, pages.precopy, "{pages:?}");
    // A part of the double's memory is zeros.
    assert!(pages.confirmed > PAGES / 2, "{pages:?}");
    assert_eq!(moved.received.unwrap().missing_at_start, PAGES);
    check_arrived(&mut hosts, "Paused");
}

/// All pages change all the time, so most that were copied are wrong.
#[test]
fn pages_that_change_behind_their_copy_arrive_right() {
    let Some(mut hosts) = Hosts::with(&[12 << 20], None, [Quirk::Right; 2]) else {
        return;
    };
    wait_until("the guest to work", || {
        hosts.source.status().touched() > 500
    });
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    let sent = moved.sent.unwrap();
    assert!(sent.pages.precopy > PAGES / 2, "{:?}", sent.pages);
    moved.received.unwrap();
    check_goes_on(&mut hosts);
    check_arrived(&mut hosts, "Running");
}

/// Ten times, all connections are reset while pages are missing. The sending process dies too.
#[test]
fn a_move_of_firecracker_survives_ten_cuts() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::Right) else {
        return;
    };
    let shaper = hosts.slow_link();
    // All pages would take 48 s.
    shaper.throttle(Some(256 << 10));
    let route = route_by(&shaper);
    let moved = hosts.migrate(&route, |beside| {
        let pages = || beside.destination.status().pages_left;
        wait_until("the guest to run there", || {
            beside.destination.status().stage == "running"
        });
        let mut last = pages();
        for cut in 0..10 {
            wait_until("new connections, and more pages", || {
                shaper.connections().iter().filter(|c| c.open).count() >= 3 && pages() < last
            });
            assert!(pages() > 0, "all pages came before cut {cut}");
            shaper.reset(Which::All);
            last = pages();
            if cut == 4 {
                // Its memory is ours.
                beside.source.kill();
            }
        }
        shaper.throttle(None);
    });
    let sent = moved.sent.unwrap();
    assert!(sent.reconnects >= 10, "{} new connections", sent.reconnects);
    moved.received.unwrap();
    check_goes_on(&mut hosts);
    let status = hosts.target.verify();
    assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
}
