//! What an entry can mean, in words that all formats share.

use pageferry_addr::{Gfn, Pfn};

/// What the guest may do with a page beside loading from it.
///
/// Loads are always allowed: x86-64 cannot express otherwise, EPT only on some processors. A page
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

/// How accesses to a page are cached, as far as the second stage decides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum MemoryType {
    /// Ordinary memory, write-back cacheable.
    #[default]
    WriteBack,
    /// Memory that is not cached, whose stores may be gathered: x86's write combining, Arm's Normal
    /// non-cacheable, RISC-V's NC.
    WriteCombining,
    /// A device's registers: neither cached nor gathered.
    Device,
}

/// Who may make a leaf writable, and how its dirty state is known: two software bits of each leaf.
///
/// KVM has the same in three bits: Host-writable, MMU-writable, and the `WRPROT_ONLY` type of A/D
/// tracking (`arch/x86/kvm/mmu/spte.h`). Of their combinations only these four mean something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Writes {
    /// The host does not let the guest write: a read-only slot, or a host page that is mapped
    /// read-only.
    #[default]
    HostForbids,
    /// The host would, the MMU does not: the page is write-tracked, and each store must reach the
    /// tracker.
    MmuForbids,
    /// Allowed. Where the entry is write-protected all the same, the fast path of a fault may undo
    /// it.
    Allowed,
    /// Allowed, and the dirty state is kept by write protection even where the format has a dirty
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

    /// Whether a write-protected leaf may be made writable without asking anyone (KVM's
    /// MMU-writable).
    #[inline]
    #[must_use]
    pub const fn mmu_writable(self) -> bool {
        matches!(self, Self::Allowed | Self::AllowedLoggedByFault)
    }
}

/// What a leaf says.
///
/// Not all combinations can be stored: see [`Format::canonical`](super::Format::canonical).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Leaf {
    /// The first host frame; a multiple of the frames the leaf covers.
    pub pfn: Pfn,
    /// What the guest may do.
    pub access: Access,
    /// How it is cached.
    pub memory: MemoryType,
    /// Whether it was used since this was last cleared.
    pub accessed: bool,
    /// Whether it was stored to since this was last cleared.
    pub dirty: bool,
    /// Who may make it writable.
    pub writes: Writes,
}

/// What an entry means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Meaning {
    /// Nothing is known here: an access faults, and the fault fills the entry.
    NonPresent,
    /// One thread is about to change the entry, or has cut its table off: no other may change it.
    Frozen,
    /// No slot holds this frame: an access is emulated, if the slots are still those of
    /// `generation`.
    Mmio {
        /// The guest frame.
        gfn: Gfn,
        /// The slots' generation the marker was made under, as far as it fits.
        generation: u64,
    },
    /// A pointer to the table of the next level.
    Table {
        /// The frame the table fills.
        table: Pfn,
    },
    /// A translation.
    Leaf(Leaf),
}

/// How the accessed state of a leaf is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccessedBy {
    /// The hardware sets a bit at the first access.
    Hardware,
    /// There is a bit, but the hardware does not set it: an access through a leaf where it is clear
    /// faults, and the fault sets it.
    FaultOnClear,
    /// There is no bit: a leaf that is not accessed has its permissions put aside in software bits,
    /// faults on every access, and the fault restores them. The permission to store is not among
    /// them: it comes back by a write fault, as after write protection.
    SavedPermissions,
}

/// How the dirty state of a leaf is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DirtyBy {
    /// The hardware sets a bit at the first store.
    Hardware,
    /// A leaf is dirty exactly while it lets stores through.
    WriteProtection,
}

/// What a vCPU's own TLB holds of an entry when an access through it has faulted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TlbAfterFault {
    /// Nothing: the fault drops what the TLB had for the address.
    Forgets,
    /// It may keep a leaf that denied the access. It keeps no entry that is not present.
    KeepsDenied,
    /// It may keep any entry, also one that is not present.
    KeepsAbsent,
}
