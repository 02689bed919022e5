//! What every scheme can be asked: the one shape behind which they are measured.
//!
//! All calls are dispatched statically, so that a scheme's look-up is compiled into the loop that
//! times it, as it would be into a VMM's.

mod array;
mod floor;
mod locked;
mod ours;
mod persistent;
mod rust_vmm;
#[cfg(test)]
mod tests;

pub use array::ArcSwapArray;
pub use floor::{Floor, Payload, RecordFloor, SortedKeys};
pub use locked::LockedTree;
pub use ours::Memslots;
pub use persistent::ArcSwapImbl;
pub use rust_vmm::VmMemory;

use crate::slots::input::PlainSlot;
use pageferry_addr::{Gfn, Hva};
use std::ops::ControlFlow;

/// A map of slots that threads read.
pub trait Scheme: Send {
    /// Its name in tables.
    const NAME: &'static str;
    /// What a thread reads through.
    type Reader: Reader;

    /// A reader for one more thread.
    fn reader(&self) -> Self::Reader;
}

/// A map of slots that one thread changes while others read it.
///
/// Each change is seen by readers as a whole, when the call has returned at the latest.
pub trait Change: Scheme {
    /// A map without slots.
    fn empty() -> Self;

    /// Adds `slot`.
    ///
    /// # Panics
    /// Where it overlaps another by guest frames, if the scheme notices.
    fn add(&mut self, slot: PlainSlot);

    /// Deletes `slot`, which was added or moved to just this.
    ///
    /// # Panics
    /// Where it is not there, if the scheme notices.
    fn delete(&mut self, slot: PlainSlot);

    /// Moves `slot` to the frames from `to` on, in one step for readers, and says what it is now.
    ///
    /// # Panics
    /// Where it is not there or overlaps another then, if the scheme notices.
    fn relocate(&mut self, slot: PlainSlot, to: Gfn) -> PlainSlot;
}

/// A thread's way to a map.
pub trait Reader: Send {
    /// What protects look-ups while it lives: a guard, a lock.
    type Held<'a>: ByGfn
    where
        Self: 'a;

    /// Takes the protection.
    fn hold(&mut self) -> Self::Held<'_>;
}

/// The look-up every scheme has.
pub trait ByGfn {
    /// The host address behind `gfn`.
    fn by_gfn(&self, gfn: Gfn) -> Option<Hva>;
}

/// The other look-ups.
pub trait Lookup: ByGfn {
    /// Whether [`Self::by_id`] is there.
    const HAS_IDS: bool = false;

    /// Hands the frame behind `hva` of every slot that has it to `visit`, until that breaks off.
    fn by_hva(&self, hva: Hva, visit: impl FnMut(Gfn) -> ControlFlow<()>);

    /// The first frame of the slot `id`; `None` for all where the scheme has no such look-up.
    fn by_id(&self, id: u16) -> Option<Gfn> {
        let _ = id;
        None
    }
}
