//! Post-copy at the destination: the threads that serve faults, beside the supervisor.

use super::completion::Received;
use super::core::Core;
use super::place::Inbound;
use super::resolver::Resolver;
use super::setup::Incoming;
use super::shared::Letter;
use super::{
    Allocation, Connections, Guest, Record, Session, Supervisor, faults, precopy, switchover,
};
use crate::control::{ControlLink, LostChannels, PendingLoss};
use crate::devices::{self, DeviceStates};
use crate::error::MigrationError;
use crate::limits::Patience;
use crate::phase::{Observer, Phase};
use crate::report::PhaseStart;
use crate::session::destination::Event;
use crate::sync::{AtomicBool, Ordering};
use crate::vm::RunningVm;
use pageferry_machine::{DeliveryInUse, FaultEvents};
use pageferry_userfault::PageBitmap;
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

/// A machine that is armed, and the state of its pages.
pub(super) struct Prepared<'a> {
    core: Arc<Core>,
    events: Vec<Box<dyn FaultEvents>>,
    delivery: DeliveryInUse,
    states: DeviceStates<'a>,
}

/// The threads that serve faults.
pub(super) struct Postcopy<'s> {
    /// The streams of events, until the threads take them.
    events: Vec<Box<dyn FaultEvents>>,
    threads: Vec<ScopedJoinHandle<'s, ()>>,
    pub(super) delivery: DeliveryInUse,
}

/// The longest wait for vCPUs that a VMM has left running.
const PAUSE_LIMIT: Duration = Duration::from_secs(10);

/// Pauses the vCPUs and the devices, and arms the machine. Everything that takes memory is
/// allocated here, before the blackout.
pub(super) fn prepare<'a>(
    incoming: &Incoming,
    vm: &RunningVm<'a>,
    resolver: &Resolver,
    states: DeviceStates<'a>,
) -> Result<Prepared<'a>, MigrationError> {
    let machine = vm.machine;
    let missing = Arc::new(PageBitmap::try_new(machine.ram().pages() as usize)?);
    match &incoming.orphan {
        // Its vCPUs may run: those that need a missing page wait for it.
        Some(orphan) => {
            for (index, word) in orphan.missing.iter().enumerate() {
                missing.or_word(index, *word);
            }
        }
        // The VM's memory is not its own any more. Not every machine notices that a vCPU runs.
        None => {
            vm.vcpus.pause(PAUSE_LIMIT)?;
            devices::pause(vm.devices)?;
        }
    }
    let options = incoming.host.config.arm_options();
    let events = machine.arm_userfault(Arc::clone(&missing), options)?;
    let delivery = machine
        .delivery()
        .ok_or_else(|| MigrationError::Internal("an armed machine has no delivery".into()))?;
    let core = Arc::new(Core::new(
        Arc::clone(machine),
        missing,
        Arc::clone(&incoming.host.desk.letters),
        vm.vcpus.count(),
        incoming.setup.urgent_channels,
    )?);
    resolver.attach(Arc::clone(&core))?;
    *incoming
        .host
        .stalls
        .lock()
        .unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&core.stalls));
    Ok(Prepared {
        core,
        events,
        delivery,
        states,
    })
}

/// Ends the other threads on every path out of the scope, and the waits of threads that it does not
/// know: those of vCPUs and of the VMM. A VM that is whole has none of these.
struct Ended<'a>(&'a AtomicBool, &'a Core);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let why = "the supervisor panicked".into();
            self.1.fail(MigrationError::Internal(why));
        }
        self.1.end("the copy of the VM here was discarded");
        self.0.store(true, Ordering::Release);
        for channel in &self.1.urgent {
            channel.close();
        }
    }
}

