//! A session leaves nothing to the next one, and a supervisor that panics leaves no thread.

use crate::alone::{LeakCheck, runs_in_child};
use crate::failures_source::{config, hold};
use crate::scripted::destination::ScriptedDestination;
use crate::scripted::source::{ScriptedSource, Template};
use crate::scripted::{LONG, PATIENCE, ends_soon, limits};
use crate::support::{WorkloadVm, address_of, listen, migrate_to, receive_on, try_receive_on};
use pageferry_machine::{Backing, Engine};
use pageferry_migration::wire::{Frame, PAGE_BYTES};
use pageferry_migration::{
    DestinationConfig, Observer, Phase, Route, SourceConfig, SourceSession, migrate,
};
use pageferry_testkit::handshake::{Destination as Host, PLAIN};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;

const MIB: u64 = 1 << 20;

/// Calls a function in each phase.
struct InPhase<F>(F);

impl<F: Fn(Phase) + Send + Sync> Observer for InPhase<F> {
    fn phase(&self, phase: Phase) {
        (self.0)(phase);
    }

    fn progress(&self, _: Phase, _: u64, _: u64) {}
}

fn vm() -> WorkloadVm {
    let vm = WorkloadVm::booted(Engine::Soft, 1, 4 * MIB);
    vm.wait_progress(50);
    vm
}

#[test]
fn a_destination_that_is_given_up_between_sessions_takes_the_next_source() {
    let destination = listen(DestinationConfig::default());
    for _ in 0..2 {
        destination.give_up();
        let source = vm();
        let (sent, (there, received)) = std::thread::scope(|scope| {
            let receiver = scope.spawn(|| receive_on(Backing::Shmem, &destination));
            let to = address_of(&destination);
            let sent = migrate_to(&source, &to, &SourceConfig::default());
            (sent, receiver.join().unwrap())
        });
        sent.unwrap();
        received.unwrap();
        there.wait_progress(16);
        there.assert_verifies();
    }
}

#[test]
fn commands_that_come_too_late_have_no_effect_on_the_next_migration() {
    let session = SourceSession::new().unwrap();
    let too_late = InPhase(|phase| {
        if phase == Phase::Completed {
            session.cancel();
            session.resume_here();
        }
    });
    for _ in 0..2 {
        let destination = listen(DestinationConfig::default());
        let source = vm();
        let route = Route::To(address_of(&destination));
        let config = SourceConfig::default();
        let failed = AtomicBool::new(false);
        let sent = std::thread::scope(|scope| {
            scope.spawn(|| {
                let stop = || failed.load(Ordering::Acquire);
                try_receive_on(Backing::Shmem, &destination, &stop)
            });
            let running = source.running();
            let sent = migrate(&running, &route, b"test", &config, &session, &too_late);
            failed.store(sent.is_err(), Ordering::Release);
            sent
        });
        sent.unwrap();
    }
}

/// Panics without a backtrace, which takes seconds to print.
fn panic_at(at: Phase, phase: Phase) {
    if phase == at {
        std::panic::resume_unwind(Box::new("meant to panic"));
    }
}

fn assert_panics<T>(name: &str, thread: ScopedJoinHandle<'_, T>) {
    let outcome = ends_soon(name, || thread.join());
    assert!(outcome.is_err(), "{name} did not panic");
}

#[test]
fn a_source_that_panics_closes_its_channels() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let source = vm();
    let host = Host::with_limit(PLAIN, PATIENCE);
    let route = Route::To(host.address.clone());
    let session = SourceSession::new().unwrap();
    let panics = InPhase(|phase| panic_at(Phase::SwitchOver, phase));
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let config = config(1, LONG);
            let running = source.running();
            migrate(&running, &route, b"test", &config, &session, &panics)
        });
        let mut peer = ScriptedDestination::accept(&host);
        peer.set_up();
        peer.take_pass();
        peer.receipt(peer.frames);
        peer.last_frame();
        ends_soon("bulk", || hold(peer.bulk()));
        ends_soon("urgent", || hold(peer.urgent()));
        assert_panics("migrate", sender);
    });
}

#[test]
fn a_destination_that_panics_closes_its_channels() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Soft, 1, 4 * MIB);
    let destination = listen(DestinationConfig {
        allocate: false,
        limits: limits(LONG),
        ..DestinationConfig::default()
    });
    let vm = WorkloadVm::empty(Engine::Soft, 1, template.pages() * PAGE_BYTES as u64);
    let panics = InPhase(|phase| panic_at(Phase::Postcopy, phase));
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let incoming = destination.accept(&|| false).unwrap();
            incoming.receive(&vm.running(), &vm.resolver, &|| false, &panics)
        });
        let mut peer = ScriptedSource::connect(&template, &address_of(&destination));
        peer.until_ready();
        peer.send(&Frame::Go);
        peer.last_frame();
        ends_soon("bulk", || hold(peer.bulk()));
        ends_soon("urgent", || hold(peer.urgent()));
        assert_panics("receive", receiver);
    });
}
