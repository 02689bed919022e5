//! Peers of a session that leave unread what they asked for, or confirm nothing of what they get.
//! What is kept for them has a limit.

use crate::failures_destination::attempt_on as receive_from;
use crate::failures_source::{attempt, attempt_on, config};
use crate::hostile::assert_small;
use crate::scripted::source::Template;
use crate::scripted::{LONG, assert_loss, limits, within_limit};
use crate::support::{WorkloadVm, unix};
use pageferry_addr::RamPage;
use pageferry_machine::{AccessError, Engine};
use pageferry_migration::wire::{
    FrameHeader, FrameType, HEADER_BYTES, PAGE_BYTES, Role, Side, URGENT_BYTES, UrgentKind,
    UrgentMessage,
};
use pageferry_migration::{Change, DestinationVm, Settings, SourceConfig, SourceVm, Switch};
use pageferry_testkit::process::{private_kib, runs_in_child};
use pageferry_testkit::wait_until;
use pageferry_transport::channel::Connection;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// A VMM thread of the destination asks for page after page, and gives up each wait. So there are
/// more requests than vCPUs.
#[test]
fn a_source_that_reads_no_requests_loses_its_urgent_channel() {
    if runs_in_child() {
        return;
    }
    /// The pages of one access, which asks for all of them.
    const PAGES: u64 = 16;
    // More pages than the allowed requests and those in the buffers of a unix socket.
    let mut template = Template::new(Engine::Soft, 1, 400 * MIB);
    template.missing = (0..template.pages()).collect();
    let received = receive_from(
        unix(),
        &template,
        None,
        limits(LONG),
        |source, vm, there| {
            source.set_up();
            source.send_states();
            source.send(&template.switch_over());
            source.expect(FrameType::Ready);
            source.go();
            let before = private_kib();
            let mut bytes = vec![0; PAGES as usize * PAGE_BYTES];
            for first in (0..template.pages()).step_by(PAGES as usize) {
                let read = vm.ram().read(RamPage(first), &mut bytes, &|| true);
                assert!(matches!(read, Err(AccessError::Stopped(_))), "{read:?}");
            }
            wait_until("the loss", || there.status().last_loss.is_some());
            assert_small("requests", private_kib().saturating_sub(before));
            there.give_up();
        },
    );
    let loss = received.status.last_loss;
    assert_loss("requests", loss.as_deref(), "does not read");
    let vm = received.outcome.unwrap_err().vm;
    assert!(matches!(vm, DestinationVm::PausedIncomplete { .. }));
}

/// Without preemption, each requested page is a frame of its own. The peer reads all frames.
#[test]
fn a_bulk_channel_waits_for_the_receipts_of_its_frames() {
    /// The most frames without a receipt.
    const MOST: u64 = 1024;
    let vm = WorkloadVm::booted(Engine::Soft, 1, 16 * MIB);
    vm.wait_progress(vm.workload.memory_map().share_pages());
    let config = SourceConfig {
        preempt: false,
        // The push waits for some seconds after its first frame.
        settings: Settings {
            max_postcopy_bandwidth: Some(Settings::MIN_RATE),
            ..Switch::NOW.into()
        },
        ..config(0, LONG)
    };
    let attempt = attempt(&vm, &config, |peer, session| {
        peer.start();
        // From the first frame of the push on, requests are served in order.
        peer.take_frame();
        peer.missing.iter().for_each(|page| peer.ask(*page));
        // The source reads them meanwhile.
        std::thread::sleep(Duration::from_millis(500));
        let faster = Change {
            max_postcopy_bandwidth: Some(None),
            ..Change::default()
        };
        session.set(&faster).unwrap();
        while peer.frames < MOST {
            peer.take_frame();
        }
        let until = Instant::now() + Duration::from_millis(500);
        while Instant::now() < until {
            let mut head = [0; HEADER_BYTES];
            let wait = within_limit("Alive");
            peer.bulk().read_exact(&mut head, &wait).unwrap();
            let header = FrameHeader::decode(&head, Side::Source, Role::Bulk).unwrap();
            assert_eq!(header.frame_type, FrameType::Alive, "no receipt was sent");
        }
        assert!(!peer.missing.is_empty());
        peer.receipt(peer.frames);
        peer.complete();
    });
    attempt.outcome.unwrap();
}

/// Each answer without a receipt is remembered. Zero pages make many of them cheap.
#[test]
fn a_destination_that_confirms_no_answer_loses_its_connections() {
    /// The most answers without a receipt, and those that one turn of a channel brings beyond.
    const MOST: usize = 65_536 + 1024;
    let vm = WorkloadVm::booted(Engine::Soft, 1, 320 * MIB);
    let config = SourceConfig {
        push_after: Duration::MAX,
        ..config(0, LONG)
    };
    // On TCP the reset would take answers away that are unread.
    let attempt = attempt_on(unix(), &vm, &config, |peer, session| {
        peer.start();
        let missing: Vec<u64> = peer.missing.iter().copied().collect();
        assert!(missing.len() > MOST, "{} pages", missing.len());
        let pages = peer.memory_pages;
        let answered = std::thread::scope(|scope| {
            let urgent = peer.urgent();
            let reader = scope.spawn(move || answers_until_the_end(urgent, pages));
            let wait = within_limit("requests");
            for some in missing.chunks(64) {
                let requests = some
                    .iter()
                    .map(|page| UrgentMessage::request(RamPage(*page)));
                let bytes: Vec<u8> = requests.flatten().collect();
                if urgent.write_all(&bytes, &wait).is_err() {
                    break;
                }
            }
            reader.join().unwrap()
        });
        assert!((65_536..=MOST).contains(&answered), "{answered} answers");
        wait_until("the loss", || session.status().last_loss.is_some());
        session.give_up();
    });
    let loss = attempt.status.last_loss;
    assert_loss("answers", loss.as_deref(), "does not confirm");
    assert_eq!(attempt.outcome.unwrap_err().vm, SourceVm::GivenUp);
}

/// Reads answers until the source closes the channel. Returns their number.
fn answers_until_the_end(urgent: &Connection, memory_pages: u64) -> usize {
    let wait = within_limit("answers");
    let mut answers = 0;
    let mut bytes = [0; URGENT_BYTES];
    let mut page = [0; PAGE_BYTES];
    while urgent.read_exact(&mut bytes, &wait).is_ok() {
        let message = UrgentMessage::decode(&bytes, Side::Source, memory_pages).unwrap();
        match message.kind {
            UrgentKind::Page if urgent.read_exact(&mut page, &wait).is_ok() => answers += 1,
            UrgentKind::Zero => answers += 1,
            _ => {}
        }
    }
    answers
}
