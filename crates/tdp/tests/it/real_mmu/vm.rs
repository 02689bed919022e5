#![expect(
    unsafe_code,
    reason = "gives the kernel the mapping that is the guest's memory"
)]
//! The VM: RAM, one memory slot, and the state that its vCPUs share.

use super::flush::Flushes;
use super::host::{Host, Watchdog};
use super::kick;
use super::layout::{self, FLUSH_GPA, FLUSH_PAGES, RAM_BYTES};
use super::ram::Ram;
use super::vcpu::Vcpu;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use std::sync::{Arc, Mutex, PoisonError};

/// Three pages that KVM takes on Intel hosts. They have no RAM.
const TSS_ADDRESS: usize = 0xfffb_d000;

/// The slot of RAM, and the slot that is unplugged for a flush.
const RAM_SLOT: u32 = 0;
const FLUSH_SLOT: u32 = 1;

/// The VM.
pub(crate) struct Vm {
    // Declared before `ram`, which the kernel uses as long as the VM lives.
    pub(crate) fd: VmFd,
    pub(crate) ram: Ram,
    pub(crate) host: Host,
    pub(crate) flushes: Flushes,
    /// Only one flush at a time plugs the slot.
    flush_slot: Mutex<()>,
    _watchdog: Watchdog,
}

impl Vm {
    /// A VM without vCPUs, with stub and program in its memory. `None` without KVM.
    pub(crate) fn new() -> Option<Arc<Self>> {
        let host = Host::open()?;
        kick::install();
        let fd = host.kvm.create_vm().expect("a VM");
        fd.set_tss_address(TSS_ADDRESS).expect("the TSS's address");
        let vm = Self {
            fd,
            ram: Ram::new(),
            host,
            flushes: Flushes::new(),
            flush_slot: Mutex::new(()),
            _watchdog: Watchdog::new(),
        };
        vm.set_slot(RAM_SLOT, 0, RAM_BYTES, 0);
        layout::write(&vm.ram);
        Some(Arc::new(vm))
    }

    /// The vCPU of seat `number`.
    pub(crate) fn vcpu(self: &Arc<Self>, number: u64) -> Vcpu {
        Vcpu::new(Arc::clone(self), number)
    }

    fn set_slot(&self, slot: u32, gpa: u64, bytes: u64, offset: u64) {
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: gpa,
            memory_size: bytes,
            userspace_addr: self.ram.host_address() + offset,
        };
        // SAFETY: `offset..offset + bytes` is inside the mapping, which is accessed by atomics
        // only. It outlives the VM's descriptor. It also outlives those of vCPUs, which hold the
        // VM.
        unsafe { self.fd.set_user_memory_region(region) }.expect("a memory slot");
    }

    /// Flushes the TLBs of all vCPUs, and returns when that is done.
    pub(crate) fn flush(&self) {
        self.flushes.flush(|| {
            if self.host.second_level_paging {
                return;
            }
            let _one = self
                .flush_slot
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            self.set_slot(FLUSH_SLOT, FLUSH_GPA, FLUSH_PAGES * 4096, RAM_BYTES);
            self.set_slot(FLUSH_SLOT, FLUSH_GPA, 0, RAM_BYTES);
        });
    }
}
