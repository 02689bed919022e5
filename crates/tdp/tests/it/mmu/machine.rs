//! A platform that checks the MMU. Its TLB forgets only flushed entries. At each flush it compares
//! the tables as hardware sees them.

use pageferry_addr::{Gfn, GfnRange, Pfn};
use pageferry_tdp::format::{Access, Format, MemoryType};
use pageferry_tdp::{Entry, Flush, Found, Platform};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// A TLB's entry for one leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cached {
    pub(crate) first: u64,
    pub(crate) frames: u64,
    pub(crate) pfn: u64,
    /// Stores succeed without a look at the entry. They are allowed, and the entry is dirty if
    /// hardware would set that.
    pub(crate) write: bool,
    pub(crate) execute: bool,
    /// The entry was aged since, which may take the permission to store without a flush. The next
    /// call that promises that no stale store succeeds clears this.
    pub(crate) aged: bool,
}

impl Cached {
    pub(crate) const fn new(gfn: u64, found: Found, frames: u64, dirty_by_bit: bool) -> Self {
        let leaf = found.leaf;
        Self {
            first: gfn & !(frames - 1),
            frames,
            pfn: leaf.pfn.0,
            write: leaf.access.write && (leaf.dirty || !dirty_by_bit),
            execute: leaf.access.execute,
            aged: false,
        }
    }

    pub(crate) const fn allows(&self, gfn: u64, access: Access) -> bool {
        self.first <= gfn
            && gfn < self.first + self.frames
            && (self.write || !access.write)
            && (self.execute || !access.execute)
    }

    pub(crate) const fn overlaps(&self, start: u64, end: u64) -> bool {
        self.first < end && start < self.first + self.frames
    }
}

/// The hardware's reading of an entry, as far as break-before-make needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Table(Pfn),
    Leaf(Pfn, MemoryType),
}

/// All entries that translate, by level and first frame.
type Picture = BTreeMap<(u32, u64), Kind>;

/// The root of the tables, and the function that records their contents.
#[derive(Clone, Copy)]
struct Watched {
    root: Pfn,
    take: fn(Pfn, &mut Picture),
}

#[derive(Default)]
pub(crate) struct Parts {
    /// Tables that are allocated and not freed.
    pub(crate) live: AtomicUsize,
    /// The number of tables that may still be allocated. `None` for any number.
    pub(crate) spare: Mutex<Option<usize>>,
    pub(crate) tlb: Mutex<Vec<Cached>>,
    pub(crate) flushes: AtomicUsize,
    watched: Mutex<Option<Watched>>,
    picture: Mutex<Picture>,
}

impl Parts {
    /// Begins to watch entries for break-before-make. Called again for a new root.
    pub(crate) fn watch<F: Format>(&self, root: Pfn) {
        if F::BREAK_BEFORE_MAKE {
            *self.watched.lock().unwrap() = Some(Watched {
                root,
                take: take_root::<F>,
            });
        }
    }

    /// Compares the entries with their values at the last flush. None may have changed from one
    /// translation to another without an absent value between. Removed entries that are `flushed`
    /// are forgotten.
    pub(crate) fn look(&self, flushed: Option<GfnRange>) {
        let Some(Watched { root, take }) = *self.watched.lock().unwrap() else {
            return;
        };
        let mut now = Picture::new();
        take(root, &mut now);
        let mut seen = self.picture.lock().unwrap();
        for (&at, &kind) in &now {
            let old = *seen.entry(at).or_insert(kind);
            assert_eq!(
                old, kind,
                "{at:x?} has changed without a fault and a flush between"
            );
        }
        if let Some(range) = flushed {
            seen.retain(|at, _| {
                let &(level, first) = at;
                let end = first + (1 << (9 * (level - 1)));
                now.contains_key(at) || first >= range.end().0 || end <= range.start().0
            });
        }
    }

    fn flush(&self, what: Flush) {
        if std::thread::panicking() {
            // A call that has failed still flushes its debts. The test must report that failure,
            // not this one.
            return;
        }
        self.flushes.fetch_add(1, Ordering::Relaxed);
        let mut tlb = self.tlb.lock().unwrap();
        match what {
            Flush::Range(range) => {
                tlb.retain(|cached| !cached.overlaps(range.start().0, range.end().0));
            }
            Flush::Writes(range) => {
                for cached in tlb.iter_mut() {
                    cached.write &= !cached.overlaps(range.start().0, range.end().0);
                }
            }
            Flush::Roots => tlb.clear(),
        }
        drop(tlb);
        match what {
            Flush::Range(range) => self.look(Some(range)),
            Flush::Writes(_) => self.look(None),
            Flush::Roots => self.picture.lock().unwrap().clear(),
        }
    }
}

fn take_root<F: Format>(root: Pfn, into: &mut Picture) {
    take_picture::<F>(root, F::LEVELS, 0, into);
}

fn take_picture<F: Format>(table: Pfn, level: u32, first: u64, into: &mut Picture) {
    let entries = pointer_to(table);
    for index in 0..F::entries(level) {
        // SAFETY: a live table of as many entries: there is one thread, and the link was just read.
        let value = unsafe { entries.add(index).as_ref() }.load(Ordering::Acquire);
        let first = first + index as u64 * F::frames_per_entry(level);
        if F::is_leaf(value, level) {
            let kind = Kind::Leaf(F::pfn(value, level), F::memory(value));
            into.insert((level, first), kind);
        } else if F::is_table(value, level) {
            let below = F::table_pfn(value);
            into.insert((level, first), Kind::Table(below));
            take_picture::<F>(below, level - 1, first, into);
        }
    }
}

/// The platform.
pub(crate) struct Machine(pub(crate) Arc<Parts>);

fn layout(entries: usize) -> Layout {
    Layout::from_size_align(entries * 8, entries * 8).unwrap()
}

fn pointer_to(table: Pfn) -> NonNull<Entry> {
    let address = (table.0 << 12) as usize;
    NonNull::new(ptr::with_exposed_provenance_mut(address)).expect("a table's frame")
}

// SAFETY: the allocator's memory is zeroed and aligned to its size. Frames are addresses without
// their lowest bits, which are clear. The TLB is a model, and only the test's thread uses it.
unsafe impl Platform for Machine {
    fn allocate_table(&self, entries: usize) -> Option<NonNull<Entry>> {
        if let Some(spare) = &mut *self.0.spare.lock().unwrap() {
            *spare = spare.checked_sub(1)?;
        }
        // SAFETY: not of size 0.
        let table = NonNull::new(unsafe { alloc_zeroed(layout(entries)) })?;
        table.as_ptr().expose_provenance();
        self.0.live.fetch_add(1, Ordering::Relaxed);
        Some(table.cast())
    }

    unsafe fn free_table(&self, table: NonNull<Entry>, entries: usize) {
        self.0.live.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: from `allocate_table` with as many entries, as the caller promises.
        unsafe { dealloc(table.as_ptr().cast(), layout(entries)) };
    }

    fn frame(&self, table: NonNull<Entry>) -> Pfn {
        Pfn(table.as_ptr() as u64 >> 12)
    }

    fn pointer(&self, table: Pfn) -> NonNull<Entry> {
        pointer_to(table)
    }

    fn flush(&self, what: Flush) {
        self.0.flush(what);
    }
}

/// The `pages` frames from `start` on.
pub(crate) fn range(start: u64, pages: u64) -> GfnRange {
    GfnRange::new(Gfn(start), pages).unwrap()
}
