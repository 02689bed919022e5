#![expect(
    unsafe_code,
    reason = "maps the memory that slots point at, and promises the hypervisor that it stays mapped"
)]
//! The host memory behind the slots: one private mapping, used by one VM after the other.
//!
//! Every access of this side is by relaxed or stronger atomics; guests access it by the
//! hypervisor's rules.

use crate::BenchError;
use pageferry_addr::{Hva, PAGE_SIZE};
use pageferry_hypervisor::HostMemory;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Zeroed memory of a fixed number of pages.
pub(crate) struct Host {
    start: NonNull<u8>,
    pages: u64,
}

// SAFETY: a mapping belongs to no thread; it is accessed by atomics.
unsafe impl Send for Host {}
// SAFETY: as for Send.
unsafe impl Sync for Host {}

// SAFETY: 1. Mapped readable and writable by `new`, and unmapped when the last owner drops it. 2.
// The mapping came from `mmap`; `hva_range` exposes its provenance. 3. `word` gives shared
// references to atomics, and nothing else does.
unsafe impl HostMemory for Host {
    fn hva_range(&self) -> Range<Hva> {
        let start = self.start.as_ptr().expose_provenance() as u64;
        Hva(start)..Hva(start + self.pages * PAGE_SIZE)
    }
}

impl Host {
    pub(crate) fn new(pages: u64) -> Result<Arc<Self>, BenchError> {
        let bytes = (pages * PAGE_SIZE) as usize;
        let failed = |source: rustix::io::Errno| BenchError::Os {
            what: "cannot map memory for the slots",
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
        // A few pages of it are touched, here and there: whole huge pages would cost memory and
        // time. A kernel without huge pages refuses, and has none to give.
        // SAFETY: the mapping made above; the advice changes no byte.
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
        // SAFETY: inside the mapping by the assertion, and aligned, since the mapping is to pages;
        // it lives as long as `self`. All accesses to it are atomic.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().wrapping_add(at).cast()) }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let bytes = (self.pages * PAGE_SIZE) as usize;
        // SAFETY: mapped by `new`; whoever uses it holds an `Arc` of this.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), bytes) };
    }
}
