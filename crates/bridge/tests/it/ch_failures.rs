//! Processes that die or refuse at each step: where the VM is, and what both ends say.

use crate::ch::{Hosts, Moved, serve};
use pageferry_bridge::foreign::{ReceiveError, SourceError};
use pageferry_migration::{DestinationVm, SourceVm, Switch};
use pageferry_testkit::cloud_hypervisor::Quirk;
use pageferry_testkit::wait_until;

fn moved(source: Quirk, target: Quirk) -> Option<(Hosts, Moved)> {
    let mut hosts = Hosts::start(source, target)?;
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    Some((hosts, moved))
}

/// The migration failed before the hand-over, and the VM runs at its source with all its memory.
fn check_runs_on(hosts: &mut Hosts, moved: Moved, sentence: &str) {
    let error = moved.sent.expect_err("the move fails");
    match &error {
        SourceError::Vmm(_) => {}
        SourceError::Migration(failure) => assert_eq!(failure.vm, SourceVm::Runs, "{error}"),
        other => panic!("{other}"),
    }
    let received = moved.received.expect_err("the move fails");
    match &received {
        ReceiveError::Refused(_) => {}
        ReceiveError::Migration(failure) => {
            assert_eq!(failure.vm, DestinationVm::Discarded, "{received}");
        }
        other => panic!("{other}"),
    }
    let texts = format!("{error} / {received}");
    assert!(texts.contains(sentence), "{texts}");
    let status = hosts.source.outcome();
    assert!(status.outcome.starts_with("failed: "), "{status:?}");
    assert_eq!(status.state, "Running");
    let touches = status.touched();
    wait_until("the guest to go on", || {
        hosts.source.status().touched() > touches
    });
    let status = hosts.source.verify();
    assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
}

#[test]
fn a_receiver_that_fails_before_the_hand_over_leaves_the_vm_running_at_its_source() {
    for (quirk, sentence) in [
        (Quirk::MissingOnly, "its userfaultfd has no minor faults"),
        (
            Quirk::OldVersion,
            "Cloud Hypervisor 53.0.0 asks for no page that lies",
        ),
        (Quirk::RefuseConfig, "refused to take the VM's Config"),
        (
            Quirk::ReceiverDiesAtConfig,
            "while we waited for it to take the VM's Config",
        ),
        (Quirk::RefuseState, "State is refused"),
        // Behind its vCPUs, which need a page from the source.
        (Quirk::RefuseDisk, "Error opening disk: No such file"),
        (Quirk::RefuseLock, "Failed to acquire an advisory lock"),
        (Quirk::ReceiverDiesAtState, "waited for it to load State"),
    ] {
        let Some((mut hosts, moved)) = moved(Quirk::Right, quirk) else {
            return;
        };
        check_runs_on(&mut hosts, moved, sentence);
    }
}

/// The source waits for its operator. It learns at once that the receiver is gone.
#[test]
fn a_receiver_that_dies_in_pre_copy_ends_the_migration() {
    let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::Right) else {
        return;
    };
    hosts.switch = Switch::Manual;
    let route = hosts.route();
    let moved = hosts.migrate(&route, |beside| {
        wait_until("pre-copy", || beside.session.status().stage == "pre-copy");
        beside.target.kill();
    });
    check_runs_on(&mut hosts, moved, "while we waited for it to load State");
}

#[test]
fn a_sender_that_breaks_the_protocol_keeps_its_vm() {
    for (quirk, sentence) in [
        (Quirk::NoState, "sent Complete where State was due"),
        (Quirk::LongState, "has a payload of 1099511627776 bytes"),
    ] {
        let Some((mut hosts, moved)) = moved(quirk, Quirk::Right) else {
            return;
        };
        check_runs_on(&mut hosts, moved, sentence);
    }
}

