//! VMs of Firecracker move, and continue with their memory.

use crate::fc::{Hosts, PAGES, route_by};
use pageferry_testkit::firecracker::Quirk;
use pageferry_testkit::shaper::Which;
use pageferry_testkit::wait_until;

/// The VM has moved, each of its pages is right, and its old process keeps it paused.
fn check_arrived(hosts: &mut Hosts, state: &str) {
    let status = hosts.target.verify();
    assert_eq!(status.wrong, 0, "{}", status.first_wrong);
    assert_eq!(status.state, state);
    assert_eq!(hosts.source.status().state, "Paused");
}

/// The VM goes on, though nobody serves its memory any more.
fn check_goes_on(hosts: &mut Hosts) {
    let touches = hosts.target.status().touches;
    wait_until("the guest to go on", || {
        hosts.target.status().touches > touches + 500
    });
    let status = hosts.target.status();
    assert_eq!(status.wrong, 0, "{}", status.first_wrong);
}

#[test]
fn a_running_vm_of_firecracker_moves_and_runs_on() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::Right) else {
        return;
    };
    wait_until("the guest to work", || hosts.source.status().touches > 500);
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    assert!(!moved.sent.unwrap().paused);
    assert_eq!(moved.received.unwrap().missing_at_start, PAGES);
    let pause = moved.pause.unwrap();
    println!("Firecracker's parts of the pause, by a double: {pause:?}");
    assert!(!pause.save.is_zero());
    check_goes_on(&mut hosts);
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
#[test]
fn pages_that_the_guest_gave_back_stay_zero() {
    let balloon = Some(300);
    let Some(mut hosts) = Hosts::with_balloon(Quirk::Right, Quirk::Right, balloon) else {
        return;
    };
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

/// Ten times, all connections are reset while pages are missing. The sending process dies too.
#[test]
fn a_move_of_firecracker_survives_ten_cuts() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::Right) else {
        return;
    };
    let shaper = hosts.slow_link();
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
    assert_eq!(status.wrong, 0, "{}", status.first_wrong);
}
