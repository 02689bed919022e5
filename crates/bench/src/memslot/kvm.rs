#![expect(unsafe_code, reason = "hands host memory to KVM")]
//! The cost of the same calls on this host's KVM.
//!
//! The VM has no vCPUs. It gets the same memory in the same slots, each by
//! `KVM_SET_USER_MEMORY_REGION`.

use super::host::SlotMemory;
use super::split::Split;
use super::test_vm::id;
use crate::BenchError;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Cap, Kvm, VmFd};
use pageferry_addr::{Gpa, PAGE_SIZE};
use pageferry_machine::MachineError;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An open `/dev/kvm` that can create VMs.
pub(super) struct RealKvm(Kvm);

impl RealKvm {
    /// # Errors
    /// A sentence that says why KVM cannot be measured.
    pub(super) fn open() -> Result<Self, String> {
        let kvm = Kvm::new().map_err(|e| format!("cannot open /dev/kvm: {}", io(&e)))?;
        kvm.create_vm()
            .map_err(|e| format!("KVM refuses a VM: {}", io(&e)))?;
        Ok(Self(kvm))
    }

    /// The largest number of slots of a VM.
    pub(super) fn max_slots(&self) -> u32 {
        u32::try_from(self.0.check_extension_int(Cap::NrMemslots)).unwrap_or(0)
    }

    /// Creates a VM with slot 0 and the slots of `split`. The time covers the slots of `split`
    /// only.
    pub(super) fn set_up(
        &self,
        host: &Arc<SlotMemory>,
        split: Split,
    ) -> Result<(RealVm, Duration), BenchError> {
        let vm = self.0.create_vm().map_err(|e| refused("a VM", &e))?;
        let vm = RealVm {
            vm,
            split,
            host: Arc::clone(host),
        };
        vm.set(0, Gpa(0), 0, 1)?;
        let began = Instant::now();
        for index in 0..split.slots {
            let first = split.first(index);
            vm.set(
                id(index),
                Split::gpa(first),
                1 + first,
                split.pages_of(index),
            )?;
        }
        let took = began.elapsed();
        Ok((vm, took))
    }
}

/// A VM with its slots.
pub(super) struct RealVm {
    vm: VmFd,
    split: Split,
    /// Keeps the memory of the slots mapped. It is dropped after the VM.
    host: Arc<SlotMemory>,
}

impl RealVm {
    fn set(&self, slot: u16, gpa: Gpa, page: u64, pages: u64) -> Result<(), BenchError> {
        let region = kvm_userspace_memory_region {
            slot: slot.into(),
            flags: 0,
            guest_phys_addr: gpa.0,
            memory_size: pages * PAGE_SIZE,
            userspace_addr: self.host.hva(page).0,
        };
        assert!(self.host.hva(page + pages) > self.host.hva(page));
        // SAFETY: the range is inside the mapping of `host`, which outlives the VM. No vCPU ever
        // runs, so KVM accesses no memory through it.
        unsafe { self.vm.set_user_memory_region(region) }.map_err(|e| refused("a memory slot", &e))
    }

    /// Moves the last slot behind all others and back.
    pub(super) fn move_once(&self) -> Result<(), BenchError> {
        let last = self.split.slots - 1;
        let (first, pages) = (self.split.first(last), self.split.pages_of(last));
        self.set(id(last), Split::gpa(self.split.pages), 1 + first, pages)?;
        self.set(id(last), Split::gpa(first), 1 + first, pages)
    }
}

fn io(error: &kvm_ioctls::Error) -> std::io::Error {
    std::io::Error::from_raw_os_error(error.errno())
}

fn refused(what: &str, error: &kvm_ioctls::Error) -> BenchError {
    MachineError::EngineUnavailable(format!("KVM refuses {what}: {}", io(error))).into()
}