/// A sender that waits for the answer to Config, and gives up or dies meanwhile.
#[test]
fn a_sender_that_leaves_ends_the_migration() {
    for (quirk, sentence) in [
        (Quirk::Abandon, "Cloud Hypervisor abandoned the migration"),
        (
            Quirk::DieAtConfig,
            "closed its connection while we waited for it to pause",
        ),
    ] {
        let Some(mut hosts) = Hosts::start(quirk, Quirk::Right) else {
            return;
        };
        // It accepts connections and says nothing, so the migration waits.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap().to_string();
        let route = pageferry_migration::Route::To(address.parse().unwrap());
        let error = hosts.send(&route).expect_err("it leaves");
        assert!(matches!(&error, SourceError::Vmm(_)), "{error}");
        assert!(error.to_string().contains(sentence), "{error}");
        if quirk == Quirk::Abandon {
            assert_eq!(hosts.source.outcome().state, "Running");
        }
    }
}

/// The VM dies with its process. Nothing arrives at the destination.
#[test]
fn a_sender_that_dies_before_the_hand_over_takes_its_vm_along() {
    let Some((mut hosts, moved)) = moved(Quirk::DieAtPause, Quirk::Right) else {
        return;
    };
    assert_eq!(hosts.source.wait().code(), Some(9));
    let error = moved.sent.expect_err("its VM is gone").to_string();
    assert!(error.contains("while we waited for it to pause"), "{error}");
    assert!(moved.received.is_err());
    assert_eq!(hosts.target.status().state, "None");
}

/// Its memory is ours by then, so the VM arrives whole.
#[test]
fn a_sender_that_dies_when_its_state_is_here_costs_nothing() {
    for quirk in [Quirk::DieAtState, Quirk::DieAtComplete] {
        let Some((mut hosts, moved)) = moved(quirk, Quirk::Right) else {
            return;
        };
        assert_eq!(hosts.source.wait().code(), Some(9));
        moved.sent.unwrap();
        serve(moved.received.unwrap()).unwrap();
        let status = hosts.target.verify();
        assert_eq!(
            (status.wrong, &status.state[..]),
            (0, "Running"),
            "{:?}",
            status.first_wrong
        );
    }
}

/// Its Cloud Hypervisor keeps the VM until the other one runs it. So the VM is where its source
/// says, whenever the receiver fails.
#[test]
fn a_receiver_that_fails_around_the_hand_over_leaves_no_doubt_where_the_vm_is() {
    for _ in 0..5 {
        let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::EarlyFault) else {
            return;
        };
        hosts.preserve = true;
        let route = hosts.route();
        let moved = hosts.migrate(&route, |_| ());
        assert!(!moved.received.map(serve).is_ok_and(|served| served.is_ok()));
        let error = moved.sent.expect_err("its receiver fails");
        match &error {
            SourceError::Migration(failure) => {
                assert_eq!(failure.vm, SourceVm::Runs, "{error}");
                assert_eq!(hosts.source.outcome().state, "Running", "{error}");
                let status = hosts.source.verify();
                assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
            }
            SourceError::GivenUp(_) => assert_eq!(hosts.source.status().state, "Paused"),
            other => panic!("{other}"),
        }
    }
}

/// The VM is lost with the receiver, and both ends say so. The source does not run it again.
#[test]
fn a_receiver_that_dies_behind_the_hand_over_is_the_end_of_the_vm() {
    for (quirk, sentence) in [
        (Quirk::ReceiverDiesAtFaults, "is gone after it asked for"),
        (
            Quirk::WrongFault,
            "a page fault names 4096 bytes at 0x4000000000000",
        ),
        (Quirk::WrongCommand, "sent Start where PageFault was due"),
    ] {
        let Some(mut hosts) = Hosts::start(Quirk::Right, quirk) else {
            return;
        };
        let route = hosts.route();
        let moved = hosts.migrate(&route, |_| ());
        let received = moved.received.map(serve);
        let text = match &received {
            Err(error) => error.to_string(),
            Ok(Err(error)) => error.to_string(),
            Ok(Ok(())) => String::new(),
        };
        assert!(text.contains(sentence), "{quirk:?}: {text}");
        // All pages may have been there by then.
        if let Err(error) = moved.sent {
            let error = error.to_string();
            let sentence = "has ended at the destination";
            assert!(error.contains(sentence), "{quirk:?}: {error}");
        }
        let status = hosts.source.outcome();
        assert_eq!(
            (&status.outcome[..], &status.state[..]),
            ("sent", "None"),
            "{quirk:?}"
        );
    }
}
