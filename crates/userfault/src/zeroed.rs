#![cfg_attr(
    not(any(loom, shuttle)),
    expect(unsafe_code, reason = "makes a box of words that are zero")
)]
//! Words that are zero, from an allocation that writes none of them.
//!
//! **Guarantee.** Making words reads and writes none of them. A refusal of the allocator is an
//! error.
//!
//! **Mechanism.** `alloc_zeroed` takes a large allocation as fresh pages from the kernel, which are
//! zero. A page of words costs memory from the first write to it.

use crate::sync::AtomicU64;
use pageferry_epoch::OutOfMemory;

/// Makes `count` words of 0.
#[cfg(not(any(loom, shuttle)))]
pub(crate) fn zeroed(count: usize) -> Result<Box<[AtomicU64]>, OutOfMemory> {
    use std::alloc::{Layout, alloc_zeroed};
    if count == 0 {
        return Ok(Box::default());
    }
    let bytes = count.saturating_mul(size_of::<AtomicU64>());
    let layout = Layout::array::<AtomicU64>(count).map_err(|_| OutOfMemory { bytes })?;
    #[expect(
        clippy::cast_ptr_alignment,
        reason = "the layout has the words' alignment"
    )]
    // SAFETY: the layout's size is not 0.
    let first = unsafe { alloc_zeroed(layout) }.cast::<AtomicU64>();
    if first.is_null() {
        return Err(OutOfMemory { bytes });
    }
    let words = std::ptr::slice_from_raw_parts_mut(first, count);
    // SAFETY: the global allocator gave this memory with the layout of `[AtomicU64; count]`. All
    // its bytes are 0, which is a valid value of each word. Nobody else has the pointer.
    Ok(unsafe { Box::from_raw(words) })
}

/// Makes `count` words of 0. A model's words are not plain memory.
#[cfg(any(loom, shuttle))]
pub(crate) fn zeroed(count: usize) -> Result<Box<[AtomicU64]>, OutOfMemory> {
    Ok((0..count).map(|_| AtomicU64::new(0)).collect())
}
