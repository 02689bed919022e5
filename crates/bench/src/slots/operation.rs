//! The operations on memory slots that are measured.
//!
//! An operation with two threads has no figure if the two never ran at once, as on one core.

use serde::Serialize;

/// One operation on a map of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
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
    /// The changes of that thread, in thousands per second.
    WriterRate,
}

impl Operation {
    /// All operations, in the order of the table's columns.
    pub(crate) const ALL: [Self; 13] = [
        Self::SetUp,
        Self::ByGfn,
        Self::ByGfnHeld,
        Self::Again,
        Self::AgainHeld,
        Self::ByHva,
        Self::FirstByHva,
        Self::ById,
        Self::Add,
        Self::Delete,
        Self::Move,
        Self::BesideWriter,
        Self::WriterRate,
    ];

    /// A heading of at most seven characters.
    pub(crate) const fn heading(self) -> &'static str {
        match self {
            Self::SetUp => "set-up",
            Self::ByGfn => "gfn",
            Self::ByGfnHeld => "held",
            Self::Again => "again",
            Self::AgainHeld => "held",
            Self::ByHva => "hva",
            Self::FirstByHva => "first",
            Self::ById => "id",
            Self::Add => "add",
            Self::Delete => "delete",
            Self::Move => "move",
            Self::BesideWriter => "busy",
            Self::WriterRate => "writer",
        }
    }

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

impl crate::Operation for Operation {
    fn name(self) -> &'static str {
        match self {
            Self::SetUp => "set-up",
            Self::ByGfn => "look-up by gfn",
            Self::ByGfnHeld => "look-up by gfn, guard held",
            Self::Again => "look-up in the same slot",
            Self::AgainHeld => "look-up in the same slot, guard held",
            Self::ByHva => "look-up by hva",
            Self::FirstByHva => "look-up by hva, first only",
            Self::ById => "look-up by id",
            Self::Add => "add",
            Self::Delete => "delete",
            Self::Move => "move",
            Self::BesideWriter => "look-up while another thread writes",
            Self::WriterRate => "changes of that writer",
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Self::SetUp => "ms",
            Self::WriterRate => "k/s",
            _ => "ns",
        }
    }

    fn threads(self) -> u32 {
        // The other thread of a change only reads. If it does not run, the changing thread notices
        // and gives no sample.
        1
    }
}
