//! The dirty log: the pages that vCPUs wrote since the last harvest.
//!
//! While a slot has a log, KVM write-protects its pages. The first write to a page faults, is
//! logged, and lifts the protection. A *harvest* reads the log. To re-arm, it also empties the log
//! and protects the pages again.
//!
//! KVM has two kinds of log. `dirty_bitmap` and `dirty_ring` each say why they lose nothing. A VM
//! keeps its kind for life, because KVM wants to know before it creates vCPUs.
//!
//! **The guest's page tables are in the log too**, on every host. Under shadow paging KVM sets
//! their accessed and dirty bits for the guest. Under NPT, and under EPT with accessed and dirty
//! bits, the CPU's page walks count as writes, even if there is no bit left to set (AMD64 APM
//! volume 2, "Nested Paging"; Intel SDM volume 3, "Accessed and Dirty Flags for EPT").
//!
//! Without re-arming, a harvest only reads. The pages that it found stay in the log. If the VM
//! resumes nevertheless, the next harvest reports it again. That is too much, never too little.

use super::dirty_bitmap::Bitmap;
use super::dirty_ring::Rings;
use super::slots::Slots;
use super::sync::{AtomicBool, Ordering};
use crate::{GuestRam, MachineError};
use kvm_ioctls::{VcpuFd, VmFd};
use pageferry_userfault::PageBitmap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How KVM logs the pages that vCPUs write.
///
/// The kinds differ in cost. A bitmap is copied whole, also for clean memory, and the last copy is
/// part of a migration's blackout. A ring has only the pages that were dirtied. But a full ring is
/// emptied at once, so its pages are write-protected again. A vCPU that keeps writing to more pages
/// than its ring holds then faults on each of them, again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DirtyTracking {
    /// By rings if the VM has [`Self::RINGS_FROM`] bytes of RAM, and KVM has rings. Else by bitmap.
    #[default]
    Auto,
    /// By one bit for each page of RAM.
    Bitmap,
    /// By a ring for each vCPU, with this number of entries: a power of two, 1024 to 65536. KVM
    /// keeps 64 of them free, and 512 more on CPUs that log dirty pages themselves (PML).
    Ring(u32),
}

/// The most entries of a vCPU's dirty ring on this host. `None` if its KVM has no dirty rings, or
/// cannot be used.
#[must_use]
pub fn dirty_ring_entries() -> Option<u32> {
    let vm = super::device::open(c"/dev/kvm").ok()?.create_vm().ok()?;
    Rings::enable(&vm, RING_ENTRIES).map(|rings| rings.entries())
}

impl DirtyTracking {
    /// RAM in bytes from which copying a bitmap is a large part of a blackout: 0.5 ms of about 1.5.
    pub const RINGS_FROM: u64 = 64 << 30;
}

/// The entries of each vCPU's ring: all that KVM allows, 1 MiB. They name 256 MiB of pages.
const RING_ENTRIES: u32 = 1 << 16;

/// The log of one VM.
pub(super) struct DirtyLog {
    on: AtomicBool,
    /// The lock serializes switches, harvests and full rings.
    log: Mutex<LogKind>,
}

enum LogKind {
    Bitmap(Bitmap),
    Rings(Rings),
}

impl DirtyLog {
    /// Chooses the kind of log of a VM with this much RAM, which has no vCPUs yet.
    pub(super) fn new(
        vm: &VmFd,
        tracking: DirtyTracking,
        ram_bytes: u64,
    ) -> Result<Self, MachineError> {
        let rings = match tracking {
            DirtyTracking::Auto if ram_bytes >= DirtyTracking::RINGS_FROM => {
                Rings::enable(vm, RING_ENTRIES)
            }
            DirtyTracking::Auto | DirtyTracking::Bitmap => None,
            DirtyTracking::Ring(entries) => {
                let rings = Rings::enable(vm, entries);
                Some(rings.ok_or_else(|| {
                    MachineError::EngineUnavailable(format!(
                        "this host's KVM has no dirty rings of {entries} entries: use its dirty bitmap"
                    ))
                })?)
            }
        };
        let log = match rings {
            Some(rings) => LogKind::Rings(rings),
            None => LogKind::Bitmap(Bitmap::enable(vm)),
        };
        Ok(Self {
            on: AtomicBool::new(false),
            log: Mutex::new(log),
        })
    }

