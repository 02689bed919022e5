#![expect(unsafe_code, reason = "drops pages from the guest's mapping")]
//! The guest's mapping: ranges of it, and the removal of pages from it.

use crate::{GuestRam, MachineError};
use pageferry_addr::{Hva, PAGE_SIZE, RamPage};
use rustix::mm::Advice;

/// The address and the length of pages in the guest's mapping.
pub(super) fn range(ram: &GuestRam, first: RamPage, pages: u64) -> (Hva, u64) {
    (ram.guest_hva(first), pages * PAGE_SIZE)
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

/// Removes the markers from pages of a machine that is no longer armed.
pub(in crate::kvm::x86) fn lift_markers(
    ram: &GuestRam,
    first: RamPage,
    pages: u64,
) -> Result<(), MachineError> {
    drop_mappings(ram, first, pages)
}
