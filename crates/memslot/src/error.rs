//! The error of a refused request.

use crate::SlotFlags;
use pageferry_addr::{Gfn, GfnRange, Gpa, Hva};
use pageferry_epoch::OutOfMemory;
use thiserror::Error;

/// A refused request. The table is unchanged.
///
/// The rules are those of `kvm_set_memory_region` in Linux's `virt/kvm/kvm_main.c`. It answers
/// `EEXIST` for [`Overlap`](Self::Overlap), `ENOMEM` for [`OutOfMemory`](Self::OutOfMemory) and
/// `EINVAL` for the rest; see [`rules`](crate::rules).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SlotError {
    /// The allocator refused memory that the request needs.
    #[error("{0}")]
    OutOfMemory(#[from] OutOfMemory),
    /// An unknown flag.
    #[error(
        "unknown slot flags {unknown}; the known flags are {}",
        SlotFlags::KNOWN
    )]
    UnknownFlags {
        /// The bits that are not known.
        unknown: SlotFlags,
    },
    /// Flags a slot with guest_memfd cannot have.
    #[error("a GUEST_MEMFD slot cannot have {refused}; request it without")]
    GuestMemfdFlags {
        /// The flags that do not go with `GUEST_MEMFD`.
        refused: SlotFlags,
    },
    /// The size is not in whole pages.
    #[error("slot size {size:#x} is not a multiple of the page size 0x1000")]
    UnalignedSize {
        /// In bytes.
        size: u64,
    },
    /// The guest address is not page-aligned.
    #[error("guest address {gpa} is not a multiple of the page size 0x1000")]
    UnalignedGpa {
        /// The address asked for.
        gpa: Gpa,
    },
    /// The host address is not page-aligned.
    #[error("host address {hva} is not a multiple of the page size 0x1000")]
    UnalignedHva {
        /// The address asked for.
        hva: Hva,
    },
    /// The host range leaves the 64-bit address space.
    #[error("host range {hva} + {size:#x} passes the end of the 64-bit address space")]
    HvaOverflow {
        /// The first address.
        hva: Hva,
        /// In bytes.
        size: u64,
    },
    /// The host has no memory there. Either the address does not fit 60 bits with sign extension,
    /// or the range crosses the end of the lower half of the address space.
    #[error(
        "host range {hva} + {size:#x} is not canonical: it must lie in the lowest or the highest 2^59 bytes of the \
         address space, without a tag"
    )]
    HvaNotCanonical {
        /// The first address.
        hva: Hva,
        /// In bytes.
        size: u64,
    },
    /// There is no such address space.
    #[error("address space {address_space} does not exist; expected a number below {count}")]
    NoSuchAddressSpace {
        /// The address space asked for.
        address_space: u16,
        /// The number of address spaces.
        count: u16,
    },
    /// The id is too large.
    #[error("slot id {id} is too large; expected an id below {max_slots}")]
    IdTooLarge {
        /// The id asked for.
        id: u16,
        /// The configured number of slots.
        max_slots: u16,
    },
    /// The guest range leaves the guest-physical address space.
    #[error("guest range {gpa} + {size:#x} ends above the last allowed frame's end, frame {limit}")]
    GpaTooHigh {
        /// The first address.
        gpa: Gpa,
        /// In bytes.
        size: u64,
        /// The first frame that no slot may hold.
        limit: Gfn,
    },
    /// One slot is too large.
    #[error("a slot of {pages} pages is too large; at most {max_pages} are allowed")]
    TooManyPages {
        /// The pages asked for.
        pages: u64,
        /// The configured limit.
        max_pages: u64,
    },
    /// There is nothing to delete (a size of zero deletes).
    #[error(
        "slot {id} of address space {address_space} does not exist and cannot be deleted; give a size to create it"
    )]
    NothingToDelete {
        /// The address space.
        address_space: u16,
        /// The id.
        id: u16,
    },
    /// The pages of all slots together no longer fit 64 bits.
    #[error("{pages} pages added to the present {total} do not fit a 64-bit count")]
    TotalPagesOverflow {
        /// The pages of all slots today.
        total: u64,
        /// The pages asked for.
        pages: u64,
    },
    /// A slot keeps its size for life.
    #[error("slot {id} has {old} pages and cannot get {new}; delete and create it")]
    SizeChanged {
        /// The id.
        id: u16,
        /// Pages today.
        old: u64,
        /// Pages asked for.
        new: u64,
    },
    /// A slot keeps its host address for life.
    #[error("slot {id} is backed at {old} and cannot change to {new}; delete and create it")]
    HvaChanged {
        /// The id.
        id: u16,
        /// The address today.
        old: Hva,
        /// The address asked for.
        new: Hva,
    },
    /// A slot keeps `READONLY` and `GUEST_MEMFD` as they were at creation.
    #[error(
        "slot {id} has flags {old}: {toggled} cannot be toggled by changing to {new}; delete and create it"
    )]
    FixedFlags {
        /// The id.
        id: u16,
        /// The flags today.
        old: SlotFlags,
        /// The flags asked for.
        new: SlotFlags,
        /// The differences that are not allowed.
        toggled: SlotFlags,
    },
    /// A slot with guest_memfd cannot move.
    #[error("slot {id} has GUEST_MEMFD and stays at frame {old}; it cannot move to {new}")]
    GuestMemfdMoved {
        /// The id.
        id: u16,
        /// The first frame today.
        old: Gfn,
        /// The first frame asked for.
        new: Gfn,
    },
    /// Another slot holds some of the frames.
    #[error(
        "frames {}..{} overlap slot {other} at {}..{}; choose free frames",
        .range.start(), .range.end(), .taken.start(), .taken.end()
    )]
    Overlap {
        /// The frames asked for.
        range: GfnRange,
        /// The id of the slot in the way.
        other: u16,
        /// The frames of the slot in the way.
        taken: GfnRange,
    },
    /// `USERFAULT` needs a bitmap.
    #[error("slot {id} has USERFAULT but no bitmap; give the address of the bitmap's words")]
    NoUserfaultBitmap {
        /// The id.
        id: u16,
    },
    /// The bitmap's address is not a multiple of the word size.
    #[error("userfault bitmap {bitmap} is not a multiple of 8")]
    UnalignedBitmap {
        /// The address asked for.
        bitmap: Hva,
    },
    /// The bitmap leaves the 64-bit address space.
    #[error("userfault bitmap {bitmap} + {bytes:#x} passes the end of the 64-bit address space")]
    BitmapOverflow {
        /// The first address.
        bitmap: Hva,
        /// The bytes that the slot's pages need.
        bytes: u64,
    },
    /// A slot keeps its bitmap as long as it has `USERFAULT`.
    #[error(
        "slot {id} has its userfault bitmap at {old} and cannot change to {new}; take the flag off and set it again"
    )]
    BitmapChanged {
        /// The id.
        id: u16,
        /// The address today.
        old: Hva,
        /// The address asked for.
        new: Hva,
    },
}
