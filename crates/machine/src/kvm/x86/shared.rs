//! The parts of a VM that its vCPUs share: descriptor, memory, slots, dirty log and fault delivery.

use super::clock::Moved;
use super::dirty::DirtyLog;
use super::slots::{KvmSlot, Slots, guest_mapping};
use super::userfault::FaultPath;
use crate::GuestRam;
use crate::translate::Translator;
use kvm_bindings::kvm_cpuid_entry2;
use kvm_ioctls::VmFd;
use std::sync::{Arc, Mutex};

/// The capabilities of this VM's kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caps {
    pub(super) sregs2: bool,
    pub(super) xsave_bytes: usize,
    /// It has interrupt controllers, and all of them.
    pub(super) lapic: bool,
    /// Writes of registers can leave `KVM_RUN` (Linux 5.10).
    pub(super) msr_exits: bool,
}

/// The part of a VM that its vCPUs share. The descriptors of the vCPUs keep the VM alive in the
/// kernel. This keeps the memory and the userfaultfd as long as any of them exists.
pub(super) struct VmShared {
    pub(super) vm: VmFd,
    pub(super) ram: Arc<GuestRam>,
    pub(super) slots: Slots,
    pub(super) vcpus: u32,
    pub(super) caps: Caps,
    /// The CPUID of its vCPUs, without their ids.
    pub(super) cpuid: Vec<kvm_cpuid_entry2>,
    pub(super) dirty: DirtyLog,
    pub(super) faults: Arc<FaultPath>,
    /// Set when the VM has come from another host.
    pub(super) clock: Mutex<Option<Moved>>,
}

impl VmShared {
    /// A translator of addresses, for one thread.
    pub(super) fn translator(&self) -> Translator<KvmSlot> {
        Translator::new(self.slots.table(), guest_mapping(&self.ram))
    }
}
