//! VMs of Cloud Hypervisor move, and continue with their memory.

use crate::ch::{Hosts, PAGES, serve};
use pageferry_migration::Switch;
use pageferry_testkit::cloud_hypervisor::Quirk;
use pageferry_testkit::shaper::{Plan, Shaper, Which};
use pageferry_testkit::wait_until;
use std::net::SocketAddr;
use std::time::Duration;

/// The VM has moved, and each of its pages is right.
fn check_arrived(hosts: &mut Hosts, state: &str) {
    assert_eq!(hosts.target.outcome().outcome, "received");
    let status = hosts.target.verify();
    assert_eq!(status.first_wrong, []);
    assert_eq!((status.wrong, status.served.is_some()), (0, true));
    assert_eq!(status.state, state);
}

#[test]
fn a_running_vm_moves_and_runs_on() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::Right) else {
        return;
    };
    let before = {
        wait_until("the guest to work", || {
            hosts.source.status().touched() > 500
        });
        hosts.source.status()
    };
    assert_eq!(before.wrong, 0, "{:?}", before.first_wrong);
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    let sent = moved.sent.unwrap();
    assert!(!sent.paused);
    let arrived = moved.received.unwrap();
    assert_eq!(arrived.0.missing_at_start, PAGES);
    serve(arrived).unwrap();
    check_arrived(&mut hosts, "Running");
    let status = hosts.source.outcome();
    assert_eq!((&status.outcome[..], &status.state[..]), ("sent", "None"));
    let touches = hosts.target.status().touched();
    wait_until("the guest to go on", || {
        hosts.target.status().touched() > touches + 500
    });
    let after = hosts.target.status();
    assert_eq!(after.wrong, 0, "{:?}", after.first_wrong);
    assert!(after.faults > 0, "the guest waited for pages: {after:?}");
}

/// Pages travel while the VM runs, and those that it did not change are confirmed.
#[test]
fn a_running_vm_moves_with_pre_copy() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::Right) else {
        return;
    };
    hosts.switch = Switch::Auto;
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    let sent = moved.sent.unwrap();
    assert!(sent.pages.precopy > 0, "{:?}", sent.pages);
    serve(moved.received.unwrap()).unwrap();
    check_arrived(&mut hosts, "Running");
    std::thread::sleep(Duration::from_millis(100));
    let status = hosts.target.status();
    assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
}

/// A process that has all pages when it answers State has no userfaultfd any more.
#[test]
fn a_process_that_has_all_pages_early_takes_the_vm() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::AllFirst) else {
        return;
    };
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    moved.sent.unwrap();
    serve(moved.received.unwrap()).unwrap();
    check_arrived(&mut hosts, "Running");
}

#[test]
fn a_paused_vm_arrives_paused() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::Right) else {
        return;
    };
    hosts.source.pause();
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    assert!(moved.sent.unwrap().paused);
    let arrived = moved.received.unwrap();
    assert!(arrived.0.paused);
    serve(arrived).unwrap();
    check_arrived(&mut hosts, "Paused");
    hosts.target.run();
    let touches = hosts.target.status().touched();
    wait_until("its owner's resume", || {
        hosts.target.status().touched() > touches
    });
    assert_eq!(hosts.target.status().wrong, 0);
}

#[test]
fn a_preserved_vm_stays_paused_at_the_source() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::Right) else {
        return;
    };
    hosts.preserve = true;
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    moved.sent.unwrap();
    serve(moved.received.unwrap()).unwrap();
    check_arrived(&mut hosts, "Running");
    let status = hosts.source.outcome();
    assert_eq!(
        (&status.outcome[..], &status.state[..]),
        ("preserved", "Paused")
    );
}

/// Ten times, all connections are reset while pages are missing. The sending process dies too.
#[test]
fn a_move_survives_ten_cuts() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::Right) else {
        return;
    };
    let to = hosts.destination.local_addrs()[0].to_string();
    let to: SocketAddr = to.trim_start_matches("tcp:").parse().unwrap();
    let plan = Plan {
        // 12 MiB would take 48 s.
        rate: Some(256 << 10),
        ..Plan::default()
    };
    let shaper = Shaper::start(to, plan).unwrap();
    let route = shaper.addr().to_string().parse().unwrap();
    let moved = hosts.migrate(&pageferry_migration::Route::To(route), |beside| {
        let pages = || beside.destination.status().pages_left;
        wait_until("the guest to run there", || {
            beside.destination.status().stage == "running"
        });
        let mut last = pages();
        for cut in 0..10 {
            // Control, bulk and urgent.
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
    serve(moved.received.unwrap()).unwrap();
    check_arrived(&mut hosts, "Running");
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(hosts.target.status().wrong, 0);
}
