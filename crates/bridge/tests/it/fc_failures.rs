//! Firecracker processes that die or refuse at each step: where the VM is, and what both ends say.

use crate::ch::Directory;
use crate::fc::{Hosts, Moved, route_by, source_at, take};
use pageferry_bridge::foreign::{Overrides, ReceiveError, ReceiverOptions, SourceError};
use pageferry_migration::{DestinationFailure, DestinationVm, SourceVm};
use pageferry_testkit::firecracker::Quirk;
use pageferry_testkit::wait_until;

fn moved(source: Quirk, target: Quirk) -> Option<(Hosts, Moved)> {
    let mut hosts = Hosts::start(source, target)?;
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    Some((hosts, moved))
}

/// The migration failed before the hand-over. Returns the words of both ends.
fn check_failed(moved: &Moved) -> String {
    let error = moved.sent.as_ref().expect_err("the move fails");
    match error {
        SourceError::Migration(failure) => assert_eq!(failure.vm, SourceVm::Runs, "{error}"),
        other => panic!("{other}"),
    }
    let received = moved.received.as_ref().expect_err("the move fails");
    match received {
        ReceiveError::Refused(_) => {}
        ReceiveError::Migration(failure) => {
            assert_eq!(failure.vm, DestinationVm::Discarded, "{received}");
        }
        other => panic!("{other}"),
    }
    format!("{error} / {received}")
}

/// The VM runs at its source with all its memory.
fn check_runs_on(hosts: &mut Hosts) {
    assert_eq!(hosts.source.status().state, "Running");
    let touches = hosts.source.status().touched();
    wait_until("the guest to go on", || {
        hosts.source.status().touched() > touches + 100
    });
    let status = hosts.source.verify();
    assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
}

#[test]
fn a_firecracker_that_fails_before_the_hand_over_leaves_the_vm_running_at_its_source() {
    for (source, target, sentence) in [
        (Quirk::RefusePause, Quirk::Right, "PATCH /vm by 400"),
        (
            Quirk::RefuseCreate,
            Quirk::Right,
            "PUT /snapshot/create by 400",
        ),
        (
            Quirk::LongState,
            Quirk::Right,
            "the state file has 10000001 bytes",
        ),
        (
            Quirk::LinkState,
            Quirk::Right,
            "Too many levels of symbolic links",
        ),
        // The size of the memory file is sealed.
        (Quirk::MoreMemory, Quirk::Right, "Operation not permitted"),
        (Quirk::Right, Quirk::RefuseLoad, "PUT /snapshot/load by 400"),
        // Behind its vCPUs, which need a page from the source.
        (Quirk::Right, Quirk::RefuseDevice, "Resource busy"),
        (Quirk::Right, Quirk::DieAtLoad, "closed its connection"),
        (
            Quirk::Right,
            Quirk::ShortHandshake,
            "its regions have 8388608 bytes, expected 12582912",
        ),
    ] {
        let Some((mut hosts, moved)) = moved(source, target) else {
            return;
        };
        let texts = check_failed(&moved);
        assert!(texts.contains(sentence), "{source:?} {target:?}: {texts}");
        check_runs_on(&mut hosts);
    }
}

/// Older versions have full snapshots only.
#[test]
fn a_firecracker_without_diff_snapshots_moves_by_full_ones() {
    let Some((mut hosts, moved)) = moved(Quirk::NoDiff, Quirk::Right) else {
        return;
    };
    moved.sent.unwrap();
    moved.received.unwrap();
    let status = hosts.target.verify();
    assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
}

/// The VM can move again after a failure, with what it has written since.
#[test]
fn a_vm_moves_after_a_failed_move() {
    let quirks = [Quirk::Right, Quirk::RefuseLoad];
    let Some(mut hosts) = Hosts::with(&[12 << 20], None, quirks) else {
        return;
    };
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    check_failed(&moved);
    check_runs_on(&mut hosts);
    let Some(mut others) = Hosts::start(Quirk::Right, Quirk::Right) else {
        return;
    };
    std::mem::swap(&mut hosts.target, &mut others.target);
    hosts.session = pageferry_migration::SourceSession::new().unwrap();
    let mut target = others.receiver_options();
    let route = hosts.route();
    let moved = hosts.migrate_to(&mut target, &route, |_| ());
    moved.sent.unwrap();
    moved.received.unwrap();
    let status = hosts.target.verify();
    assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
}

/// A paused VM stays paused.
#[test]
fn a_paused_vm_stays_paused_at_its_source_after_a_failure() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::RefuseLoad) else {
        return;
    };
    hosts.source.pause();
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    check_failed(&moved);
    assert_eq!(hosts.source.status().state, "Paused");
}

#[test]
fn a_sender_that_dies_in_its_snapshot_takes_its_vm_along() {
    let Some((mut hosts, moved)) = moved(Quirk::DieAtCreate, Quirk::Right) else {
        return;
    };
    assert_eq!(hosts.source.wait().code(), Some(9));
    let error = moved.sent.expect_err("its VM is gone").to_string();
    assert!(error.contains("the VM does not run"), "{error}");
    assert!(moved.received.is_err());
    assert_eq!(hosts.target.status().state, "Not started");
}

