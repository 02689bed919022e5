//! The meanings of an entry, in terms that all formats share.

use pageferry_addr::{Gfn, Pfn};

/// The accesses that a page allows the guest besides loads.
///
/// Loads are always allowed: x86-64 cannot forbid them, and EPT only on some processors. A page
/// that must not be read is not mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Access {
    /// Stores are allowed.
    pub write: bool,
    /// Instruction fetches are allowed.
    pub execute: bool,
}

impl Access {
    /// Loads only.
    pub const READ: Self = Self::new(false, false);
    /// Loads and stores.
    pub const READ_WRITE: Self = Self::new(true, false);
    /// Loads and instruction fetches.
    pub const READ_EXECUTE: Self = Self::new(false, true);
    /// Loads, stores and instruction fetches.
    pub const ALL: Self = Self::new(true, true);

    const fn new(write: bool, execute: bool) -> Self {
        Self { write, execute }
    }
}

/// The caching of a page, as far as the second stage controls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum MemoryType {
    /// Ordinary memory, write-back cacheable.
    #[default]
    WriteBack,
    /// Memory that is not cached, whose stores may be gathered: x86 write combining, Arm Normal
    /// non-cacheable, RISC-V NC.
    WriteCombining,
    /// Device registers: neither cached nor gathered.
    Device,
}

/// The permission to make a leaf writable, and the source of its dirty state: two software bits of
/// each leaf.
///
/// KVM uses three bits for this: Host-writable, MMU-writable, and the `WRPROT_ONLY` type of A/D
/// tracking (`arch/x86/kvm/mmu/spte.h`). Only these four of their combinations have a meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Writes {
    /// The host forbids writes: the slot is read-only, or the host page is mapped read-only.
    #[default]
    HostForbids,
    /// The host allows writes, the MMU does not. The page is write-tracked, and each store must
    /// reach the tracker.
    MmuForbids,
    /// Writes are allowed. If the entry is write-protected, the fast path of a fault may make it
    /// writable.
    Allowed,
    /// Writes are allowed. Write protection keeps the dirty state, even in a format with a dirty
    /// bit: a leaf of this class is writable exactly when it is dirty.
    AllowedLoggedByFault,
}

impl Writes {
    /// Whether the host lets the guest write (KVM's Host-writable).
    #[inline]
    #[must_use]
    pub const fn host_writable(self) -> bool {
        !matches!(self, Self::HostForbids)
    }

    /// Whether a fault may make a write-protected leaf writable without a look-up (KVM's
    /// MMU-writable).
    #[inline]
    #[must_use]
    pub const fn mmu_writable(self) -> bool {
        matches!(self, Self::Allowed | Self::AllowedLoggedByFault)
    }
}

/// The contents of a leaf.
///
/// Not all combinations can be stored: see [`Format::canonical`](super::Format::canonical).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Leaf {
    /// The first host frame, a multiple of the number of frames that the leaf covers.
    pub pfn: Pfn,
    /// The accesses that it allows.
    pub access: Access,
    /// The caching of its page.
    pub memory: MemoryType,
    /// Whether the guest has used it since this was last cleared.
    pub accessed: bool,
    /// Whether the guest has stored to it since this was last cleared.
    pub dirty: bool,
    /// The permission to make it writable.
    pub writes: Writes,
}

/// The meaning of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Meaning {
    /// Empty: an access faults, and the fault fills the entry.
    NonPresent,
    /// One thread is about to change the entry, or has cut off its table. No other thread may
    /// change it.
    Frozen,
    /// No slot holds this frame. The hypervisor emulates an access if the slots are still those of
    /// `generation`.
    Mmio {
        /// The guest frame.
        gfn: Gfn,
        /// The low bits of the slots' generation at which the marker was made.
        generation: u64,
    },
    /// A pointer to the table of the next level.
    Table {
        /// The frame that holds the table.
        table: Pfn,
    },
    /// A translation.
    Leaf(Leaf),
}

/// The source of a leaf's accessed state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccessedBy {
    /// The hardware sets a bit at the first access.
    Hardware,
    /// There is a bit, but the hardware does not set it. An access through a leaf whose bit is
    /// clear faults, and the fault sets the bit.
    FaultOnClear,
    /// There is no bit. Software bits save the permissions of a leaf that is not accessed, so every
    /// access to it faults. The fault restores them, except for the permission to store. A write
    /// fault restores that one, as after write protection.
    SavedPermissions,
}

/// The source of a leaf's dirty state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DirtyBy {
    /// The hardware sets a bit at the first store.
    Hardware,
    /// A leaf is dirty exactly while it allows stores.
    WriteProtection,
}

/// The entries that a vCPU's own TLB may keep after an access through them has faulted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TlbAfterFault {
    /// None: the fault drops all TLB entries for the address.
    Forgets,
    /// A leaf that denied the access. It keeps no entry that is not present.
    KeepsDenied,
    /// Any entry, including one that is not present.
    KeepsAbsent,
}