    fn lock(&self) -> MutexGuard<'_, LogKind> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in the next vCPU, in order of their ids.
    pub(super) fn add_vcpu(&self, vcpu: &VcpuFd) -> Result<(), MachineError> {
        match &mut *self.lock() {
            LogKind::Bitmap(_) => Ok(()),
            LogKind::Rings(rings) => rings.add(vcpu),
        }
    }

    /// Starts or stops the log. KVM protects all pages and flushes before it returns.
    pub(super) fn switch(
        &self,
        vm: &VmFd,
        slots: &Slots,
        ram: &Arc<GuestRam>,
        on: bool,
    ) -> Result<(), MachineError> {
        let mut log = self.lock();
        if self.on.load(Ordering::Acquire) == on {
            return Ok(());
        }
        let regions = ram.layout().regions();
        for region in regions {
            slots.set_log(vm, region, on)?;
        }
        if let (LogKind::Rings(rings), false) = (&mut *log, on) {
            // No vCPU makes entries any more: KVM has waited for those that used the old slots.
            // Entries left here would be in the next log.
            rings.read(vm, regions, rings.all(), true, |_| ())?;
        }
        ram.written.clear();
        self.on.store(on, Ordering::Release);
        Ok(())
    }

    /// See [`crate::Machine::harvest_dirty`].
    pub(super) fn harvest(
        &self,
        vm: &VmFd,
        ram: &GuestRam,
        dirty: &PageBitmap,
        rearm: bool,
    ) -> Result<usize, MachineError> {
        let mut log = self.lock();
        if !self.on.load(Ordering::Acquire) {
            return Err(MachineError::WrongState("the dirty log is not on"));
        }
        if dirty.pages() as u64 != ram.pages() {
            return Err(MachineError::WrongState(
                "the bitmap is not of the machine's size",
            ));
        }
        let regions = ram.layout().regions();
        let newly = match &mut *log {
            LogKind::Bitmap(bitmap) => bitmap.harvest(vm, regions, dirty, rearm)?,
            LogKind::Rings(rings) => {
                let mut newly = 0;
                rings.read(vm, regions, rings.all(), rearm, |page| {
                    newly += usize::from(dirty.set(page));
                })?;
                newly
            }
        };
        Ok(newly + ram.written.harvest(dirty, rearm))
    }

    /// Makes room in the full ring of a vCPU, on the vCPU's own thread. Its pages go to the log of
    /// the VMM's writes, where the next harvest finds them.
    pub(super) fn ring_is_full(
        &self,
        vm: &VmFd,
        ram: &GuestRam,
        vcpu: u32,
    ) -> Result<(), MachineError> {
        match &mut *self.lock() {
            LogKind::Bitmap(_) => Err(MachineError::WrongState(
                "KVM reports a full dirty ring, and the VM has none",
            )),
            LogKind::Rings(rings) => {
                let (vcpu, regions) = (vcpu as usize, ram.layout().regions());
                rings.read(vm, regions, vcpu..vcpu + 1, true, |page| {
                    ram.written.mark(page.0..page.0 + 1);
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_vm_has_rings_and_a_small_one_a_bitmap() {
        let Ok(kvm) = super::super::device::open(c"/dev/kvm") else {
            pageferry_testkit::skip("kvm", "/dev/kvm cannot be opened");
            return;
        };
        let has_rings = |tracking, bytes| {
            let vm = kvm.create_vm().unwrap();
            let log = DirtyLog::new(&vm, tracking, bytes)?;
            Ok::<_, MachineError>(matches!(*log.lock(), LogKind::Rings(_)))
        };
        let (large, small) = (DirtyTracking::RINGS_FROM, DirtyTracking::RINGS_FROM - 4096);
        assert!(!has_rings(DirtyTracking::Auto, small).unwrap());
        assert!(!has_rings(DirtyTracking::Bitmap, large).unwrap());
        // No power of two, and too few for KVM's reserve.
        for entries in [1025, 8, 0] {
            let refused = has_rings(DirtyTracking::Ring(entries), small).unwrap_err();
            assert!(refused.to_string().contains("dirty rings"), "{refused}");
        }
        let Some(entries) = dirty_ring_entries() else {
            pageferry_testkit::skip("dirty-ring", "KVM has none");
            assert!(!has_rings(DirtyTracking::Auto, large).unwrap());
            return;
        };
        assert!(has_rings(DirtyTracking::Auto, large).unwrap());
        assert!(has_rings(DirtyTracking::Ring(entries), small).unwrap());
    }
}
