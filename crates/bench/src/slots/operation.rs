//! The operations on memory slots that are measured.
//!
//! An operation with two threads has no figure if the two never ran at once, as on one core.

use crate::schemes;

/// One operation on a map of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Operation {
    /// All slots are added to an empty map one by one. Readers see each of them. In milliseconds
    /// for all.
    SetUp,
    /// Looks up a random frame of a random slot. Each look-up takes and drops the scheme's
    /// protection.
    ByGfn,
    /// The previous operation, inside one guard or lock that is held throughout.
    ByGfnHeld,
    /// Looks up a random frame of the same slot each time. Each look-up takes and drops the
    /// protection.
    Again,
    /// The previous operation, inside one guard or lock that is held throughout.
    AgainHeld,
    /// Finds every slot with a random host address; protected per look-up.
    ByHva,
    /// Finds one slot with a random host address; protected per look-up.
    FirstByHva,
    /// Looks up a random identifier; protected per look-up.
    ById,
    /// Adds a random slot while another thread looks up frames.
    Add,
    /// Deletes a random slot while another thread looks up frames.
    Delete,
    /// Moves a random slot to a random free place while another thread looks up frames.
    Move,
    /// As [`Self::ByGfn`], while another thread deletes, adds and moves slots at full speed.
    BesideWriter,
    /// The changes of that thread.
    WriterRate,
}

impl Operation {
    /// The steps of a round. [`Self::Add`] also measures [`Self::Delete`], and
    /// [`Self::BesideWriter`] also measures [`Self::WriterRate`].
    pub(crate) const STEPS: [Self; 11] = [
        Self::SetUp,
        Self::ByGfn,
        Self::ByGfnHeld,
        Self::Again,
        Self::AgainHeld,
        Self::ByHva,
        Self::FirstByHva,
        Self::ById,
        Self::Add,
        Self::Move,
        Self::BesideWriter,
    ];
}

impl schemes::Operation for Operation {
    fn case(self) -> &'static str {
        match self {
            Self::SetUp => "slots.set_up",
            Self::ByGfn => "slots.by_gfn",
            Self::ByGfnHeld => "slots.by_gfn_held",
            Self::Again => "slots.again",
            Self::AgainHeld => "slots.again_held",
            Self::ByHva => "slots.by_hva",
            Self::FirstByHva => "slots.first_by_hva",
            Self::ById => "slots.by_id",
            Self::Add => "slots.add",
            Self::Delete => "slots.delete",
            Self::Move => "slots.move",
            Self::BesideWriter => "slots.beside_writer",
            Self::WriterRate => "slots.writer_rate",
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Self::SetUp => "ms",
            Self::WriterRate => "changes/s",
            _ => "ns",
        }
    }

    // The other thread of a change only reads. If it does not run, the changing thread notices and
    // gives no sample. So every operation counts as one of one thread.
}
