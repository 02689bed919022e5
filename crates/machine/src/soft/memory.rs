#![expect(
    unsafe_code,
    reason = "promises the hypervisor that guest memory stays mapped"
)]
//! Guest RAM as host memory for the hypervisor's slots.

use crate::GuestRam;
use core::ops::Range;
use pageferry_addr::{Hva, RamPage};
use pageferry_hypervisor::HostMemory;
use std::sync::Arc;

/// The addresses of the alias of `ram`.
pub(super) fn alias_mapping(ram: &GuestRam) -> Range<Hva> {
    let start = ram.alias_hva(RamPage(0));
    start..Hva(start.0 + ram.layout().bytes())
}

/// The alias mapping of a VM's RAM; keeps it mapped.
pub(super) struct RamOwner(pub(super) Arc<GuestRam>);

// SAFETY: 1. `GuestRam` maps the alias readable and writable when it is made, unmaps it when it is
// dropped, and seals the memfd so that it cannot shrink. This holds an `Arc` of it. 2. The mapping
// came from `mmap`, and `alias_hva` casts its pointer to an integer, which exposes it. 3.
// `GuestRam` hands out no references and accesses the mapping by volatile words. Its callers use
// system calls and volatile accesses.
unsafe impl HostMemory for RamOwner {
    fn hva_range(&self) -> Range<Hva> {
        alias_mapping(&self.0)
    }
}
