//! What is measured of every scheme of memory slots.
//!
//! An operation with two threads has no figure where the two never ran at once, as on one core.

use serde::Serialize;

/// One operation on a map of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// All slots added to an empty map, one by one, each seen by readers; in milliseconds for all.
    SetUp,
    /// A random frame of a random slot; each look-up takes and drops the scheme's protection.
    ByGfn,
    /// The same inside one guard or lock that is held throughout.
    ByGfnHeld,
    /// A random frame of one and the same slot; each look-up takes and drops the protection.
    Again,
    /// The same inside one guard or lock that is held throughout.
    AgainHeld,
    /// Every slot that has a random host address; protected per look-up.
    ByHva,
    /// The first slot found that has a random host address; protected per look-up.
    FirstByHva,
    /// A random identifier; protected per look-up.
    ById,
    /// A random slot added, while another thread looks up.
    Add,
    /// A random slot deleted, while another thread looks up.
    Delete,
    /// A random slot moved to a random free place, while another thread looks up.
    Move,
    /// As [`Self::ByGfn`], while another thread deletes, adds and moves as fast as it can.
    BesideWriter,
    /// The changes of that thread, in thousands a second.
    WriterRate,
}

impl Operation {
    /// All operations, in the order of a table's columns.
    pub const ALL: [Self; 13] = [
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

    /// What one measurement covers: [`Self::Delete`] is measured with [`Self::Add`], and the
    /// writer's rate with the look-ups beside it.
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
            Self::Again => "same slot again",
            Self::AgainHeld => "same slot again, guard held",
            Self::ByHva => "by hva",
            Self::FirstByHva => "by hva, first only",
            Self::ById => "by id",
            Self::Add => "add",
            Self::Delete => "delete",
            Self::Move => "move",
            Self::BesideWriter => "look-up beside a busy writer",
            Self::WriterRate => "the busy writer's changes",
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
        // The other thread of a change reads. Its absence is seen by the one that changes, which
        // then gives no sample.
        1
    }
}
