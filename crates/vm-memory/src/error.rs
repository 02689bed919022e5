//! The error of a refused region.

use pageferry_memslot::SlotError;
use vm_memory::{GuestAddress, GuestUsize};

/// A refused change. The memory is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// The region breaks a rule of memory slots: page alignment, no overlap, the limits, or a fixed
    /// size and host address.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// A region without bytes.
    #[error("the region at {:#x} is empty; a region has at least one page", .start.0)]
    Empty {
        /// The guest address asked for.
        start: GuestAddress,
    },
    /// A region that has no host address.
    #[error("the region at {:#x} has no host address; a memory slot needs one", .start.0)]
    NoHostAddress {
        /// The guest address asked for.
        start: GuestAddress,
    },
    /// No region begins at this address with this size.
    #[error("no region of {size:#x} bytes begins at {:#x}", .base.0)]
    NoSuchRegion {
        /// The guest address asked for.
        base: GuestAddress,
        /// The size asked for, in bytes.
        size: GuestUsize,
    },
    /// Every slot id is taken.
    #[error("all {max_slots} slots are taken; remove a region first")]
    NoFreeSlot {
        /// The configured number of slots.
        max_slots: u16,
    },
}
