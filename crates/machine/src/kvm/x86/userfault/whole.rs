//! The installation of a pool's pages, which the kernel maps whole.
//!
//! **Guarantee.** A huge page is mapped once the bytes of all its pieces of 4 KiB are in place, and
//! not before. It does not matter which threads bring the pieces, and in which order.
//!
//! **Mechanism.** A thread that installs pieces holds the lock of their huge page. It records them
//! as landed, and maps the page if every piece has landed or is not missing. The missing bits are
//! cleared after the installation, so they alone would not do: two threads that bring the last two
//! pieces would each find the other's bit set.

use super::{Armed, COPY_LOCKS, Kernel, lock};
use crate::{GuestRam, MachineError};
use pageferry_addr::RamPage;
use pageferry_userfault::uffd::{RangeError, Wake};
use std::ops::Range;

/// Records `pages` pieces from `first`, whose bytes are in place, and maps the huge pages that are
/// whole with them.
pub(super) fn land(
    armed: &Armed<impl Kernel>,
    ram: &GuestRam,
    first: RamPage,
    pages: u64,
) -> Result<(), MachineError> {
    let unit = ram.backing().page_size().pages() as usize;
    let end = first.index() + pages as usize;
    let mut at = first.index();
    while at < end {
        let start = at - at % unit;
        let page = start..start + unit;
        let landed = at..end.min(page.end);
        at = landed.end;
        // Each huge page has one of the locks.
        let _turn = lock(&armed.copy_locks[page.start / unit % COPY_LOCKS]);
        armed.landed.set_range(landed);
        if is_whole(armed, page.clone()) {
            map(armed, ram, RamPage(page.start as u64))?;
        }
    }
    Ok(())
}

/// Whether all pieces of `page` are in place.
fn is_whole<K>(armed: &Armed<K>, page: Range<usize>) -> bool {
    let mut at = page.start;
    while let Some(missing) = armed.missing.next_set(at).filter(|at| *at < page.end) {
        if !armed.landed.test(RamPage(missing as u64)) {
            return false;
        }
        at = missing + 1;
    }
    true
}

fn map(armed: &Armed<impl Kernel>, ram: &GuestRam, page: RamPage) -> Result<(), MachineError> {
    let size = ram.backing().page_size();
    let map = || {
        let pages = size.pages();
        armed.watch.continue_unmapped(page, pages, size, Wake::Now)
    };
    let mapped = match map() {
        // Nobody has written a piece: all are zero.
        Err(stop) if stop.is_not_in_page_cache() => {
            ram.allocate_range(page, size.pages())?;
            map()
        }
        mapped => mapped,
    };
    let failed = |e: RangeError| MachineError::os("cannot map a huge page that has arrived", e);
    mapped.map_err(failed)
}
