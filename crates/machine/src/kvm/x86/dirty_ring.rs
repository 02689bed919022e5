#![expect(unsafe_code, reason = "maps the dirty rings that KVM shares")]
//! The dirty log by rings: one for each vCPU, in which KVM appends each page that the vCPU dirtied
//! (`KVM_CAP_DIRTY_LOG_RING` in `Documentation/virt/kvm/api.rst`).
//!
//! A harvest costs what was dirtied, and nothing for clean memory. A write to a page that is in a
//! ring already is not logged again, until `KVM_RESET_DIRTY_RINGS` protects the page.
//!
//! **Nothing is lost.** All of this runs under the lock of [`super::dirty::DirtyLog`].
//!
//! 1. An entry is read into a bitmap before it is handed back, so an error loses none.
//! 2. Entries that were handed back are reset, and TLBs flushed, before the lock is released.
//! 3. A page that is written again before that flush is not logged a second time. It need not be:
//!    the caller of the harvest reads its bytes after that.
//! 4. A write after the flush faults, and makes a new entry.
//! 5. A full ring makes its vCPU leave the guest. The vCPU's thread moves the entries to the log of
//!    the VMM's writes. By steps 2 and 3, a harvest finds them there only after their reset.
//! 6. Only vCPUs write a VM's slots on x86 (`kvm_arch_allow_write_without_running_vcpu`). So no
//!    page needs the bitmap beside the rings that other architectures have.
//! 7. A CPU that logs dirty pages by itself (PML) hands its log to KVM when the vCPU leaves the
//!    guest. So the rings of stopped vCPUs are complete.

use super::ring::{DirtyGfn, RingReader};
use super::sys;
use crate::{MachineError, RamRegion};
use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_DIRTY_LOG_PAGE_OFFSET,
    kvm_enable_cap,
};
use kvm_ioctls::{VcpuFd, VmFd};
use pageferry_addr::{PAGE_SIZE, RamPage};
use rustix::mm::{MapFlags, ProtFlags};
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// Calls of `KVM_RESET_DIRTY_RINGS` that may do nothing, each for a signal that came.
const FRUITLESS_RESETS: u32 = 1000;

/// The rings of one VM.
#[derive(Default)]
pub(super) struct Rings {
    /// Entries of each ring.
    entries: u32,
    rings: Vec<Ring>,
    /// Entries that were handed back, and that KVM has not reset yet.
    unreset: usize,
}

impl Rings {
    /// Gives each vCPU of `vm` a ring of `entries` entries, or of as many as KVM allows. `None` if
    /// KVM has no rings, or refuses this number. No vCPU may exist.
    pub(super) fn enable(vm: &VmFd, entries: u32) -> Option<Self> {
        let entry = size_of::<DirtyGfn>() as u32;
        // Under x86's memory model both mean the same.
        let caps = [KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DIRTY_LOG_RING];
        let (cap, most) = caps.into_iter().find_map(|cap| {
            let most = u32::try_from(vm.check_extension_raw(cap.into())).ok()?;
            (most > 0).then_some((cap, most))
        })?;
        let bytes = entries.checked_mul(entry)?.min(most);
        let enabled = vm.enable_cap(&kvm_enable_cap {
            cap,
            args: [bytes.into(), 0, 0, 0],
            ..Default::default()
        });
        enabled.ok().map(|()| Self {
            entries: bytes / entry,
            ..Self::default()
        })
    }

    /// The entries of each ring.
    pub(super) fn entries(&self) -> u32 {
        self.entries
    }

    /// Maps the ring of the next vCPU.
    pub(super) fn add(&mut self, vcpu: &VcpuFd) -> Result<(), MachineError> {
        self.rings.push(Ring::map(vcpu, self.entries as usize)?);
        Ok(())
    }

    /// Calls `found` with the pages in the rings of `vcpus` (indices). With `take`, empties these
    /// rings, and returns when KVM has protected the pages again.
    pub(super) fn read(
        &mut self,
        vm: &VmFd,
        regions: &[RamRegion],
        vcpus: std::ops::Range<usize>,
        take: bool,
        mut found: impl FnMut(RamPage),
    ) -> Result<(), MachineError> {
        for ring in &mut self.rings[vcpus] {
            let (taken, result) = ring.reader.read(ring.map.entries(), take, |slot, offset| {
                page_of(regions, slot, offset).map(&mut found)
            });
            self.unreset += taken;
            result?;
        }
        self.reset(vm)
    }

