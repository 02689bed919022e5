//! A side that ends a migration before the hand-over says why on the control channel, and closes
//! all channels. Another channel may be seen to close first: networks keep no order between two.

use crate::failures_destination::attempt_on as receive_from;
use crate::failures_source::{attempt, config};
use crate::scripted::source::Template;
use crate::scripted::{LONG, encoded, kind, limits, within_limit};
use crate::support::{WorkloadVm, tcp};
use pageferry_machine::Engine;
use pageferry_migration::SourceVm;
use pageferry_migration::wire::{Frame, Text};
use pageferry_transport::channel::Connection;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// The reason comes this much later than the close of another channel.
const LATER: Duration = Duration::from_millis(60);
/// Each side waits 200 ms for it. A case whose reason came later than this is repeated.
const IN_TIME: Duration = Duration::from_millis(150);

/// Closes a channel, and says why on the control channel. Returns whether that was in time.
fn closes_and_says(channel: &Connection, control: &Connection, why: &Frame) -> bool {
    let began = Instant::now();
    channel.shutdown();
    std::thread::sleep(LATER);
    // Too late, it may find the connection closed.
    let _ = control.write_all(&encoded(why), &within_limit("the reason"));
    began.elapsed() < IN_TIME
}

#[test]
fn a_source_hears_why_its_destination_has_closed_a_channel() {
    let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    for close_urgent in [true, false] {
        let failure = loop {
            let mut in_time = false;
            let attempt = attempt(&vm, &config(1, LONG), |peer, _| {
                peer.acknowledge();
                let channel = if close_urgent {
                    peer.urgent()
                } else {
                    peer.bulk()
                };
                let why = Frame::Discarded(Text::new("its user ended it"));
                in_time = closes_and_says(channel, &peer.control, &why);
                // As a destination, it leaves the source time to read it.
                peer.last_frame();
            });
            if in_time {
                break attempt.outcome.unwrap_err();
            }
        };
        assert_eq!(failure.vm, SourceVm::Runs);
        let error = failure.error.to_string();
        assert!(error.contains("its user ended it"), "{error}");
        vm.wait_progress(16);
    }
}

/// A destination that says nothing more is lost soon.
#[test]
fn a_source_does_not_wait_long_for_a_reason() {
    let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    let attempt = attempt(&vm, &config(1, LONG), |peer, _| {
        peer.acknowledge();
        peer.urgent().shutdown();
        // The control channel stays open.
        peer.last_frame();
    });
    let failure = attempt.outcome.unwrap_err();
    assert_eq!(
        (failure.vm, kind(&failure.error)),
        (SourceVm::Runs, "LinkLost"),
        "{failure}"
    );
}

#[test]
fn a_destination_hears_why_its_source_has_closed_a_channel() {
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    for cancels in [true, false] {
        let failure = loop {
            let mut in_time = true;
            let received = receive_from(tcp(), &template, None, limits(LONG), |source, _, _| {
                source.set_up();
                if cancels {
                    in_time = closes_and_says(source.bulk(), &source.control, &Frame::Cancel);
                } else {
                    source.bulk().shutdown();
                }
                source.last_frame();
            });
            if in_time {
                break received.outcome.unwrap_err();
            }
        };
        let expected = if cancels { "PeerCancelled" } else { "LinkLost" };
        assert_eq!(kind(&failure.error), expected, "{failure}");
    }
}
