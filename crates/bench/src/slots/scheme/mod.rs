//! The traits that every scheme implements.
//!
//! All calls are dispatched statically. So a scheme's look-up is compiled into the loop that times
//! it, as it would be in a VMM.

mod collection;
mod floor;
mod locked;
mod ours;
mod rust_vmm;
mod swapped;
#[cfg(test)]
mod tests;

pub(crate) use floor::Floor;
pub(crate) use locked::LockedTree;
pub(crate) use ours::Memslots;
pub(crate) use rust_vmm::VmMemory;
pub(crate) use swapped::{ArcSwapArray, ArcSwapImbl};

use crate::slots::input::PlainSlot;
use pageferry_addr::{Gfn, Hva};
use std::ops::ControlFlow;

/// A map of slots that threads read.
pub(crate) trait Scheme: Send {
    /// Its name in tables.
    const NAME: &'static str;
    /// A reader.
    type Reader: Reader;

    /// A reader for another thread.
    fn reader(&self) -> Self::Reader;
}

/// A map of slots that one thread changes while others read it.
///
/// Readers see each change as a whole, at the latest when the call has returned.
pub(crate) trait Change: Scheme {
    /// A map without slots.
    fn empty() -> Self;

    /// Adds `slot`.
    ///
    /// # Panics
    /// If it overlaps another slot by guest frames, and the scheme checks that.
    fn add(&mut self, slot: PlainSlot);

    /// Deletes `slot`, which has exactly these numbers.
    ///
    /// # Panics
    /// If there is no such slot, and the scheme checks that.
    fn delete(&mut self, slot: PlainSlot);

    /// Moves `slot` to the frames from `to` on, in one step for readers. Returns the slot with its
    /// new numbers.
    ///
    /// # Panics
    /// If there is no such slot, or it then overlaps another, and the scheme checks that.
    fn relocate(&mut self, slot: PlainSlot, to: Gfn) -> PlainSlot;
}

/// A thread's reader of a map.
pub(crate) trait Reader: Send {
    /// The protection of look-ups, such as a guard or a held lock.
    type Held<'a>: ByGfn
    where
        Self: 'a;

    /// Takes the protection.
    fn hold(&mut self) -> Self::Held<'_>;
}

/// The look-up every scheme has.
pub(crate) trait ByGfn {
    /// The host address behind `gfn`.
    fn by_gfn(&self, gfn: Gfn) -> Option<Hva>;
}

/// The other look-ups.
pub(crate) trait Lookup: ByGfn {
    /// Whether the scheme supports [`Self::by_id`].
    const HAS_IDS: bool = false;

    /// Calls `visit` with the frame behind `hva` of every slot that has `hva`, until it breaks.
    fn by_hva(&self, hva: Hva, visit: impl FnMut(Gfn) -> ControlFlow<()>);

    /// The first frame of slot `id`. `None` for every `id` if the scheme does not support this.
    fn by_id(&self, id: u16) -> Option<Gfn> {
        let _ = id;
        None
    }
}
