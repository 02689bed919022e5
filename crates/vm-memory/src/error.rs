//! Why a region was refused.

use pageferry_memslot::SlotError;
use vm_memory::{GuestAddress, GuestUsize};

/// A refused change; the memory is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// The region breaks a rule of memory slots: alignment to pages, no overlap, the limits, or
    /// size and host address for life.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// A region without bytes.
    #[error("the region at {:#x} is empty; a region has at least one page", .start.0)]
    Empty {
        /// Where it was to begin.
        start: GuestAddress,
    },
    /// A region that has no host address.
    #[error("the region at {:#x} has no host address; a memory slot needs one", .start.0)]
    NoHostAddress {
        /// Where it was to begin.
        start: GuestAddress,
    },
    /// No region begins there with that size.
    #[error("no region of {size:#x} bytes begins at {:#x}", .base.0)]
    NoSuchRegion {
        /// Where it was to begin.
        base: GuestAddress,
        /// Its size in bytes.
        size: GuestUsize,
    },
    /// Every slot id is taken.
    #[error("all {max_slots} slots are taken; remove a region first")]
    NoFreeSlot {
        /// How many slots there may be.
        max_slots: u16,
    },
}
