#![expect(
    unsafe_code,
    reason = "maps the memory that slots point at, and guarantees the hypervisor that it stays mapped"
)]
//! The host memory behind the slots: one private mapping, which one VM after the other uses.
//!
//! The benchmark accesses it by atomics only; guests access it by the hypervisor's rules.

use crate::BenchError;
use pageferry_addr::{Hva, PAGE_SIZE};
use pageferry_hypervisor::HostMemory;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Zeroed memory of a fixed number of pages.
pub(crate) struct SlotMemory {
    start: NonNull<u8>,
    pages: u64,
}

// SAFETY: a mapping belongs to no thread, and every access is atomic.
unsafe impl Send for SlotMemory {}
// SAFETY: as for Send.
unsafe impl Sync for SlotMemory {}

// SAFETY:
// 1. `new` maps the memory readable and writable. It is unmapped when the last owner drops it.
// 2. The mapping came from `mmap`; `hva_range` exposes its provenance.
// 3. `word` gives shared references to atomics, and nothing else gives references.
unsafe impl HostMemory for SlotMemory {
    fn hva_range(&self) -> Range<Hva> {
        let start = self.start.as_ptr().expose_provenance() as u64;
        Hva(start)..Hva(start + self.pages * PAGE_SIZE)
    }
}

impl SlotMemory {
    pub(crate) fn new(pages: u64) -> Result<Arc<Self>, BenchError> {
        let bytes = (pages * PAGE_SIZE) as usize;
        let failed = |source: rustix::io::Errno| BenchError::Os {
            what: "cannot map host memory for the slots",
            source: source.into(),
        };
        // SAFETY: the kernel chooses an unused address; nothing existing is replaced.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(failed)?;
        let start = NonNull::new(start.cast::<u8>()).expect("mmap returns no null on success");
        let host = Self { start, pages };
        // The tests touch single pages, for which huge pages would cost memory and time. A kernel
        // without huge pages refuses the advice, and needs none.
        //
        // SAFETY: the range is the mapping above, and the advice changes no byte.
        let _ =
            unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, Advice::LinuxNoHugepage) };
        Ok(Arc::new(host))
    }

    /// The address of a page.
    pub(crate) fn hva(&self, page: u64) -> Hva {
        assert!(page <= self.pages, "page {page} of {}", self.pages);
        Hva(self.hva_range().start.0 + page * PAGE_SIZE)
    }

    /// The doubleword at byte `offset` of a page.
    pub(crate) fn word(&self, page: u64, offset: u64) -> &AtomicU64 {
        assert!(page < self.pages && offset < PAGE_SIZE && offset.is_multiple_of(8));
        let at = (page * PAGE_SIZE + offset) as usize;
        // SAFETY: the word is inside the mapping by the assertion. It is aligned, because the
        // mapping is page-aligned. The mapping lives as long as `self`, and all accesses to it are
        // atomic.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().wrapping_add(at).cast()) }
    }

    /// Writes machine code to page 0 from byte `offset` on, a multiple of 8.
    pub(crate) fn write_code(&self, offset: u64, code: &[u32]) {
        for (offset, pair) in (offset..).step_by(8).zip(code.chunks(2)) {
            let high = pair.get(1).copied().unwrap_or(0);
            let word = u64::from(pair[0]) | u64::from(high) << 32;
            self.word(0, offset).store(word, Ordering::Relaxed);
        }
    }
}

impl Drop for SlotMemory {
    fn drop(&mut self) {
        let bytes = (self.pages * PAGE_SIZE) as usize;
        // SAFETY: `new` mapped it, and every user holds an `Arc` of this.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), bytes) };
    }
}
