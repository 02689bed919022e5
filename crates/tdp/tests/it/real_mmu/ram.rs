#![expect(
    unsafe_code,
    reason = "guest memory is a mapping that the guest writes at any time"
)]
//! The guest's memory: one mapping, accessed by atomics only, since the guest and the MMU write it
//! at any time.

use super::layout::{FLUSH_PAGES, RAM_BYTES};
use rustix::mm::{MapFlags, ProtFlags};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Guest-physical `0..RAM_BYTES`, followed by the pages of the slot that is unplugged for a flush.
pub(crate) struct Ram(NonNull<u8>);

// SAFETY: the mapping belongs to no thread, and every access to it is atomic.
unsafe impl Send for Ram {}
// SAFETY: as above.
unsafe impl Sync for Ram {}

impl Ram {
    /// Zeroes. Pages take host memory when they are touched.
    pub(crate) fn new() -> Self {
        // SAFETY: the kernel chooses an unused address, so this replaces no mapping.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                null_mut(),
                Self::mapped_bytes(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
            )
        };
        let start = start.expect("address space for guest memory");
        Self(NonNull::new(start.cast()).expect("mmap returns no null on success"))
    }

    fn mapped_bytes() -> usize {
        (RAM_BYTES + FLUSH_PAGES * 4096) as usize
    }

    /// The host address of guest-physical 0.
    pub(crate) fn host_address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    fn at(&self, gpa: u64, bytes: u64) -> NonNull<u8> {
        assert!(gpa + bytes <= RAM_BYTES, "{gpa:#x} is no RAM");
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.0.add(gpa as usize) }
    }

    /// The eight bytes at `gpa`.
    pub(crate) fn word(&self, gpa: u64) -> &AtomicU64 {
        // SAFETY: valid as long as `self`, aligned since `words` checks that, accessed by atomics
        // only.
        unsafe { self.words(gpa, 1).as_ref() }
    }

    /// `count` words from `gpa` on.
    pub(crate) fn words(&self, gpa: u64, count: u64) -> NonNull<AtomicU64> {
        assert!(gpa.is_multiple_of(8), "{gpa:#x} is not aligned");
        self.at(gpa, count * 8).cast()
    }

    /// The guest-physical address of a result of [`words`](Self::words).
    pub(crate) fn gpa(&self, words: NonNull<AtomicU64>) -> u64 {
        let gpa = (words.as_ptr() as u64).wrapping_sub(self.host_address());
        assert!(gpa < RAM_BYTES, "{words:?} is not in RAM");
        gpa
    }

    /// Writes `bytes` at `gpa`.
    pub(crate) fn write(&self, gpa: u64, bytes: &[u8]) {
        let to = self.at(gpa, bytes.len() as u64).cast::<AtomicU8>();
        for (offset, byte) in bytes.iter().enumerate() {
            // SAFETY: inside the mapping, as `at` has checked; alive as long as `self`; accessed by
            // atomics only.
            unsafe { to.add(offset).as_ref() }.store(*byte, Ordering::Relaxed);
        }
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`. Every user holds `self`.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), Self::mapped_bytes()) };
    }
}
