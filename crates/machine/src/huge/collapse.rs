#![expect(unsafe_code, reason = "asks the host for huge pages of guest memory")]
//! Makes one huge page of the host, for the engines of this crate.

use super::Collapsed;
use crate::GuestRam;
use pageferry_addr::{Hva, PageSize, RamPage};
use std::ops::Range;

/// `include/uapi/asm-generic/mman-common.h`.
const MADV_COLLAPSE: i32 = 25;

/// The indices of the 2 MiB of pages from `first`.
///
/// # Panics
/// If they do not begin at a multiple of 2 MiB, or leave RAM.
pub(crate) fn whole_range(ram: &GuestRam, first: RamPage) -> Range<usize> {
    let pages = PageSize::Size2M.pages();
    assert!(
        first.0.is_multiple_of(pages) && first.0 + pages <= ram.pages(),
        "{first:?} does not begin 2 MiB of the {} pages of RAM",
        ram.pages()
    );
    first.index()..first.index() + pages as usize
}

/// Collapses the 2 MiB from `first` in a mapping of RAM that has `first` at `at`. None of its pages
/// may be missing.
pub(crate) fn collapse(ram: &GuestRam, at: Hva, first: RamPage) -> Collapsed {
    if ram.backing().is_hugetlb() {
        return Collapsed::Huge;
    }
    let pages = PageSize::Size2M.pages();
    if !ram.is_allocated(first, pages).unwrap_or(false) {
        return Collapsed::Incomplete;
    }
    // One file has no huge page for a range that others share.
    if ram.files(first, pages).count() > 1 {
        return Collapsed::Refused;
    }
    let at = at.0 as *mut _;
    // SAFETY: `is_allocated` checked that the range is RAM. A mapping has the pages of one file one
    // behind the other. Collapsing changes no byte.
    match unsafe { libc::madvise(at, PageSize::Size2M.bytes() as usize, MADV_COLLAPSE) } {
        0 => Collapsed::Huge,
        _ => Collapsed::Refused,
    }
}
