#![expect(
    unsafe_code,
    reason = "the floor is one plain load of a raw pointer, and nothing safe is as cheap"
)]
//! The floor of a look-up by guest frame: sorted keys behind one acquire load, without protection.
//!
//! The array never changes, so it needs neither guard nor lock. It is leaked, and lives as long as
//! the process. A look-up is a binary search over the starts alone, then one read. [`Floor`] reads
//! only the end and the host address. [`RecordFloor`] reads a whole record, as look-ups that return
//! a slot do.

use super::{ByGfn, Reader, Scheme};
use crate::slots::input::PlainSlot;
use pageferry_addr::{Gfn, Hva, PAGE_SIZE};
use std::sync::atomic::{AtomicPtr, Ordering};

/// The data of a slot that the floor stores in addition to its start.
pub(crate) trait Payload: From<PlainSlot> + Send + Sync + 'static {
    /// The scheme's name.
    const NAME: &'static str;

    /// The host address of `gfn`, if the slot that begins at `start` holds it.
    fn translate(&self, start: u64, gfn: Gfn) -> Option<Hva>;
}

/// End frame and host address.
#[derive(Debug)]
pub(crate) struct EndAndHva(u64, u64);

impl From<PlainSlot> for EndAndHva {
    fn from(slot: PlainSlot) -> Self {
        Self(slot.end().0, slot.hva.0)
    }
}

impl Payload for EndAndHva {
    const NAME: &'static str = "floor (sorted keys)";

    #[inline]
    fn translate(&self, start: u64, gfn: Gfn) -> Option<Hva> {
        (gfn.0 < self.0).then(|| Hva(self.1 + (gfn.0 - start) * PAGE_SIZE))
    }
}

/// A whole slot. It has the size of the memslots' own record: a cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Record(PlainSlot);

impl From<PlainSlot> for Record {
    fn from(slot: PlainSlot) -> Self {
        Self(slot)
    }
}

impl Payload for Record {
    const NAME: &'static str = "floor with records";

    #[inline]
    fn translate(&self, _: u64, gfn: Gfn) -> Option<Hva> {
        self.0.hva_of(gfn)
    }
}

#[derive(Debug)]
struct Sorted<P> {
    starts: Vec<u64>,
    /// At the same index.
    payload: Vec<P>,
}

/// A sorted array that is never changed.
#[derive(Debug)]
pub(crate) struct SortedKeys<P: 'static>(&'static AtomicPtr<Sorted<P>>);

/// The floor of a look-up that returns an address.
pub(crate) type Floor = SortedKeys<EndAndHva>;

/// The floor of a look-up that returns a slot.
pub(crate) type RecordFloor = SortedKeys<Record>;

impl<P: Payload> SortedKeys<P> {
    /// Creates the array of `slots`, which are in ascending order of guest frames. Its memory is
    /// never freed.
    #[must_use]
    pub(crate) fn new(slots: &[PlainSlot]) -> Self {
        let sorted = Box::leak(Box::new(Sorted {
            starts: slots.iter().map(|slot| slot.start.0).collect(),
            payload: slots.iter().map(|&slot| P::from(slot)).collect(),
        }));
        Self(Box::leak(Box::new(AtomicPtr::new(sorted))))
    }
}

/// A reader of [`SortedKeys`].
#[derive(Debug)]
pub(crate) struct FloorReader<P: 'static>(&'static AtomicPtr<Sorted<P>>);

/// The array, as loaded.
#[derive(Debug)]
pub(crate) struct FloorHeld<P: 'static>(&'static Sorted<P>);

impl<P: Payload> Scheme for SortedKeys<P> {
    const NAME: &'static str = P::NAME;
    type Reader = FloorReader<P>;

    fn reader(&self) -> FloorReader<P> {
        FloorReader(self.0)
    }
}

impl<P: Payload> Reader for FloorReader<P> {
    type Held<'a> = FloorHeld<P>;

    #[inline]
    fn hold(&mut self) -> FloorHeld<P> {
        let sorted = self.0.load(Ordering::Acquire);
        // SAFETY: `SortedKeys::new` made the pointer by `Box::leak`, and nothing stores another
        // one.
        FloorHeld(unsafe { &*sorted })
    }
}

impl<P: Payload> ByGfn for FloorHeld<P> {
    #[inline]
    fn by_gfn(&self, gfn: Gfn) -> Option<Hva> {
        let above = self.0.starts.partition_point(|&start| start <= gfn.0);
        let at = above.checked_sub(1)?;
        self.0.payload[at].translate(self.0.starts[at], gfn)
    }
}
