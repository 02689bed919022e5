#![expect(unsafe_code, reason = "drops pages from the guest's mapping")]
//! The guest's mapping: ranges of it, and the removal of pages from it.

use crate::{GuestRam, MachineError};
use pageferry_addr::{Hva, PAGE_SIZE, RamPage};
use rustix::mm::Advice;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// The pages of one read of the pagemap.
const READ_PAGES: u64 = 4096;
/// An entry of the pagemap that is neither empty nor a page. In a mapping of shared memory it is a
/// marker, or a page that the kernel moves (`pte_to_pagemap_entry` in `fs/proc/task_mmu.c`).
const PM_SWAP: u64 = 1 << 62;

/// The address and the length of pages in the guest's mapping.
pub(super) fn range(ram: &GuestRam, first: RamPage, pages: u64) -> (Hva, u64) {
    (ram.guest_hva(first), pages * PAGE_SIZE)
}

/// Makes holes of pages, so that a touch of them is a missing fault.
///
/// The kernel may only write zeros to a part of a huge page that it cannot split at the moment
/// (`shmem_undo_range` in `mm/shmem.c`). The guest would then see zeros. So this checks, and tries
/// again.
pub(super) fn punch(ram: &GuestRam, first: RamPage, pages: u64) -> Result<(), MachineError> {
    const TRIES: u32 = 100;
    for _ in 0..TRIES {
        ram.punch_hole(first, pages)?;
        if ram.is_hole(first, pages)? {
            return Ok(());
        }
        std::thread::sleep(Duration::from_micros(10));
    }
    Err(MachineError::WrongState(
        "missing pages cannot be freed, as something holds the host's huge pages that they are part of: use fault delivery poison or minor",
    ))
}

/// Takes pages out of the guest's mapping. They stay in the page cache with their bytes. Poison
/// markers go.
pub(super) fn drop_mappings(
    ram: &GuestRam,
    first: RamPage,
    pages: u64,
) -> Result<(), MachineError> {
    let (start, len) = range(ram, first, pages);
    // SAFETY: the range lies in the guest's mapping, which is shared and backed by the memfd, so no
    // bytes are lost. KVM's MMU notifier learns of it, and KVM maps the pages again.
    unsafe { rustix::mm::madvise(start.0 as *mut _, len as usize, Advice::LinuxDontNeed) }
        .map_err(|e| MachineError::os("cannot drop pages from the guest's mapping", e))
}

/// Removes all markers from the guest's mapping. It reads 8 bytes a page, in about 90 ns.
pub(super) fn sweep_markers(ram: &GuestRam) -> Result<(), MachineError> {
    let Ok(pagemap) = File::open("/proc/self/pagemap") else {
        // Without it, markers cannot be told from pages, and those come back by faults.
        return drop_mappings(ram, RamPage(0), ram.pages());
    };
    let mut bytes = vec![0; READ_PAGES as usize * 8];
    let mut from = 0;
    while from < ram.pages() {
        let pages = READ_PAGES.min(ram.pages() - from);
        let read = &mut bytes[..pages as usize * 8];
        let offset = ram.guest_hva(RamPage(from)).0 / PAGE_SIZE * 8;
        pagemap
            .read_exact_at(read, offset)
            .map_err(|e| MachineError::os("cannot read the pagemap of this process", e))?;
        let (entries, _) = read.as_chunks::<8>();
        let mut first = from;
        for run in entries.chunk_by(|a, b| is_marker(a) == is_marker(b)) {
            if is_marker(&run[0]) {
                drop_mappings(ram, RamPage(first), run.len() as u64)?;
            }
            first += run.len() as u64;
        }
        from += pages;
    }
    Ok(())
}

fn is_marker(entry: &[u8; 8]) -> bool {
    u64::from_le_bytes(*entry) & PM_SWAP != 0
}

/// Whether the page has a marker.
#[cfg(test)]
pub(in crate::kvm::x86) fn is_marked(ram: &GuestRam, page: RamPage) -> bool {
    let mut entry = [0; 8];
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let offset = ram.guest_hva(page).0 / PAGE_SIZE * 8;
    pagemap.read_exact_at(&mut entry, offset).unwrap();
    is_marker(&entry)
}

/// Removes a marker of a machine that is no longer armed, and maps the page again.
///
/// # Errors
/// Also when the host has lost the page's memory.
pub(in crate::kvm::x86) fn lift_marker(ram: &GuestRam, page: RamPage) -> Result<(), MachineError> {
    drop_mappings(ram, page, 1)?;
    let (start, len) = range(ram, page, 1);
    // SAFETY: populating changes no byte, and the page lies in the guest's mapping.
    unsafe { rustix::mm::madvise(start.0 as *mut _, len as usize, Advice::LinuxPopulateRead) }
        .map_err(|e| MachineError::os("cannot reach the host's memory", e))
}
