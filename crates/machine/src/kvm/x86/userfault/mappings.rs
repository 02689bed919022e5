#![expect(unsafe_code, reason = "drops pages from the guest's mapping")]
//! The guest's mapping: ranges of it, its markers, and the removal of pages from it.

use super::kernel::Kernel;
use crate::{Backing, GuestRam, MachineError};
use pageferry_addr::{PAGE_SIZE, RamPage};
use rustix::mm::Advice;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// The pages of one read of the pagemap.
const READ_PAGES: u64 = 4096;
/// An entry of the pagemap that is neither empty nor a page. In a mapping of shared memory it is a
/// marker, or a page that the kernel moves (`pte_to_pagemap_entry` in `fs/proc/task_mmu.c`).
const PM_SWAP: u64 = 1 << 62;

/// Makes holes of pages, so that a touch of them is a missing fault.
///
/// The kernel may only write zeros to a part of a huge page that it cannot split at the moment
/// (`shmem_undo_range` in `mm/shmem.c`). The guest would then see zeros. So this checks, and tries
/// again.
pub(super) fn punch(ram: &GuestRam, first: RamPage, pages: u64) -> Result<(), MachineError> {
    const TRIES: u32 = 100;
    for _ in 0..TRIES {
        // SAFETY: (1) the pages are missing, and `Machine::begin_postcopy` runs before any is
        // placed.
        unsafe { ram.unchecked() }.punch_hole(first, pages)?;
        // Private memory is freed for sure.
        if ram.backing() == Backing::Anonymous || ram.is_hole(first, pages)? {
            return Ok(());
        }
        std::thread::sleep(Duration::from_micros(10));
    }
    Err(MachineError::WrongState(
        "missing pages cannot be freed, as something holds the host's huge pages that they are part of: use fault delivery poison or minor",
    ))
}

/// Removes all markers from the guest's mapping. It reads 8 bytes a page, in about 90 ns.
pub(super) fn sweep_markers(kernel: &impl Kernel, pages: u64) -> Result<(), MachineError> {
    let mut from = 0;
    while from < pages {
        let read = from..(from + READ_PAGES).min(pages);
        let Some(markers) = kernel.markers(read.clone())? else {
            // Pages come back by faults.
            return kernel.drop_mappings(RamPage(0), pages);
        };
        let mut first = from;
        for run in markers.chunk_by(|a, b| a == b) {
            if run[0] {
                kernel.drop_mappings(RamPage(first), run.len() as u64)?;
            }
            first += run.len() as u64;
        }
        from = read.end;
    }
    Ok(())
}

/// [`Kernel::drop_mappings`]
pub(super) fn drop_mappings(
    ram: &GuestRam,
    first: RamPage,
    pages: u64,
) -> Result<(), MachineError> {
    assert!(
        ram.backing() != Backing::Anonymous,
        "private memory would lose its bytes"
    );
    for (start, pages) in ram.guest_runs(first, pages) {
        let len = (pages * PAGE_SIZE) as usize;
        // SAFETY: the range lies in the guest's mapping, which is shared and backed by the memfd,
        // so no bytes are lost. KVM's MMU notifier learns of it, and KVM maps the pages again.
        unsafe { rustix::mm::madvise(start.0 as *mut _, len, Advice::LinuxDontNeed) }
            .map_err(|e| MachineError::os("cannot drop pages from the guest's mapping", e))?;
    }
    Ok(())
}

/// [`Kernel::markers`]
pub(in crate::kvm::x86) fn markers(
    ram: &GuestRam,
    pages: Range<u64>,
) -> Result<Option<Vec<bool>>, MachineError> {
    let Ok(pagemap) = File::open("/proc/self/pagemap") else {
        return Ok(None);
    };
    let count = pages.end - pages.start;
    let mut entries = Vec::with_capacity(count as usize * 8);
    for (start, pages) in ram.guest_runs(RamPage(pages.start), count) {
        let read = entries.len();
        entries.resize(read + pages as usize * 8, 0);
        pagemap
            .read_exact_at(&mut entries[read..], start.0 / PAGE_SIZE * 8)
            .map_err(|e| MachineError::os("cannot read the pagemap of this process", e))?;
    }
    let (entries, _) = entries.as_chunks::<8>();
    let is_marker = |entry: &[u8; 8]| u64::from_le_bytes(*entry) & PM_SWAP != 0;
    Ok(Some(entries.iter().map(is_marker).collect()))
}

/// [`Kernel::populate`]
pub(super) fn populate(ram: &GuestRam, page: RamPage) -> Result<(), MachineError> {
    let start = ram.guest_hva(page);
    // SAFETY: populating changes no byte, and the page lies in the guest's mapping.
    unsafe {
        rustix::mm::madvise(
            start.0 as *mut _,
            PAGE_SIZE as usize,
            Advice::LinuxPopulateRead,
        )
    }
    .map_err(|e| MachineError::os("cannot reach the host's memory", e))
}
