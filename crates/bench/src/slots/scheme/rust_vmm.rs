#![expect(
    unsafe_code,
    reason = "vm-memory accepts existing mappings as raw pointers only"
)]
//! vm-memory 0.18: `GuestMemoryAtomic<GuestMemoryMmap>`, as rust-vmm's VMMs use it.
//!
//! A look-up takes the guard of `memory()`, calls `find_region`, and gets the host address from the
//! region. A change creates a new collection by `insert_region` or `remove_region` (both for a
//! move), and publishes it by `lock()` and `replace`. There is no index by host address, so `iter`
//! is walked. The regions are real `GuestRegionMmap`s. They lie over address space that is reserved
//! once and never touched (`MmapRegion` for existing mappings). So no figure includes a system call
//! or a page fault.

use super::{ByGfn, Change, Lookup, Reader, Scheme};
use crate::slots::host;
use crate::slots::input::PlainSlot;
use pageferry_addr::{Gfn, Hva, PAGE_SIZE};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::PoisonError;
use vm_memory::mmap::GuestRegionMmap;
use vm_memory::{
    GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryLoadGuard,
    GuestMemoryMmap, GuestMemoryRegion, MmapRegion,
};

/// `GuestMemoryAtomic<GuestMemoryMmap>`.
#[derive(Debug)]
pub(crate) struct VmMemory(GuestMemoryAtomic<GuestMemoryMmap>);

/// A reader of [`VmMemory`].
#[derive(Debug)]
pub(crate) struct VmMemoryReader(GuestMemoryAtomic<GuestMemoryMmap>);

impl VmMemory {
    fn update(&self, change: impl FnOnce(&GuestMemoryMmap) -> GuestMemoryMmap) {
        let lock = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let new = change(&self.0.memory());
        lock.replace(new);
    }
}

fn region(slot: PlainSlot) -> Arc<GuestRegionMmap> {
    let bytes = slot.pages * PAGE_SIZE;
    let pointer = host::pointer(slot.hva, bytes).expect("a slot inside the reservation");
    // SAFETY: the reservation maps these bytes, and is never unmapped.
    let mapping = unsafe {
        MmapRegion::build_raw(pointer, bytes as usize, libc::PROT_NONE, libc::MAP_PRIVATE)
    }
    .expect("a page-aligned mapping");
    let region = GuestRegionMmap::new(mapping, GuestAddress(slot.start.gpa().0));
    Arc::new(region.expect("a region inside the address space"))
}

fn insert(memory: &GuestMemoryMmap, slot: PlainSlot) -> GuestMemoryMmap {
    memory.insert_region(region(slot)).expect("a region apart")
}

fn remove(memory: &GuestMemoryMmap, slot: PlainSlot) -> GuestMemoryMmap {
    memory
        .remove_region(GuestAddress(slot.start.gpa().0), slot.pages * PAGE_SIZE)
        .expect("a region that is there")
        .0
}

impl Scheme for VmMemory {
    const NAME: &'static str = "vm-memory 0.18";
    type Reader = VmMemoryReader;

    fn reader(&self) -> VmMemoryReader {
        VmMemoryReader(self.0.clone())
    }
}

impl Change for VmMemory {
    fn empty() -> Self {
        Self(GuestMemoryAtomic::new(GuestMemoryMmap::new()))
    }

    fn add(&mut self, slot: PlainSlot) {
        self.update(|memory| insert(memory, slot));
    }

    fn delete(&mut self, slot: PlainSlot) {
        self.update(|memory| remove(memory, slot));
    }

    fn relocate(&mut self, slot: PlainSlot, to: Gfn) -> PlainSlot {
        let moved = PlainSlot { start: to, ..slot };
        self.update(|memory| insert(&remove(memory, slot), moved));
        moved
    }
}

impl Reader for VmMemoryReader {
    type Held<'a> = GuestMemoryLoadGuard<GuestMemoryMmap>;

    #[inline]
    fn hold(&mut self) -> Self::Held<'_> {
        self.0.memory()
    }
}

impl ByGfn for GuestMemoryLoadGuard<GuestMemoryMmap> {
    #[inline]
    fn by_gfn(&self, gfn: Gfn) -> Option<Hva> {
        let address = GuestAddress(gfn.gpa().0);
        let region = self.find_region(address)?;
        let offset = region.to_region_addr(address)?;
        Some(Hva(region.get_host_address(offset).ok()? as u64))
    }
}

impl Lookup for GuestMemoryLoadGuard<GuestMemoryMmap> {
    #[inline]
    fn by_hva(&self, hva: Hva, mut visit: impl FnMut(Gfn) -> ControlFlow<()>) {
        for region in self.iter() {
            let offset = hva.0.wrapping_sub(region.as_ptr() as u64);
            if offset < region.len()
                && visit(Gfn((region.start_addr().0 + offset) / PAGE_SIZE)).is_break()
            {
                return;
            }
        }
    }
}