/// Runs the session of an armed machine to its end.
pub(super) fn run<'a>(
    mut incoming: Incoming,
    vm: &RunningVm<'a>,
    prepared: Prepared<'a>,
    stop: &dyn Fn() -> bool,
    observer: &dyn Observer,
) -> Received {
    let Prepared {
        core,
        events,
        delivery,
        states,
    } = prepared;
    let limits = &incoming.host.config.limits;
    let patience = Patience::new(limits.silence);
    let begun = Inbound::try_new(&core).and_then(|inbound| {
        let allocation = Allocation::start(vm.machine.ram(), incoming.host.config.allocate)?;
        Ok((inbound, allocation))
    });
    let (inbound, allocation) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            observer.phase(Phase::Failed);
            return Err(super::completion::discarded(error));
        }
    };
    let done = AtomicBool::new(false);
    let mut control = incoming.control.take();
    if let Some(control) = &mut control {
        // The source had to wait while the machine was built.
        control.forgive_silence();
    }
    let host = Arc::clone(&incoming.host);
    host.set_open_to_owner(false);
    let outcome = std::thread::scope(|scope| {
        let _ended = Ended(&done, &core);
        let mut supervisor = Supervisor {
            host: &host,
            stop,
            scope,
            done: &done,
            state: match &incoming.orphan {
                Some(orphan) => Session::taken_over(orphan.stage()),
                None => Session::new(),
            },
            link: Connections {
                inbound: &inbound,
                patience: &patience,
                protected: control
                    .as_ref()
                    .map(ControlLink::protection)
                    .unwrap_or_default(),
                control,
                naming: None,
                bulk: Vec::new(),
                last_loss: None,
                losses: pageferry_transport::Quota::new(),
                lost: LostChannels::default(),
                pending_loss: PendingLoss::default(),
                lost_since: None,
                reconnects: 0,
            },
            guest: Guest {
                vm: *vm,
                core: &core,
                precopy: precopy::Precopy::new(allocation),
                loading: switchover::Loading::new(
                    vm.vcpus.count(),
                    states,
                    incoming.orphan.as_ref(),
                ),
                postcopy: Postcopy {
                    events,
                    threads: Vec::new(),
                    delivery,
                },
                started: Duration::ZERO,
                precopy_data: 0,
            },
            record: Record {
                observer,
                published: std::time::Instant::now(),
                phases: vec![PhaseStart {
                    phase: Phase::Setup,
                    at: incoming.began,
                }],
            },
            error: None,
            end: None,
            kept_time: std::time::Instant::now(),
            events: VecDeque::new(),
        };
        match incoming.orphan {
            None => supervisor.events.push_back(Event::Built),
            Some(_) => {
                if let Err(error) = supervisor.go_on() {
                    supervisor.fail(error);
                }
            }
        }
        supervisor.run()
    });
    drop(incoming);
    outcome
}

/// Ends the readers of bulk channels on every path out of the scope.
impl Drop for Supervisor<'_, '_, '_> {
    fn drop(&mut self) {
        for channel in &self.link.bulk {
            channel.bulk.close();
        }
    }
}

impl Supervisor<'_, '_, '_> {
    /// Starts the threads that serve faults. No vCPU runs yet.
    pub(super) fn serve_faults(&mut self) -> Result<(), MigrationError> {
        let (core, done) = (self.guest.core, self.done);
        for events in std::mem::take(&mut self.guest.postcopy.events) {
            let thread = std::thread::Builder::new()
                .name("pf-faults".into())
                .spawn_scoped(self.scope, || faults::fault_thread(core, events, done))
                .map_err(|e| MigrationError::os("cannot start a fault thread", e))?;
            self.guest.postcopy.threads.push(thread);
        }
        Ok(())
    }

    /// Starts the thread of the delivery's work beside the guest. It begins on `Go`, since it may
    /// request pages. The thread is there before, so that a host without room for it costs the
    /// migration, and not a VM that runs.
    pub(super) fn assist(&mut self) -> Result<(), MigrationError> {
        let (core, done) = (self.guest.core, self.done);
        let assist = std::thread::Builder::new()
            .name("pf-assist".into())
            .spawn_scoped(self.scope, || {
                crate::latency::lower_priority();
                let stop = || done.load(Ordering::Acquire) || core.is_over();
                if !core.wait_for_go(&stop) {
                    return;
                }
                let assisted = core
                    .machine
                    .assist_postcopy(&stop, &|page| core.fetch(page));
                if let Err(error) = assisted {
                    core.fail(error.into());
                }
            })
            .map_err(|e| MigrationError::os("cannot start a thread", e))?;
        self.guest.postcopy.threads.push(assist);
        Ok(())
    }

    /// Wakes the thread of [`Self::assist`].
    pub(super) fn wake_assist(&self) {
        if let Some(assist) = self.guest.postcopy.threads.last() {
            assist.thread().unpark();
        }
    }

    /// Ends the threads that serve faults. No vCPU needs them any more.
    pub(super) fn end_fault_threads(&mut self) {
        self.done.store(true, Ordering::Release);
        self.guest.core.sleepers.wake_all();
        for thread in self.guest.postcopy.threads.drain(..) {
            // Its panic message was printed.
            let _ = thread.join();
        }
    }

    /// Forgets letters about the pages.
    pub(super) fn forget_letters(&self) {
        while let Some(letter) = self.host.desk.letters.take() {
            if let Letter::Arrived(_, connection) = letter {
                connection.shutdown();
            }
        }
    }
}