/// The VM is lost with the receiver, and both ends say so. The source still has it, and does not
/// run it by itself.
#[test]
fn a_receiver_that_dies_behind_the_hand_over_is_told_to_the_source() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::DieAtResume) else {
        return;
    };
    let shaper = hosts.slow_link();
    let route = route_by(&shaper);
    let moved = hosts.migrate(&route, |_| ());
    let DestinationFailure { vm, error } = match moved.received {
        Err(ReceiveError::Migration(failure)) => failure,
        other => panic!("{other:?}"),
    };
    assert_eq!(vm, DestinationVm::Gone, "{error}");
    let text = error.to_string();
    assert!(
        text.contains("closed its connection") || text.contains("has ended"),
        "{text}"
    );
    let error = moved.sent.expect_err("the destination is gone");
    let SourceError::GivenUp(failure) = &error else {
        panic!("{error}");
    };
    assert_eq!(failure.vm, SourceVm::GivenUp);
    let text = error.to_string();
    assert!(
        text.contains("has ended at the destination") && text.contains("resume it by its API"),
        "{text}"
    );
    assert_eq!(hosts.source.status().state, "Paused");
    // It is not moved again by mistake.
    let error = take(hosts.source_options()).unwrap_err().to_string();
    assert!(
        error.contains("the VM was handed over to tcp:127.0.0.1"),
        "{error}"
    );
    hosts.source.run();
    check_runs_on(&mut hosts);
}

/// An operator who knows that the destination is gone resumes the paused copy.
#[test]
fn a_vm_of_firecracker_can_be_resumed_where_it_was() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::Right) else {
        return;
    };
    let shaper = hosts.slow_link();
    let route = route_by(&shaper);
    let moved = hosts.migrate(&route, |beside| {
        wait_until("the hand-over", || {
            beside.destination.status().stage == "running"
        });
        beside.session.resume_here();
        beside.destination.give_up();
    });
    assert!(moved.received.is_err());
    let error = moved.sent.expect_err("the destination is gone");
    assert!(matches!(error, SourceError::Migration(_)), "{error}");
    check_runs_on(&mut hosts);
    // It may move again.
    drop(take(hosts.source_options()).unwrap());
}

/// Processes that no move can begin with.
#[test]
fn a_process_that_does_not_fit_is_refused_with_a_reason() {
    let Some(hosts) = Hosts::start(Quirk::HugePages, Quirk::Right) else {
        return;
    };
    let directory = Directory::new();
    std::fs::write(directory.join("file"), "").unwrap();
    let options = |name: &str| source_at(&directory.join(name));
    for (options, sentence) in [
        (hosts.source_options(), "huge_pages is 1G: expected None"),
        (hosts.target_as_source(), "the VM is Not started"),
        (options("none"), "cannot reach the API socket"),
        (options("file"), "cannot reach the API socket"),
    ] {
        let error = take(options).unwrap_err().to_string();
        assert!(error.contains(sentence), "{error}");
    }
}

/// Nothing is sent to a Firecracker of another minor version, unless one tries.
#[test]
fn another_version_is_refused_before_anything_is_sent() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::OtherVersion) else {
        return;
    };
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    let texts = check_failed(&moved);
    let sentence = "the VM is of Firecracker 1.17.0-dev, and this is Firecracker 1.15.1";
    assert!(texts.contains(sentence), "{texts}");
    assert!(moved.pause.is_none(), "it was never paused");
    hosts.session = pageferry_migration::SourceSession::new().unwrap();
    let mut target = hosts.receiver_options();
    target.any_version = true;
    let moved = hosts.migrate_to(&mut target, &route, |_| ());
    moved.sent.unwrap();
    moved.received.unwrap();
}

/// A full snapshot begins Firecracker's log of dirty pages anew.
#[test]
fn a_failed_move_says_what_the_next_diff_snapshot_lacks() {
    let Some(mut hosts) = Hosts::start(Quirk::Settings, Quirk::RefuseDevice) else {
        return;
    };
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    let error = moved.sent.unwrap_err().to_string();
    assert!(
        error.contains("take a Full snapshot before the next Diff"),
        "{error}"
    );
}

/// A process that has a VM takes none in.
#[test]
fn a_receiver_with_a_vm_refuses_another() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::Right) else {
        return;
    };
    let mut target = ReceiverOptions {
        api: hosts.source_options().api,
        keeper: None,
        any_version: false,
        overrides: Overrides::default(),
    };
    let route = hosts.route();
    let moved = hosts.migrate_to(&mut target, &route, |_| ());
    let texts = check_failed(&moved);
    assert!(texts.contains("expected Not started"), "{texts}");
    check_runs_on(&mut hosts);
}

/// Firecracker itself knows its interfaces.
#[test]
fn an_override_of_an_unknown_interface_is_refused() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::Right) else {
        return;
    };
    let mut target = hosts.receiver_options();
    target.overrides.network = vec![("eth9".into(), "tap1".into())];
    let route = hosts.route();
    let moved = hosts.migrate_to(&mut target, &route, |_| ());
    let texts = check_failed(&moved);
    assert!(texts.contains("the field network_overrides"), "{texts}");
    check_runs_on(&mut hosts);
}
