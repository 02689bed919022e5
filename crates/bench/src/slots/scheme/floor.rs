#![expect(
    unsafe_code,
    reason = "the floor is one plain load of a raw pointer, and nothing safe is as cheap"
)]
//! The floor of a look-up by guest frame: sorted keys behind one acquire load, without protection.
//!
//! The array never changes, so it needs neither guard nor lock. It is leaked, and lives as long as
//! the process. A look-up is a binary search over the starts alone, then one read of the end and
//! the host address.

use super::{ByGfn, Reader, Scheme};
use crate::slots::input::PlainSlot;
use pageferry_addr::{Gfn, Hva, PAGE_SIZE};
use std::sync::atomic::{AtomicPtr, Ordering};

#[derive(Debug)]
struct Sorted {
    starts: Vec<u64>,
    /// The end frame and the host address, at the same index.
    ends: Vec<(u64, u64)>,
}

/// A sorted array that is never changed: the floor of a look-up that returns an address.
#[derive(Debug)]
pub(crate) struct Floor(&'static AtomicPtr<Sorted>);

impl Floor {
    /// Creates the array of `slots`, which are in ascending order of guest frames. Its memory is
    /// never freed.
    pub(crate) fn new(slots: &[PlainSlot]) -> Self {
        let sorted = Box::leak(Box::new(Sorted {
            starts: slots.iter().map(|slot| slot.start.0).collect(),
            ends: slots
                .iter()
                .map(|slot| (slot.end().0, slot.hva.0))
                .collect(),
        }));
        Self(Box::leak(Box::new(AtomicPtr::new(sorted))))
    }
}

/// A reader of [`Floor`].
#[derive(Debug)]
pub(crate) struct FloorReader(&'static AtomicPtr<Sorted>);

/// The array, as loaded.
#[derive(Debug)]
pub(crate) struct FloorHeld(&'static Sorted);

impl Scheme for Floor {
    const NAME: &'static str = "floor (sorted keys)";
    type Reader = FloorReader;

    fn reader(&self) -> FloorReader {
        FloorReader(self.0)
    }
}

impl Reader for FloorReader {
    type Held<'a> = FloorHeld;

    #[inline]
    fn hold(&mut self) -> FloorHeld {
        let sorted = self.0.load(Ordering::Acquire);
        // SAFETY: `Floor::new` made the pointer by `Box::leak`, and nothing stores another one.
        FloorHeld(unsafe { &*sorted })
    }
}

impl ByGfn for FloorHeld {
    #[inline]
    fn by_gfn(&self, gfn: Gfn) -> Option<Hva> {
        let above = self.0.starts.partition_point(|&start| start <= gfn.0);
        let at = above.checked_sub(1)?;
        let (end, hva) = self.0.ends[at];
        (gfn.0 < end).then(|| Hva(hva + (gfn.0 - self.0.starts[at]) * PAGE_SIZE))
    }
}
