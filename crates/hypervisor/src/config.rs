//! The configuration of a VM, and its capabilities.

use crate::dirty_log::DirtyBy;
use crate::hart::LrSc;
use pageferry_memslot::SlotFlags;

/// The limits of a VM, and its kind of dirty log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmConfig {
    /// The limit of vCPU ids, exclusive.
    pub max_vcpus: u32,
    /// The limit of memory slot ids, exclusive.
    pub max_slots: u16,
    /// The way in which the dirty log learns of a written page.
    pub dirty_by: DirtyBy,
    /// The state in which a log begins, and the call that clears it.
    pub dirty_protect: DirtyProtect,
    /// The number of entries of each vCPU's dirty ring, if there are rings
    /// (`KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP`). It is a power of two from 128 to
    /// [`MAX_ENTRIES`](pageferry_tdp::ring::MAX_ENTRIES).
    ///
    /// With rings, pages that a vCPU dirties go into its ring, by write protection. The slots'
    /// bitmaps get the other dirty pages.
    pub dirty_ring: Option<u32>,
    /// The rule of LR and SC.
    pub lr_sc: LrSc,
}

/// The call that protects the pages of a log again (`KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DirtyProtect {
    /// [`Vm::get_dirty_log`](crate::Vm::get_dirty_log), which protects all pages that it returns.
    #[default]
    ByGet,
    /// [`Vm::clear_dirty_log`](crate::Vm::clear_dirty_log), which protects the pages that it is
    /// given, when the caller is about to copy them.
    ByClear,
    /// The same as `ByClear`, but a log begins with all pages dirty and none protected
    /// (`KVM_DIRTY_LOG_INITIALLY_SET`). Starting such a log costs next to nothing.
    InitiallySet,
}

impl Default for VmConfig {
    /// 1024 vCPUs and 32 764 memory slots, like KVM on x86-64.
    fn default() -> Self {
        Self {
            max_vcpus: 1024,
            max_slots: 32_764,
            dirty_by: DirtyBy::default(),
            dirty_protect: DirtyProtect::default(),
            dirty_ring: None,
            lr_sc: LrSc::default(),
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
    /// The flags that a slot may have.
    pub slot_flags: SlotFlags,
    /// The number of bits of a guest-physical address.
    pub gpa_bits: u32,
    /// Whether [`Vm::track_writes`](crate::Vm::track_writes) can make stores to chosen pages leave
    /// the guest.
    pub write_tracking: bool,
}
