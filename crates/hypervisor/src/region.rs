#![expect(
    unsafe_code,
    reason = "declares the contract of the memory that slots point at"
)]
//! The parts of a memory slot: a guest range, the host memory behind it, and its userfault bits.

use crate::dirty_log::DirtyLog;
use crate::tracked::Tracked;
use core::ops::Range;
use pageferry_addr::{Gpa, Hva, PageSize, RamPage};
use pageferry_memslot::SlotFlags;
use pageferry_userfault::{OutOfMemory, PageBitmap};
use std::fmt;
use std::sync::{Arc, OnceLock};

/// Host memory that slots may point at. A slot keeps it alive, so memory stays mapped as long as a
/// guest can reach it.
///
/// # Safety
///
/// As long as the value lives, used or not:
/// 1. [`hva_range`](Self::hva_range) never changes. All its bytes are mapped and readable. If a
///    slot without `READONLY` holds the memory, they are writable too. An access never ends the
///    process by a fault. It may take long, or make the thread sleep.
/// 2. The range's provenance is exposed (by `expose_provenance`, or because the memory came from
///    `mmap`).
/// 3. No Rust reference to any byte of it exists, other than shared references to atomics. All
///    accesses are atomics, volatile accesses or system calls. Guests read and write it at any
///    time, by relaxed atomics of 1, 2, 4 or 8 bytes.
pub unsafe trait HostMemory: Send + Sync {
    /// The addresses. Both ends are page-aligned.
    fn hva_range(&self) -> Range<Hva>;

    /// The size of the host pages. A guest gets translations of that size where guest and host
    /// frames have the same alignment and nothing needs smaller ones. A translation is mapped and
    /// unmapped as a whole. So if the host maps and unmaps smaller pieces, return their size.
    fn page_size(&self) -> PageSize {
        PageSize::Size4K
    }
}

/// The bits of one slot's pages, inside a bitmap that may cover more than the slot. The bitmap is
/// the one truth about missing pages. The VM shares it with the threads that bring the pages.
///
/// The slot's page `i` is missing if bit `first + i` is set. `first` is a multiple of 64, so that
/// the slot's bits begin with a word, as KVM expects of a userfault bitmap. A thread that makes a
/// page present first puts its bytes in place, then clears the bit with release order
/// ([`PageBitmap::clear`]). Set bits before the slot gets its `USERFAULT` flag: a bit that is set
/// later has no effect while the page is mapped.
#[derive(Clone)]
pub struct UserfaultBits {
    /// The bitmap.
    pub bitmap: Arc<PageBitmap>,
    /// The bit of the slot's first page, a multiple of 64.
    pub first: RamPage,
}

/// A request for one memory slot, with the meaning of `KVM_SET_USER_MEMORY_REGION2`.
#[derive(Clone)]
pub struct Region {
    /// The slot's id.
    pub slot: u16,
    /// Its flags.
    pub flags: SlotFlags,
    /// The first guest address. It is page-aligned.
    pub gpa: Gpa,
    /// The size in bytes, in whole pages. Zero deletes the slot.
    pub size: u64,
    /// The host address that backs `gpa`. It is page-aligned.
    pub hva: Hva,
    /// The owner of the host memory. Required unless the region deletes the slot.
    pub memory: Option<Arc<dyn HostMemory>>,
    /// The bits of missing pages. Required with the flag `USERFAULT`, ignored without it.
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

/// The data that this crate keeps in every slot: the memory's owner, the dirty log, the userfault
/// bits, the write-tracked pages. A scheme ([`crate::Memslots`]) stores it and never reads it.
#[derive(Clone, Default)]
pub struct SlotData {
    /// Keeps the slot's memory mapped.
    pub(crate) memory: Option<Arc<dyn HostMemory>>,
    /// Set with the flag `LOG_DIRTY_PAGES`.
    pub(crate) dirty: Option<DirtyLog>,
    /// Set with the flag `USERFAULT`.
    pub(crate) userfault: Option<UserfaultBits>,
    /// Set when pages are tracked for the first time.
    tracked: OnceLock<Arc<Tracked>>,
}

impl SlotData {
    /// The slot's tracked pages, if any were ever tracked.
    #[inline]
    pub(crate) fn tracked(&self) -> Option<&Tracked> {
        self.tracked.get().map(Arc::as_ref)
    }

    /// The slot's tracked pages, made at the first call. The slot has `pages` pages.
    pub(crate) fn track(&self, pages: usize) -> Result<&Tracked, OutOfMemory> {
        if let Some(tracked) = self.tracked() {
            return Ok(tracked);
        }
        let tracked = Arc::new(Tracked::try_new(pages)?);
        Ok(self.tracked.get_or_init(|| tracked))
    }

    /// Shares the tracked pages of `old`, an earlier record of the same slot.
    pub(crate) fn track_as(&mut self, old: &Self) {
        let on = |tracked: &&Arc<Tracked>| tracked.is_on();
        self.tracked = old
            .tracked
            .get()
            .filter(on)
            .cloned()
            .map_or_else(OnceLock::new, OnceLock::from);
    }

    /// The level of the largest page that the slot's memory allows.
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
