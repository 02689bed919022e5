//! What the harts of a machine know of each other: who runs, and how to wake them.

use pageferry_hypervisor::KickHandle;
use pageferry_hypervisor::hart::{Interrupt, RunState};
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
    Is(RunState),
    /// It is stopped, and its thread has not taken the start yet.
    Starting(Start),
}

struct Entry {
    known: Mutex<Known>,
    handle: KickHandle,
}

impl Entry {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The harts of one machine, in order of their ids.
pub(super) struct Harts(Box<[Entry]>);

impl Harts {
    /// Harts that are stopped.
    pub(super) fn new(handles: impl Iterator<Item = KickHandle>) -> Self {
        let entry = |handle| Entry {
            known: Mutex::new(Known::Is(RunState::Stopped)),
            handle,
        };
        Self(handles.map(entry).collect())
    }

    pub(super) fn count(&self) -> u32 {
        self.0.len() as u32
    }

    fn entry(&self, hart: u32) -> &Entry {
        &self.0[hart as usize]
    }

    /// Makes a software interrupt pending at the chosen harts.
    pub(super) fn interrupt(&self, harts: HartMask) {
        for (_, entry) in (0..).zip(&self.0).filter(|(id, _)| harts.has(*id)) {
            entry.handle.raise(Interrupt::Software);
        }
    }

    /// Lets the thread of a stopped hart start it.
    pub(super) fn start(&self, hart: u32, start: Start) -> Result<(), StartError> {
        let entry = self.entry(hart);
        let mut known = entry.known();
        if !matches!(*known, Known::Is(RunState::Stopped)) {
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
                *known = Known::Is(RunState::Started);
                Some(start)
            }
            Known::Is(_) => None,
        }
    }

    /// Says what `hart` is now. Its own thread calls this.
    pub(super) fn set(&self, hart: u32, state: RunState) {
        *self.entry(hart).known() = Known::Is(state);
    }

    pub(super) fn status(&self, hart: u32) -> HartStatus {
        match *self.entry(hart).known() {
            Known::Is(RunState::Started) => HartStatus::Started,
            Known::Is(RunState::Stopped) => HartStatus::Stopped,
            Known::Is(RunState::Suspended) => HartStatus::Suspended,
            Known::Starting(_) => HartStatus::StartPending,
        }
    }
}
