#![expect(
    unsafe_code,
    reason = "declares the contract of the memory that slots point at"
)]
//! What a memory slot is made of: a guest range, the host memory behind it, and its userfault bits.

use crate::log::DirtyLog;
use crate::track::Tracked;
use core::ops::Range;
use pageferry_addr::{Gpa, Hva, PageSize, RamPage};
use pageferry_memslot::SlotFlags;
use pageferry_userfault::PageBitmap;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// Host memory that slots may point at. A slot keeps its owner alive, so what a guest can reach stays
/// mapped as long as it can reach it.
///
/// # Safety
///
/// As long as the value lives, and not only while somebody uses it:
/// 1. All bytes of [`hva_range`](Self::hva_range), which never changes, are mapped, readable, and (if the
///    memory is put into a slot without `READONLY`) writable, without a fault that ends the process. A touch
///    may take long or make the thread sleep.
/// 2. The range's provenance is exposed (by `expose_provenance`, or as memory that came from `mmap`).
/// 3. Nobody holds a Rust reference to any byte of it, other than shared references to atomics, and
///    everybody who accesses it does so by atomics, volatile accesses or system calls: guests read and write
///    it at any time, by relaxed atomics of 1, 2, 4 or 8 bytes.
pub unsafe trait HostMemory: Send + Sync {
    /// The addresses; both ends are page-aligned.
    fn hva_range(&self) -> Range<Hva>;

    /// The size of the pages it is made of. Guests whose frames are in step with it are given translations of
    /// that size where nothing asks for smaller ones. A translation is one piece: memory that comes or goes by
    /// smaller pieces must not say more than those.
    fn page_size(&self) -> PageSize {
        PageSize::Size4K
    }
}

/// Bits of the pages of one slot, inside a bitmap that may cover more than the slot: the one truth about
/// which pages are missing, shared with whoever brings them.
///
/// The slot's page `i` is missing where bit `first + i` is set. Whoever makes a page present puts its bytes
/// in place and then clears the bit with release order ([`PageBitmap::clear`]). Bits that are *set* after
/// the slot got its `USERFAULT` flag may go unnoticed for pages that are mapped by then.
#[derive(Clone)]
pub struct UserfaultBits {
    /// The bitmap.
    pub bitmap: Arc<PageBitmap>,
    /// The bit of the slot's first page.
    pub first: RamPage,
}

/// What is asked of one memory slot, with the meaning of `KVM_SET_USER_MEMORY_REGION2`.
#[derive(Clone)]
pub struct Region {
    /// The slot's id.
    pub slot: u16,
    /// Its flags.
    pub flags: SlotFlags,
    /// The first guest address; page-aligned.
    pub gpa: Gpa,
    /// The size in bytes, in whole pages; zero deletes the slot.
    pub size: u64,
    /// The host address that backs `gpa`; page-aligned.
    pub hva: Hva,
    /// Who owns the host memory. Needed unless the slot is deleted.
    pub memory: Option<Arc<dyn HostMemory>>,
    /// Which pages are missing. Needed with the flag `USERFAULT`, ignored without it.
    pub userfault: Option<UserfaultBits>,
}

impl Region {
    /// The region that deletes `slot`.
    #[must_use]
    pub const fn delete(slot: u16) -> Self {
        Self {
            slot,
            flags: SlotFlags::EMPTY,
            gpa: Gpa(0),
            size: 0,
            hva: Hva(0),
            memory: None,
            userfault: None,
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            slot,
            flags,
            gpa,
            size,
            hva,
            ..
        } = self;
        write!(
            f,
            "Region(slot {slot}, {flags}, {gpa:?} + {size:#x} at {hva:?})"
        )
    }
}

/// What this crate keeps in every slot: who owns the memory, the dirty log, the userfault bits, which
/// pages are write-tracked. Whoever keeps slots for
/// it ([`crate::Memslots`]) carries it and never looks inside.
#[derive(Clone, Default)]
pub struct SlotData {
    /// Keeps the slot's memory mapped.
    pub(crate) memory: Option<Arc<dyn HostMemory>>,
    /// With the flag `LOG_DIRTY_PAGES`.
    pub(crate) dirty: Option<DirtyLog>,
    /// With the flag `USERFAULT`.
    pub(crate) userfault: Option<UserfaultBits>,
    /// From the first time on that pages are tracked.
    tracked: OnceLock<Arc<Tracked>>,
}

impl SlotData {
    /// Where stores to pages of the slot are tracked, or were.
    #[inline]
    pub(crate) fn tracked(&self) -> Option<&Tracked> {
        self.tracked.get().map(Arc::as_ref)
    }

    /// Where they will be tracked; the slot has `pages` pages.
    pub(crate) fn track(&self, pages: usize) -> &Tracked {
        self.tracked.get_or_init(|| Arc::new(Tracked::new(pages)))
    }

    /// Tracks what `old` does, from now on together: it is the same slot's.
    pub(crate) fn track_as(&mut self, old: &Self) {
        let on = |tracked: &&Arc<Tracked>| tracked.is_on();
        self.tracked = old
            .tracked
            .get()
            .filter(on)
            .cloned()
            .map_or_else(OnceLock::new, OnceLock::from);
    }

    /// The level of the largest page that what is behind the slot allows.
    pub(crate) fn backing(&self) -> u32 {
        let memory = self.memory.as_ref();
        memory.map_or(1, |memory| memory.page_size().level())
    }
}

impl fmt::Debug for SlotData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotData")
            .field("owned", &self.memory.is_some())
            .field("logged", &self.dirty.is_some())
            .field("userfault", &self.userfault.is_some())
            .field("tracked", &self.tracked().is_some_and(Tracked::is_on))
            .finish()
    }
}
