//! The installation of pages.

use super::{Armed, COPY_LOCKS, FaultPath, Kernel, lock, whole};
use crate::{Delivery, GuestRam, MachineError};
use pageferry_addr::{PAGE_SIZE, PageSize, RamPage};
use pageferry_userfault::uffd::{RangeError, Wake};

/// The number of tries for a page that changes under an install.
const TRIES: u32 = 64;

impl<K: Kernel> FaultPath<K> {
    /// See [`crate::Machine::install`].
    pub(in crate::kvm::x86) fn install(
        &self,
        first: RamPage,
        pages: u64,
    ) -> Result<(), MachineError> {
        let ram = &*self.ram;
        check(ram, first, pages)?;
        if pages == 0 {
            return Ok(());
        }
        let Some(armed) = self.armed() else {
            return Ok(());
        };
        let result = match (armed.is_active(), armed.delivery) {
            (true, _) if ram.backing().is_hugetlb() => whole::land(armed, ram, first, pages),
            (true, Delivery::Missing) => fill_holes(armed, first, pages),
            (true, _) => map_present(armed, ram, first, pages),
            (false, _) => Ok(()),
        };
        if result.is_err() {
            // A thread that disarms unregisters first and clears `active` then. It has done both
            // when it gives up its turn.
            drop(lock(&self.ran));
        }
        if armed.is_active() {
            return result;
        }
        // Disarmed before or meanwhile: nothing sleeps any more, and no marker is left.
        Ok(())
    }

    /// See [`crate::Machine::install_copy`].
    pub(in crate::kvm::x86) fn install_copy(
        &self,
        page: RamPage,
        bytes: &[u8],
    ) -> Result<(), MachineError> {
        check(&self.ram, page, 1)?;
        let Some(armed) = self.active() else {
            return Err(MachineError::WrongState(
                "a page can be copied in only while fault delivery is armed",
            ));
        };
        if armed.delivery != Delivery::Missing {
            return Err(MachineError::WrongState(
                "this delivery receives pages in place",
            ));
        }
        if bytes.len() as u64 != PAGE_SIZE {
            return Err(MachineError::WrongState("a page has 4096 bytes"));
        }
        // Two threads may bring the same page. The second must find the first one's result.
        let _turn = lock(&armed.copy_locks[page.index() % COPY_LOCKS]);
        if armed.landed.test(page) {
            return armed
                .watch
                .wake(page, 1)
                .map_err(|e| MachineError::os("cannot wake the sleepers of a page", e));
        }
        match armed.watch.copy(page, bytes, Wake::Now) {
            Ok(()) => {
                armed.landed.set(page);
                Ok(())
            }
            // Present: its bytes are newer than these.
            Err(stop) if stop.is_already_there() && !armed.missing.test(page) => armed
                .watch
                .wake(page, 1)
                .map_err(|e| MachineError::os("cannot wake the sleepers of a page", e)),
            Err(stop) => Err(MachineError::os("cannot copy a missing page in", stop)),
        }
    }
}

fn check(ram: &GuestRam, first: RamPage, pages: u64) -> Result<(), MachineError> {
    match first.checked_add(pages) {
        Some(end) if end.0 <= ram.pages() => Ok(()),
        _ => Err(MachineError::WrongState(
            "pages behind the end of RAM cannot be installed",
        )),
    }
}

/// CONTINUE over the whole range; ZEROPAGE where the page cache has a hole.
fn map_present(
    armed: &Armed<impl Kernel>,
    ram: &GuestRam,
    first: RamPage,
    pages: u64,
) -> Result<(), MachineError> {
    let failed = |e: RangeError| MachineError::os("cannot map a page that has arrived", e);
    let end = first.0 + pages;
    let (mut at, mut stopped, mut idle) = (first, false, 0);
    while at.0 < end {
        match armed
            .watch
            .continue_unmapped(at, end - at.0, PageSize::Size4K, Wake::Now)
        {
            Ok(()) => break,
            Err(stop) if stop.is_not_in_page_cache() => at.0 += pages_done(&stop),
            Err(stop) => return Err(failed(stop)),
        }
        stopped = true;
        // The hole may be gone. One page is tried all the same: the error then says that the page
        // is there.
        let hole = hole_pages(ram, at, end)?.max(1);
        match armed.watch.zeropage(at, hole, Wake::Now) {
            Ok(()) => (at.0, idle) = (at.0 + hole, 0),
            // Filled or mapped meanwhile: CONTINUE decides.
            Err(stop) if stop.is_already_there() && idle < TRIES => {
                idle = if stop.done > 0 { 0 } else { idle + 1 };
                at.0 += pages_done(&stop);
            }
            Err(stop) => return Err(failed(stop)),
        }
    }
    if stopped {
        // A call that stops half-way does not wake the threads that sleep on pages mapped before.
        armed.watch.wake(first, pages).map_err(failed)?;
    }
    Ok(())
}

/// ZEROPAGE wherever there is a hole. For pages of the page cache, only the sleepers must be woken.
fn fill_holes(armed: &Armed<impl Kernel>, first: RamPage, pages: u64) -> Result<(), MachineError> {
    let failed = |e: RangeError| MachineError::os("cannot map a zero page that has arrived", e);
    let end = first.0 + pages;
    let mut at = first;
    while at.0 < end {
        match armed.watch.zeropage(at, end - at.0, Wake::Now) {
            Ok(()) => break,
            Err(stop) if stop.is_already_there() => at.0 += pages_done(&stop) + 1,
            Err(stop) => return Err(failed(stop)),
        }
    }
    for page in first.0..end {
        armed.landed.set(RamPage(page));
    }
    armed.watch.wake(first, pages).map_err(failed)
}

/// The pages that a call has done. It stops at a page's border.
fn pages_done(stop: &RangeError) -> u64 {
    stop.done / PAGE_SIZE
}

/// The number of pages from `at` on, at most to `end`, that are not in the page cache.
fn hole_pages(ram: &GuestRam, at: RamPage, end: u64) -> Result<u64, MachineError> {
    let next = ram.next_allocated(at, 1)?;
    Ok(next.map_or(end, |pages| pages.start.min(end)) - at.0)
}
