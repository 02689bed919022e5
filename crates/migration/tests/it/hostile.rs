//! Peers of a session that say valid messages without an end, or read nothing. They cost a bounded
//! number of bytes, threads and descriptors. Before the hand-over the session ends, and after it
//! the VM is not lost.

use crate::failures_destination::{Received, attempt_on as receive_from};
use crate::failures_source::{attempt, config};
use crate::scripted::source::{ScriptedSource, Template, urgent};
use crate::scripted::{LONG, assert_loss, encoded, first_channel, kind, limits, say, within_limit};
use crate::support::{WorkloadVm, address_of, tcp};
use pageferry_addr::RamPage;
use pageferry_machine::Engine;
use pageferry_migration::wire::{
    ChannelKey, DestinationStage, Frame, FrameType, MissingRuns, Pass, Role, Setup, SourceStage,
    UrgentMessage,
};
use pageferry_migration::{Destination, DestinationVm, SourceConfig, SourceVm};
use pageferry_testkit::handshake::{PLAIN, bulk, open, socket_of};
use pageferry_testkit::process::{descriptors, private_kib, runs_in_child, threads};
use pageferry_testkit::wait_until;
use pageferry_transport::channel::Connection;
use pageferry_transport::handshake::Identity;
use std::net::TcpStream;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// The most memory that a flood may cost here, in KiB.
const ROOM: u64 = 8 << 10;

/// The bytes of a flood: more than may be kept.
const FLOOD: usize = 12 << 20;

/// Says `bytes` again and again, until [`FLOOD`] is said or the other side closes the connection.
/// Reads nothing. Returns how much the memory of this process has grown in KiB.
fn flood(connection: &Connection, bytes: &[u8]) -> u64 {
    let before = private_kib();
    let wait = within_limit("a flood");
    for _ in 0..FLOOD / bytes.len() {
        if connection.write_all(bytes, &wait).is_err() {
            break;
        }
    }
    // What was said last is read too.
    std::thread::sleep(Duration::from_millis(300));
    private_kib().saturating_sub(before)
}

pub(crate) fn assert_small(name: &str, grown: u64) {
    eprintln!("{name}: {grown} KiB");
    assert!(grown < ROOM, "{name}: {grown} KiB");
}

fn receive(
    template: &Template,
    script: impl FnOnce(&mut ScriptedSource<'_>, &WorkloadVm, &Destination) + Send,
) -> Received {
    receive_from(tcp(), template, None, limits(LONG), script)
}

fn vm() -> WorkloadVm {
    let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    vm.wait_progress(50);
    vm
}

fn threads_named(name: &str) -> usize {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|found| found.trim_end() == name)
        .count()
}

/// Each `Again` asks for all requests, and a destination has many of them.
#[test]
fn a_source_that_wants_all_requests_again_and_reads_none() {
    if runs_in_child() {
        return;
    }
    let template = Template::new(Engine::Soft, 4, 8 * MIB);
    let received = receive(&template, |source, vm, _| {
        source.start();
        wait_until("faults", || vm.threads.failures().is_empty());
        let grown = flood(&source.control, &encoded(&Frame::Again).repeat(1000));
        assert_small("Again", grown);
        source.close();
        source.recover();
        source.complete();
    });
    received.outcome.unwrap();
    received.vm.wait_progress(16);
    received.vm.assert_verifies();
}

#[test]
fn a_source_that_cancels_again_and_again_and_reads_nothing() {
    if runs_in_child() {
        return;
    }
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let received = receive(&template, |source, _, destination| {
        source.until_ready();
        let grown = flood(&source.control, &encoded(&Frame::Cancel).repeat(1000));
        assert_small("Cancel", grown);
        destination.give_up();
    });
    assert_eq!(received.outcome.unwrap_err().vm, DestinationVm::Discarded);
}

/// Each `Drained` has an answer of its own.
#[test]
fn a_source_that_says_the_end_again_and_again_and_reads_nothing() {
    if runs_in_child() {
        return;
    }
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let missing = template.missing.len() as u64;
    let received = receive(&template, |source, _, destination| {
        source.start();
        source.push_rest();
        let drained = encoded(&Frame::Drained { missing });
        assert_small("Drained", flood(&source.control, &drained.repeat(1000)));
        wait_until("the loss", || destination.status().last_loss.is_some());
        let (stage, _) = source.resume(SourceStage::Drained);
        assert_eq!(stage, DestinationStage::Complete);
        source.send(&Frame::Complete);
        source.last_frame();
    });
    received.outcome.unwrap();
    assert_loss("Drained", received.status.last_loss.as_deref(), "read");
    received.vm.assert_verifies();
}

