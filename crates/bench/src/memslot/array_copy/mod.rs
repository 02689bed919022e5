#![expect(
    unsafe_code,
    reason = "array entries point at slots without owning them, so that a copy of the array is a plain copy"
)]
//! The memory slots as Linux kept them before its trees (up to 5.16), as a scheme for the same
//! hypervisor.
//!
//! **Guarantee.** The semantics are those of `pageferry-memslot`: the same rules, the same two
//! halves of a change, and a reader sees the slots before a change or after it.
//!
//! **Mechanism.** A *version* is an array of slot structures sorted by guest frame, which never
//! changes once it is published. A look-up by frame is a binary search after a glance at the slot
//! used last; by host address it is a scan of the array; by id it is a static table, which only the
//! writer has. Every change copies the whole array: a creation and a change of flags once; a
//! deletion and a move twice, first with the slot marked invalid, then without it or with it at its
//! new place. Readers keep the version they used last and compare generations by one acquire load;
//! only when they differ do they take the mutex around the newest version.
//!
//! It is meant to be as good as that scheme can be, so that beating it means something. Kinder than
//! the kernel's: an entry has 40 bytes (`struct kvm_memory_slot` had 88 on x86-64), is copied as
//! bytes without touching a reference count, the table of ids is not copied, look-ups by id need no
//! index into the array that had to be kept right, and arrays that no reader holds any more are
//! used again instead of allocated.
//!
//! # Why the entries' pointers are good
//!
//! 1. An entry points at a [`Slot`] in an `Arc` of the writer, in `ArrayCopy::slots` while the slot
//!    is there and in `ArrayCopy::retired` afterwards. Nobody ever makes an exclusive reference to
//!    it.
//! 2. The writer frees a retired slot only when each reader has taken up a version without it (it
//!    says so under the mutex, where the writer looks) or is gone. A reader dereferences entries of
//!    its own version only.
//! 3. A writer that goes before its readers leaves all slots to [`Published`], which the readers
//!    keep.
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

/// What a reader that is gone says it has seen.
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

// By hand, since derived ones would ask for `D: Copy`.
impl<D> Clone for Entry<D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D> Copy for Entry<D> {}

// SAFETY: an entry is used as a `&Slot<D>`, whose `Sync` follows from that of `D`, and the last to
// use a slot may drop it on another thread.
unsafe impl<D: Send + Sync> Send for Entry<D> {}
// SAFETY: as above; the fields are only read.
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
    /// The place of the first entry that ends above `gfn`: the one that holds it, if any does.
    #[inline]
    fn place(&self, gfn: Gfn) -> usize {
        self.entries
            .partition_point(|entry| entry.range.end() <= gfn)
    }

    /// Id and frames of an entry other than slot `id` that holds some of `range`.
    fn overlap(&self, range: GfnRange, id: u16) -> Option<(u16, GfnRange)> {
        self.entries[self.place(range.start())..]
            .iter()
            .take_while(|entry| entry.range.start() < range.end())
            .find(|entry| entry.id != id)
            .map(|entry| (entry.id, entry.range))
    }
}

/// What writer and readers share.
struct Published<D> {
    generation: AtomicU64,
    newest: Mutex<Newest<D>>,
}

struct Newest<D> {
    version: Arc<Version<D>>,
    /// For each reader the generation it has taken up.
    seen: Vec<Arc<AtomicU64>>,
    /// The slots of a writer that is gone.
    estate: Vec<Arc<Slot<D>>>,
}

impl<D> Published<D> {
    fn newest(&self) -> MutexGuard<'_, Newest<D>> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SAFETY: 1. Slots are made from committed requests only. 2. and 3. `start` and `finish` publish
// with release order; a look-up that happens afterwards acquires the generation and takes that
// version up. 4. Slots never change; those that go are freed after all readers have left them.
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
        self.take_up();
    }
}