    /// The indices of all vCPUs.
    pub(super) fn all(&self) -> std::ops::Range<usize> {
        0..self.rings.len()
    }

    /// Has KVM reset what was handed back.
    fn reset(&mut self, vm: &VmFd) -> Result<(), MachineError> {
        let what = "cannot re-arm the dirty log";
        let mut fruitless = 0;
        while self.unreset > 0 {
            let done = sys::reset_dirty_rings(vm).map_err(|e| MachineError::os(what, e))?;
            self.unreset = self.unreset.saturating_sub(done);
            fruitless = if done == 0 { fruitless + 1 } else { 0 };
            if fruitless > FRUITLESS_RESETS {
                return Err(MachineError::os(what, rustix::io::Errno::INTR));
            }
        }
        Ok(())
    }
}

/// The page of RAM that an entry names.
fn page_of(regions: &[RamRegion], slot: u32, offset: u64) -> Result<RamPage, MachineError> {
    regions
        .iter()
        .find(|region| region.slot == slot && offset < region.pages)
        .map(|region| RamPage(region.first.0 + offset))
        .ok_or(MachineError::WrongState(
            "the kernel's dirty ring names a page that is not in RAM",
        ))
}

struct Ring {
    map: RingMap,
    reader: RingReader,
}

impl Ring {
    fn map(vcpu: &VcpuFd, entries: usize) -> Result<Self, MachineError> {
        Ok(Self {
            map: RingMap::new(vcpu, entries)?,
            reader: RingReader::default(),
        })
    }
}

/// The mapped entries of one ring. The mapping keeps the vCPU's file, so the kernel's ring too.
struct RingMap {
    start: NonNull<DirtyGfn>,
    entries: usize,
}

// SAFETY: the mapping belongs to no thread, and its entries are atomics.
unsafe impl Send for RingMap {}

impl RingMap {
    fn new(vcpu: &VcpuFd, entries: usize) -> Result<Self, MachineError> {
        // SAFETY: the descriptor is open while `vcpu` is borrowed.
        let fd = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
        // SAFETY: the kernel chooses an unused address; nothing existing is replaced.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                entries * size_of::<DirtyGfn>(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                u64::from(KVM_DIRTY_LOG_PAGE_OFFSET) * PAGE_SIZE,
            )
        }
        .map_err(|e| MachineError::os("cannot map a vCPU's dirty ring", e))?;
        let start = NonNull::new(start.cast()).expect("mmap returns no null on success");
        Ok(Self { start, entries })
    }

    fn entries(&self) -> &[DirtyGfn] {
        // SAFETY: (1) the mapping has this many entries and lives as long as `self`; (2) it is page
        // aligned; (3) all fields are atomics, so the kernel may write them meanwhile; (4) KVM's
        // mapping of a ring has as many pages as the ring, so no access faults.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.entries) }
    }
}

impl Drop for RingMap {
    fn drop(&mut self) {
        let bytes = self.entries * size_of::<DirtyGfn>();
        // SAFETY: the range was mapped by `new`, and no borrow of it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RamLayout;

    #[test]
    fn an_entry_outside_ram_is_an_error() {
        let layout = RamLayout::for_memory((3 << 30) + 65 * PAGE_SIZE).unwrap();
        let regions = layout.regions();
        assert_eq!(regions.len(), 2);
        for region in regions {
            let page = |offset| page_of(regions, region.slot, offset);
            assert_eq!(page(0).unwrap(), region.first);
            let last = region.pages - 1;
            assert_eq!(page(last).unwrap().0, region.first.0 + last);
            page(region.pages).unwrap_err();
            page(u64::MAX).unwrap_err();
            // The same id in another address space.
            page_of(regions, region.slot | 1 << 16, 0).unwrap_err();
        }
        page_of(regions, 2, 0).unwrap_err();
    }
}