#[test]
fn a_source_that_only_says_that_it_lives_does_not_stop_the_clock() {
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let received = receive(&template, |source, _, destination| {
        source.start();
        let for_ever = |connection: &Connection, bytes: &[u8]| {
            let wait = within_limit("Alive");
            while connection.write_all(bytes, &wait).is_ok() {}
        };
        let source = &*source;
        std::thread::scope(|scope| {
            scope.spawn(|| for_ever(source.urgent(), &UrgentMessage::alive().repeat(4096)));
            scope.spawn(|| for_ever(&source.control, &encoded(&Frame::Alive).repeat(4096)));
            std::thread::sleep(Duration::from_millis(500));
            destination.give_up();
            // The session ends, and with it the connections.
        });
    });
    let failure = received.outcome.unwrap_err();
    assert!(matches!(failure.vm, DestinationVm::PausedIncomplete { .. }));
}

#[test]
fn a_source_that_begins_passes_without_an_end() {
    if runs_in_child() {
        return;
    }
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let received = receive(&template, |source, _, _| {
        source.set_up();
        let pass = encoded(&Frame::Pass(Pass { pass: 7, pages: 1 }));
        assert_small("Pass", flood(&source.control, &pass.repeat(1000)));
        source.send_pass();
        source.send_states();
        source.send(&template.switch_over());
        source.expect(FrameType::Ready);
        source.go();
        source.complete();
    });
    let report = received.outcome.unwrap();
    assert!(report.phases.len() < 200, "{}", report.phases.len());
    received.vm.assert_verifies();
}

/// Channels that are opened in place of open ones, and closed.
#[test]
fn a_source_that_opens_channels_without_an_end() {
    if runs_in_child() {
        return;
    }
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let received = receive(&template, |source, _, _| {
        source.start();
        let before = (descriptors(), threads());
        let mut held = Vec::new();
        for incarnation in 2..300 {
            for key in [bulk(0, 1, incarnation), urgent(0, 1, incarnation)] {
                held.push(source.dial(key).unwrap());
            }
        }
        wait_until("the last ones to be taken", || {
            descriptors() <= before.0 + held.len() + 4
        });
        assert!(threads() <= before.1 + 2, "{} threads", threads());
        source.close();
        source.recover();
        source.complete();
    });
    received.outcome.unwrap();
    received.vm.assert_verifies();
}

/// Everything at once: all channels that there can be, strangers, and sessions that say nothing.
#[test]
fn a_destination_has_few_threads_and_descriptors_for_all_its_peers() {
    if runs_in_child() {
        return;
    }
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let before = (descriptors(), threads(), private_kib());
    let received = receive(&template, |source, _, destination| {
        let to = address_of(destination);
        let sessions: Vec<Connection> = (0..100)
            .filter_map(|_| {
                let identity = Identity::random().unwrap();
                let opened = open(&to, &PLAIN, &identity, ChannelKey::control(1));
                opened.ok().map(|opened| opened.connection)
            })
            .collect();
        source.send(&Frame::Setup(Setup {
            bulk_channels: 16,
            urgent_channels: 16,
            ..template.setup()
        }));
        source.expect(FrameType::SetupAck);
        let channels: Vec<Connection> = (0..16)
            .flat_map(|index| [bulk(index, 1, 1), urgent(index, 1, 1)])
            .map(|key| source.dial(key).unwrap())
            .collect();
        let strangers: Vec<TcpStream> = (0..300).map(|_| socket_of(&to)).collect();
        wait_until("all strangers", || destination.status().strangers >= 300);
        let held = sessions.len() + channels.len() + strangers.len() + 1;
        let open = descriptors() - before.0 - held;
        assert!(open <= 256, "{open} descriptors");
        assert!(threads() <= before.1 + 64, "{} threads", threads());
        let grown = private_kib() - before.2;
        assert!(grown <= 64 << 10, "{grown} KiB");
        source.send(&Frame::Cancel);
    });
    assert_eq!(received.outcome.unwrap_err().vm, DestinationVm::Discarded);
}

/// A destination that ends each incarnation of a channel before the source has opened it.
#[test]
fn a_destination_that_ends_channels_again_and_again() {
    if runs_in_child() {
        return;
    }
    let vm = vm();
    let attempt = attempt(&vm, &config(0, LONG), |peer, session| {
        peer.start();
        let mut bytes = Vec::new();
        for incarnation in 1..=20_000 {
            let channel = first_channel(Role::Bulk, incarnation);
            let placed = if incarnation == 1 { peer.frames } else { 0 };
            bytes.extend(encoded(&Frame::ChannelEnded { channel, placed }));
        }
        let before = private_kib();
        say(&peer.control, &bytes);
        let until = Instant::now() + Duration::from_secs(2);
        while Instant::now() < until {
            let dialling = threads_named("pf-dial");
            assert!(dialling <= 3, "{dialling} threads dial at once");
            std::thread::sleep(Duration::from_millis(2));
        }
        let grown = private_kib().saturating_sub(before);
        assert_small("ChannelEnded", grown);
        session.give_up();
    });
    assert_eq!(attempt.outcome.unwrap_err().vm, SourceVm::GivenUp);
}

