#![expect(unsafe_code, reason = "implements the contract of a scheme of slots")]
//! The default scheme of memory slots: `pageferry-memslot`, whose operations all take O(log n).
//!
//! A fault holds a guard of its vCPU's reader for one look-up. The guard ends before the vCPU uses
//! the translation. So a vCPU that stays in its guest does not delay the freeing of old slots.

use crate::region::SlotData;
use crate::slots::{Begun, Found, MemslotReader, MemslotUpdate, Memslots};
use core::ops::Range;
use pageferry_addr::{Gfn, Hva};
use pageferry_memslot::{
    Barrier, Change, Limits, OutOfMemory, Request, Slot, SlotError, SlotReader, SlotTable,
    SlotWriter, Update,
};

/// Slots in `pageferry-memslot`'s trees.
#[derive(Debug)]
pub struct Scalable(SlotWriter<SlotData>);

impl Scalable {
    /// A handle that makes readers.
    pub(crate) fn table(&self) -> SlotTable<SlotData> {
        self.0.table()
    }

    pub(crate) fn writer(&self) -> &SlotWriter<SlotData> {
        &self.0
    }
}

/// A reader of [`Scalable`].
#[derive(Debug)]
pub struct ScalableReader(SlotReader<SlotData>);

/// A change of [`Scalable`].
#[derive(Debug)]
pub struct ScalableUpdate<'a>(Update<'a, SlotData>);

// SAFETY: 1. and 4. `pageferry-memslot` makes slots from committed requests only, and never changes
// their contents. 2. and 3. It marks and publishes with release order, and look-ups acquire the
// newest state. 5. `begun` repeats the update's own description, and dropping an update gives it
// up.
unsafe impl Memslots for Scalable {
    type Reader = ScalableReader;
    type Update<'a> = ScalableUpdate<'a>;

    fn new(limits: Limits) -> Self {
        let writer = SlotWriter::with_barrier(limits, Barrier::membarrier());
        Self(writer.with_relax(std::thread::yield_now))
    }

    fn reader(&self) -> ScalableReader {
        ScalableReader(self.table().reader())
    }

    fn try_reader(&self) -> Result<ScalableReader, OutOfMemory> {
        match self.table().try_reader() {
            Ok(reader) => Ok(ScalableReader(reader)),
            Err(SlotError::OutOfMemory(error)) => Err(error),
            Err(error) => unreachable!("making a reader checks no rule: {error}"),
        }
    }

    fn begin(&mut self, request: Request<SlotData>) -> Result<ScalableUpdate<'_>, SlotError> {
        self.0.begin(request).map(ScalableUpdate)
    }

    fn by_id(&self, id: u16) -> Option<&Slot<SlotData>> {
        self.0.view().by_id(id)
    }

    fn for_each_in_hva<'a>(&'a self, hva: Range<Hva>, f: impl FnMut(&'a Slot<SlotData>)) {
        self.0.view().iter_hva(hva).for_each(f);
    }

    fn reclaim(&mut self) {
        self.0.reclaim();
    }

    fn metadata_bytes(&self) -> usize {
        self.0.metadata_bytes()
    }
}

impl MemslotUpdate for ScalableUpdate<'_> {
    fn begun(&self) -> Begun {
        match self.0.change() {
            Change::Nothing => Begun::Nothing,
            Change::Created { new } => Begun::Created { new: new.range },
            Change::Deleted { old } => Begun::Deleted { old: old.range },
            Change::Moved { old, new } => Begun::Moved {
                old: old.range,
                new: new.range,
            },
            Change::FlagsChanged { old, new } => Begun::FlagsChanged {
                range: old.range,
                old: old.flags,
                new: new.flags,
            },
        }
    }

    fn commit(self) {
        self.0.commit();
    }
}

impl MemslotReader for ScalableReader {
    #[inline]
    fn lookup<R>(&mut self, gfn: Gfn, f: impl FnOnce(Found<'_>) -> R) -> R {
        let guard = self.0.pin();
        f(match guard.lookup(gfn) {
            None => Found::Nothing,
            Some(slot) if slot.is_invalid() => Found::Invalid,
            Some(slot) => Found::Slot(slot),
        })
    }
}
