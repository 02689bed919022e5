#![expect(
    unsafe_code,
    reason = "the floor is one plain load of a raw pointer, as nothing safe is so cheap"
)]
//! The floor under a look-up by guest frame: sorted keys behind one acquire load, protected by nothing.
//!
//! It cannot be changed, so it needs neither guard nor lock: the array is leaked and lives as long as the
//! process. A binary search over the starts alone, then one read of the slot's end and host address.

use super::{ByGfn, Reader, Scheme};
use crate::layout::PlainSlot;
use crate::sync::{AtomicPtr, Ordering};
use pageferry_addr::{Gfn, Hva, PAGE_SIZE};

#[derive(Debug)]
struct Sorted {
    starts: Vec<u64>,
    /// End frame and host address, at the same index.
    payload: Vec<(u64, u64)>,
}

/// A sorted array that is never changed.
#[derive(Debug)]
pub struct Floor(&'static AtomicPtr<Sorted>);

impl Floor {
    /// The array of `slots`, which ascend by guest frame. Its memory is never freed.
    #[must_use]
    pub fn new(slots: &[PlainSlot]) -> Self {
        let sorted = Box::leak(Box::new(Sorted {
            starts: slots.iter().map(|slot| slot.start.0).collect(),
            payload: slots
                .iter()
                .map(|slot| (slot.end().0, slot.hva.0))
                .collect(),
        }));
        Self(Box::leak(Box::new(AtomicPtr::new(sorted))))
    }
}

/// A reader of [`Floor`].
#[derive(Debug)]
pub struct FloorReader(&'static AtomicPtr<Sorted>);

/// The array, as loaded.
#[derive(Debug)]
pub struct FloorHeld(&'static Sorted);

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
        // SAFETY: the pointer was made by `Box::leak` in `Floor::new` and nothing stores another.
        FloorHeld(unsafe { &*sorted })
    }
}

impl ByGfn for FloorHeld {
    #[inline]
    fn by_gfn(&self, gfn: Gfn) -> Option<Hva> {
        let above = self.0.starts.partition_point(|&start| start <= gfn.0);
        let at = above.checked_sub(1)?;
        let (end, hva) = self.0.payload[at];
        (gfn.0 < end).then(|| Hva(hva + (gfn.0 - self.0.starts[at]) * PAGE_SIZE))
    }
}