/// A destination that requests one page for ever. The push, which takes the requests into account,
/// waits for the guest to be quiet. Without preemption all pages are requested again and again: the
/// push serves them in order, and waits for receipts.
#[test]
fn a_destination_that_repeats_a_request() {
    if runs_in_child() {
        return;
    }
    let vm = vm();
    for (push_after, preempt) in [
        (Duration::MAX, true),
        (Duration::ZERO, true),
        (Duration::ZERO, false),
    ] {
        let config = SourceConfig {
            push_after,
            preempt,
            ..config(0, LONG)
        };
        let attempt = attempt(&vm, &config, |peer, session| {
            peer.start();
            let pages = if preempt { 1 } else { usize::MAX };
            let pages = peer.missing.iter().rev().take(pages);
            let once: Vec<u8> = pages
                .flat_map(|page| UrgentMessage::request(RamPage(*page)))
                .collect();
            let many = once.repeat((64 << 10) / once.len());
            assert_small("requests", flood(peer.urgent(), &many));
            session.resume_here();
        });
        assert_eq!(attempt.outcome.unwrap_err().vm, SourceVm::Forced);
        vm.wait_progress(16);
    }
}

/// The second time that a page is named ends the connection. The session goes on in the next one.
#[test]
fn a_destination_that_names_pages_for_ever() {
    if runs_in_child() {
        return;
    }
    let vm = vm();
    let attempt = attempt(&vm, &config(0, LONG), |peer, _| {
        peer.start();
        peer.control.shutdown();
        peer.take_resume();
        let runs = (0..peer.memory_pages / 2).map(|n| 2 * n..2 * n + 1);
        let mut bytes = Vec::new();
        for frame in MissingRuns::frames(runs) {
            bytes.extend(encoded(&Frame::Missing(frame)));
        }
        assert_small("Missing", flood(&peer.control, &bytes));
        peer.recover();
        peer.complete();
    });
    assert_loss("Missing", attempt.status.last_loss.as_deref(), "twice");
    attempt.outcome.unwrap();
}

/// The number of times that the source connects within two seconds.
fn count_within_a_while(mut connect: impl FnMut()) -> u32 {
    let began = Instant::now();
    let mut count = 0;
    while began.elapsed() < Duration::from_secs(2) {
        connect();
        count += 1;
    }
    count
}

#[test]
fn a_destination_that_resumes_and_leaves_is_dialled_at_a_bounded_rate() {
    let vm = vm();
    let attempt = attempt(&vm, &config(0, LONG), |peer, session| {
        peer.start();
        let count = count_within_a_while(|| {
            peer.control.shutdown();
            peer.take_resume();
            peer.send_resumed(DestinationStage::Running);
        });
        eprintln!("{count} generations");
        assert!(count < 20, "{count} generations");
        session.give_up();
    });
    assert_eq!(attempt.outcome.unwrap_err().vm, SourceVm::GivenUp);
}

#[test]
fn a_destination_that_accepts_a_channel_and_leaves_is_dialled_at_a_bounded_rate() {
    let vm = vm();
    let attempt = attempt(&vm, &config(0, LONG), |peer, session| {
        peer.start();
        let mut incarnation = 1;
        let count = count_within_a_while(|| {
            let channel = first_channel(Role::Bulk, incarnation);
            peer.send(&Frame::ChannelEnded { channel, placed: 0 });
            incarnation += 1;
            peer.take_bulk(incarnation);
        });
        eprintln!("{count} incarnations");
        // About twelve, whose pauses double.
        assert!(count < 20, "{count} incarnations");
        session.give_up();
    });
    assert_eq!(attempt.outcome.unwrap_err().vm, SourceVm::GivenUp);
}

/// Before the hand-over, a destination that reads nothing ends the migration. The VM runs on.
#[test]
fn a_destination_that_names_itself_ready_twice_ends_the_migration() {
    let vm = vm();
    let attempt = attempt(&vm, &config(1, LONG), |peer, _| {
        peer.acknowledge();
        let ready = encoded(&crate::scripted::ALLOCATED);
        flood(&peer.control, &ready.repeat(1000));
    });
    let failure = attempt.outcome.unwrap_err();
    assert_eq!(
        (failure.vm, kind(&failure.error)),
        (SourceVm::Runs, "Protocol")
    );
    vm.wait_progress(16);
}
