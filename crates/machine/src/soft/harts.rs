//! What the harts of a machine know of each other: who runs, and how to wake them.

use pageferry_hypervisor::KickHandle;
use pageferry_hypervisor::hart::{HartState, Interrupt, NO_DEADLINE, RunState};
use pageferry_sbi::{HartMask, HartStatus, StartError};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The first instruction of a hart, and its argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Start {
    pub(super) entry: u64,
    pub(super) opaque: u64,
}

/// The state of a hart as the others see it.
#[derive(Clone, Copy)]
enum Known {
    Started,
    Stopped,
    /// It is stopped, and its thread has not taken the start yet.
    Starting(Start),
    /// Neither field changes while the hart is suspended.
    Suspended {
        /// The interrupts that resume it, as bits of `sie`.
        by: u64,
        /// The time at which its timer resumes it, or [`NO_DEADLINE`].
        deadline: u64,
    },
    /// An interrupt ends its suspension, and its thread has not taken that yet.
    Resuming,
}

fn has(bits: u64, interrupt: Interrupt) -> bool {
    bits >> interrupt as u32 & 1 != 0
}

impl Known {
    fn of(state: &HartState) -> Self {
        match state.run_state {
            RunState::Started => Self::Started,
            RunState::Stopped => Self::Stopped,
            RunState::Suspended if state.sip & state.sie != 0 => Self::Resuming,
            RunState::Suspended => Self::Suspended {
                by: state.sie,
                deadline: if has(state.sie, Interrupt::Timer) {
                    state.stimecmp
                } else {
                    NO_DEADLINE
                },
            },
        }
    }
}

struct HartEntry {
    known: Mutex<Known>,
    handle: KickHandle,
}

impl HartEntry {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_interrupt(&self, interrupt: Interrupt, pending: bool) {
        // Under the lock: [`Harts::set`] finds either the interrupt or this change.
        let mut known = self.known();
        if pending && matches!(*known, Known::Suspended { by, .. } if has(by, interrupt)) {
            *known = Known::Resuming;
        }
        self.handle.set(interrupt, pending);
    }
}

/// The harts of one machine, in order of their ids.
pub(super) struct Harts(Box<[HartEntry]>);

impl Harts {
    /// Harts that are stopped.
    pub(super) fn new(handles: impl Iterator<Item = KickHandle>) -> Self {
        let entry = |handle| HartEntry {
            known: Mutex::new(Known::Stopped),
            handle,
        };
        Self(handles.map(entry).collect())
    }

    pub(super) fn count(&self) -> u32 {
        self.0.len() as u32
    }

    fn entry(&self, hart: u32) -> &HartEntry {
        &self.0[hart as usize]
    }

    /// Makes a software interrupt pending at the chosen harts.
    pub(super) fn interrupt(&self, harts: HartMask) {
        for (_, entry) in (0..).zip(&self.0).filter(|(id, _)| harts.has(*id)) {
            entry.set_interrupt(Interrupt::Software, true);
        }
    }

    /// Makes the external interrupt of `hart` pending or not.
    pub(super) fn set_external(&self, hart: u32, pending: bool) {
        let entry = self.entry(hart);
        entry.set_interrupt(Interrupt::External, pending);
    }

    /// Lets the thread of a stopped hart start it.
    pub(super) fn start(&self, hart: u32, start: Start) -> Result<(), StartError> {
        let entry = self.entry(hart);
        let mut known = entry.known();
        if !matches!(*known, Known::Stopped) {
            return Err(StartError::NotStopped);
        }
        *known = Known::Starting(start);
        drop(known);
        entry.handle.wake();
        Ok(())
    }

    /// The start that `hart`'s thread must carry out. The hart counts as started then.
    pub(super) fn take_start(&self, hart: u32) -> Option<Start> {
        let mut known = self.entry(hart).known();
        match *known {
            Known::Starting(start) => {
                *known = Known::Started;
                Some(start)
            }
            _ => None,
        }
    }

    /// Says what `hart` is now. Its own thread calls this. `state` returns the hart's state, with
    /// the interrupts that other threads have raised.
    pub(super) fn set(&self, hart: u32, state: impl FnOnce() -> HartState) {
        let mut known = self.entry(hart).known();
        *known = Known::of(&state());
    }

    /// The state of `hart`, when the VM's clock is at `now`.
    pub(super) fn status(&self, hart: u32, now: u64) -> HartStatus {
        match *self.entry(hart).known() {
            Known::Started => HartStatus::Started,
            Known::Stopped => HartStatus::Stopped,
            Known::Starting(_) => HartStatus::StartPending,
            Known::Suspended { deadline, .. } if now >= deadline && deadline != NO_DEADLINE => {
                HartStatus::ResumePending
            }
            Known::Suspended { .. } => HartStatus::Suspended,
            Known::Resuming => HartStatus::ResumePending,
        }
    }
}
