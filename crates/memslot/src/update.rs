#![expect(unsafe_code, reason = "hands out the records of a change")]
//! An operation that has begun and is not committed.

use crate::table::Pending;
use crate::{Change, SlotWriter};
use core::fmt;

/// An operation that has begun. Dropping it aborts the operation and changes nothing.
#[must_use = "dropping an update aborts it"]
pub struct Update<'w, D> {
    /// `None` after the commit.
    writer: Option<&'w mut SlotWriter<D>>,
    space: usize,
}

impl<'w, D> Update<'w, D> {
    #[inline]
    pub(crate) const fn new(writer: &'w mut SlotWriter<D>, space: usize) -> Self {
        Self {
            writer: Some(writer),
            space,
        }
    }

    /// The change that the commit will make.
    #[must_use]
    pub fn change(&self) -> Change<'_, D> {
        let pending = self
            .writer
            .as_ref()
            .map(|writer| writer.state_ref().pending);
        // SAFETY: pending records are in the trees or not yet published. The writer is borrowed, so
        // it frees none.
        pending.map_or(Change::Nothing, |pending| unsafe { change_of(pending) })
    }

    /// Completes the operation. It allocates nothing and cannot fail. The records of the returned
    /// change live until the writer is used again.
    pub fn commit(mut self) -> Change<'w, D> {
        let Some(writer) = self.writer.take() else {
            return Change::Nothing;
        };
        let done = writer.commit(self.space);
        // SAFETY: the new record is in the trees, and the old one waits to be freed. The writer
        // frees nothing while the returned change borrows it.
        unsafe { change_of(done) }
    }
}

/// # Safety
/// The records live as long as the returned change.
unsafe fn change_of<'w, D>(pending: Pending<D>) -> Change<'w, D> {
    // SAFETY: as the caller promises.
    unsafe {
        match pending {
            Pending::Nothing => Change::Nothing,
            Pending::Create { new } => Change::Created { new: &*new },
            Pending::Delete { old } => Change::Deleted { old: &*old },
            Pending::Move { old, new } => Change::Moved {
                old: &*old,
                new: &*new,
            },
            Pending::Flags { old, new } => Change::FlagsChanged {
                old: &*old,
                new: &*new,
            },
        }
    }
}

impl<D> Drop for Update<'_, D> {
    fn drop(&mut self) {
        if let Some(writer) = &mut self.writer {
            writer.abort();
        }
    }
}

impl<D> fmt::Debug for Update<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Update").finish_non_exhaustive()
    }
}
