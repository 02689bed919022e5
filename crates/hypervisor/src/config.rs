//! How a VM is configured, and its capabilities.

use crate::dirty_log::DirtyBy;
use pageferry_memslot::SlotFlags;

/// How large a VM may become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmConfig {
    /// The ids of its vCPUs are below this.
    pub max_vcpus: u32,
    /// The ids of its memory slots are below this.
    pub max_slots: u16,
    /// How the dirty log learns that a page was written to.
    pub dirty_by: DirtyBy,
    /// The state in which a log begins, and the call that clears it.
    pub dirty_protect: DirtyProtect,
    /// How many entries each vCPU's dirty ring has, if there are rings
    /// (`KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP`): a power of two from 128 to
    /// [`MAX_ENTRIES`](pageferry_tdp::ring::MAX_ENTRIES). Pages that vCPUs dirty then go there, by
    /// write protection. The slots' bitmaps have only pages that are found dirty otherwise.
    pub dirty_ring: Option<u32>,
}

/// The call that protects the pages of a log again (`KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DirtyProtect {
    /// [`Vm::get_dirty_log`](crate::Vm::get_dirty_log), which protects all pages that it returns.
    #[default]
    ByGet,
    /// [`Vm::clear_dirty_log`](crate::Vm::clear_dirty_log), which protects the pages that it is
    /// given, when the caller is about to copy them.
    ByClear,
    /// As `ByClear`; and a log begins with all pages dirty and none protected
    /// (`KVM_DIRTY_LOG_INITIALLY_SET`), so that turning it on costs next to nothing.
    InitiallySet,
}

impl Default for VmConfig {
    /// 1024 vCPUs and 32 764 memory slots, as KVM on x86-64.
    fn default() -> Self {
        Self {
            max_vcpus: 1024,
            max_slots: 32_764,
            dirty_by: DirtyBy::default(),
            dirty_protect: DirtyProtect::default(),
            dirty_ring: None,
        }
    }
}

/// The capabilities of this hypervisor: the answers of `KVM_CHECK_EXTENSION`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The most vCPUs of this VM (`KVM_CAP_MAX_VCPUS`).
    pub max_vcpus: u32,
    /// The most memory slots of this VM (`KVM_CAP_NR_MEMSLOTS`).
    pub max_slots: u16,
    /// The flags a slot may have.
    pub slot_flags: SlotFlags,
    /// The bits of a guest-physical address.
    pub gpa_bits: u32,
    /// Whether stores to chosen pages can be made to leave the guest:
    /// [`Vm::track_writes`](crate::Vm::track_writes).
    pub write_tracking: bool,
}
