#![expect(
    unsafe_code,
    reason = "array entries point at slots without owning them, so that a copy of the array is a plain copy"
)]
//! The memory slots of Linux before its trees (up to 5.16), as a scheme for our hypervisor.
//!
//! **Guarantee.** The semantics are those of `pageferry-memslot`: the same rules and the same two
//! halves of a change. A reader sees the slots either before a change or after it.
//!
//! **Mechanism.** A *version* is an array of slot structures, sorted by guest frame. A published
//! version never changes.
//!
//! - A look-up by frame tests the last-used slot, and then does a binary search.
//! - A look-up by host address scans the array.
//! - A look-up by id reads a table that only the writer has.
//! - A creation and a change of flags copy the whole array once. A deletion and a move copy it
//!   twice: first with the slot marked invalid, then without it or with it at its new place.
//! - A reader keeps the version that it used last, and compares generations by one acquire load. It
//!   takes the mutex around the newest version only if they differ.
//!
//! It should be as fast as that scheme can be, so that the comparison is fair. It is faster than
//! the kernel's in these points:
//!
//! - An entry has 40 bytes; `struct kvm_memory_slot` had 88 on x86-64.
//! - Entries are copied as bytes, without touching a reference count.
//! - The table of ids is not copied, and look-ups by id need no index into the array.
//! - Arrays that no reader holds are reused instead of freed and allocated.
//!
//! # Why the entries' pointers are valid
//!
//! 1. An entry points at a [`Slot`] in an `Arc` of the writer. The `Arc` is in `ArrayCopy::slots`
//!    while the slot exists, and in `ArrayCopy::retired` afterwards. No code ever creates an
//!    exclusive reference to the slot.
//! 2. The writer frees a retired slot only when each reader has taken a version without it, or is
//!    gone. A reader records its version under the mutex, where the writer reads it. A reader
//!    dereferences entries of its own version only.
//! 3. A writer that is dropped before its readers leaves all slots to [`Published`], which the
//!    readers keep.
//!
//! **Neighbours.** Only the benchmark uses it. It checks requests by [`pageferry_memslot::rules`].

mod reader;
mod writer;

pub(super) use reader::ArrayReader;
pub(super) use writer::{ArrayCopy, ArrayUpdate};

use pageferry_addr::{Gfn, GfnRange, Hva, PAGE_SHIFT};
use pageferry_hypervisor::{Begun, Found, MemslotReader, MemslotUpdate, Memslots, SlotData};
use pageferry_memslot::{Limits, Request, Slot, SlotError, SlotFlags};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The generation that a dropped reader records.
const GONE: u64 = u64::MAX;

/// One slot in an array.
struct Entry<D> {
    range: GfnRange,
    hva: Hva,
    slot: NonNull<Slot<D>>,
    flags: SlotFlags,
    id: u16,
    invalid: bool,
}

// Not derived: the derived implementations would require `D: Copy`.
impl<D> Clone for Entry<D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D> Copy for Entry<D> {}

// SAFETY: an entry is used as a `&Slot<D>`, whose `Sync` follows from that of `D`. The last user of
// a slot may drop it on another thread, which needs `D: Send`.
unsafe impl<D: Send + Sync> Send for Entry<D> {}
// SAFETY: as above, and the fields are only read.
unsafe impl<D: Send + Sync> Sync for Entry<D> {}

impl<D> Entry<D> {
    fn of(slot: &Arc<Slot<D>>) -> Self {
        Self {
            range: slot.range,
            hva: slot.hva,
            slot: NonNull::from(&**slot),
            flags: slot.flags,
            id: slot.id,
            invalid: false,
        }
    }

    fn overlaps_hva(&self, hva: &Range<Hva>) -> bool {
        self.hva < hva.end && hva.start.0 < self.hva.0 + (self.range.pages() << PAGE_SHIFT)
    }
}

/// An array at one generation.
struct Version<D> {
    generation: u64,
    /// Ascending and disjoint.
    entries: Vec<Entry<D>>,
}

impl<D> Version<D> {
    /// The index of the first entry that ends above `gfn`. If any entry holds `gfn`, it is this
    /// one.
    #[inline]
    fn place(&self, gfn: Gfn) -> usize {
        self.entries
            .partition_point(|entry| entry.range.end() <= gfn)
    }

    /// The id and the frames of an entry that overlaps `range` and is not slot `id`.
    fn overlap(&self, range: GfnRange, id: u16) -> Option<(u16, GfnRange)> {
        self.entries[self.place(range.start())..]
            .iter()
            .take_while(|entry| entry.range.start() < range.end())
            .find(|entry| entry.id != id)
            .map(|entry| (entry.id, entry.range))
    }
}

/// The state that writer and readers share.
struct Published<D> {
    generation: AtomicU64,
    newest: Mutex<Newest<D>>,
}

struct Newest<D> {
    version: Arc<Version<D>>,
    /// The generation of each reader's version.
    seen: Vec<Arc<AtomicU64>>,
    /// The slots of a dropped writer.
    orphans: Vec<Arc<Slot<D>>>,
}

impl<D> Published<D> {
    fn newest(&self) -> MutexGuard<'_, Newest<D>> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SAFETY:
// 1. Slots are created from committed requests only.
// 2. and 3. `start` and `finish` publish with release order. A later look-up acquires the
//    generation, and takes that version.
// 4. Slots never change. A removed slot is freed after all readers have left its last version.
unsafe impl Memslots for ArrayCopy<SlotData> {
    type Reader = ArrayReader<SlotData>;
    type Update<'a> = ArrayUpdate<'a, SlotData>;

    fn new(limits: Limits) -> Self {
        Self::with_limits(limits)
    }

    fn reader(&self) -> Self::Reader {
        self.new_reader()
    }

    fn begin(&mut self, request: Request<SlotData>) -> Result<Self::Update<'_>, SlotError> {
        self.start(request)
    }

    fn by_id(&self, id: u16) -> Option<&Slot<SlotData>> {
        self.find_id(id)
    }

    fn for_each_in_hva<'a>(&'a self, hva: Range<Hva>, f: impl FnMut(&'a Slot<SlotData>)) {
        self.find_hva(&hva, f);
    }

    fn reclaim(&mut self) {
        self.free_retired();
    }

    fn metadata_bytes(&self) -> usize {
        self.bytes()
    }
}

impl MemslotUpdate for ArrayUpdate<'_, SlotData> {
    fn begun(&self) -> Begun {
        self.what()
    }

    fn commit(self) {
        self.finish();
    }
}

impl MemslotReader for ArrayReader<SlotData> {
    #[inline]
    fn lookup<R>(&mut self, gfn: Gfn, f: impl FnOnce(Found<'_>) -> R) -> R {
        self.find(gfn, |found| match found {
            None => f(Found::Nothing),
            Some((_, true)) => f(Found::Invalid),
            Some((slot, false)) => f(Found::Slot(slot)),
        })
    }

    fn refresh(&mut self) {
        self.take_newest();
    }
}
