//! The errors of a VM's calls.

use core::ops::Range;
use pageferry_addr::{Hva, RamPage};
use pageferry_memslot::{OutOfMemory, SlotError};
use pageferry_tdp::ring::BadRing;

/// A refused call; nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VmError {
    /// The memory slots' rules refuse the request.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// The host range is not inside the memory that the request names as its owner.
    #[error("host range {hva} + {size:#x} of slot {slot} is not inside the memory given for it{}", owned(.memory))]
    NotOwned {
        /// The slot.
        slot: u16,
        /// The first address.
        hva: Hva,
        /// The size in bytes.
        size: u64,
        /// The addresses of the given memory, if any was given.
        memory: Option<Range<Hva>>,
    },
    /// The flag `USERFAULT` needs a bitmap.
    #[error("slot {0} needs a userfault bitmap for the flag USERFAULT")]
    NoUserfaultBitmap(u16),
    /// The bitmap has too few bits for the slot's pages.
    #[error("the userfault bitmap has {bits} bits, but slot {slot} needs {pages} from {first:?}")]
    UserfaultBitmapTooSmall {
        /// The slot.
        slot: u16,
        /// The number of bits.
        bits: usize,
        /// The bit of the slot's first page.
        first: RamPage,
        /// The number of the slot's pages.
        pages: u64,
    },
    /// The slot's bits do not begin with a word of the bitmap.
    #[error(
        "the userfault bits of slot {slot} begin at {first:?}: expected a multiple of 64 pages"
    )]
    UserfaultBitsUnaligned {
        /// The slot.
        slot: u16,
        /// The bit of the slot's first page.
        first: RamPage,
    },
    /// There is no such slot.
    #[error("there is no slot {0}")]
    NoSuchSlot(u16),
    /// The slot does not log its writes.
    #[error("slot {0} has no dirty log; give it LOG_DIRTY_PAGES first")]
    NoDirtyLog(u16),
    /// The sizes of the buffer and the dirty log differ.
    #[error("the dirty log of slot {slot} has {needed} words, not {given}")]
    DirtyLogSize {
        /// The slot.
        slot: u16,
        /// The number of words of the log: one for each 64 pages begun.
        needed: usize,
        /// The number of words of the buffer.
        given: usize,
    },
    /// The part of a dirty log to clear does not begin at a word, or is not inside the log.
    #[error(
        "the dirty log of slot {slot} has {log} words of 64 pages: {words} from page {first} are not a part of it"
    )]
    DirtyLogPart {
        /// The slot.
        slot: u16,
        /// The first page.
        first: u64,
        /// The number of given words.
        words: usize,
        /// The number of words of the log.
        log: usize,
    },
    /// No store reaches a read-only slot, so the VM cannot track its stores.
    #[error("slot {0} is read-only: its stores leave the guest as MMIO and are not tracked")]
    ReadOnlySlot(u16),
    /// The slot does not have all of the pages.
    #[error("slot {slot} has {has} pages: {}..{} is not a part of them", .pages.start, .pages.end)]
    PagesOutside {
        /// The slot.
        slot: u16,
        /// The given pages.
        pages: Range<u64>,
        /// The number of the slot's pages.
        has: u64,
    },
    /// The id reaches the VM's limit.
    #[error("vCPU id {id} is too large: the limit is {max}")]
    VcpuIdTooLarge {
        /// The id.
        id: u32,
        /// The VM's limit.
        max: u32,
    },
    /// The size that the VM's configuration gives for dirty rings is not possible.
    #[error(transparent)]
    DirtyRing(BadRing),
    /// There is no memory for a vCPU, or for the bits of a slot's pages.
    #[error("no memory for a vCPU or for the bits of a slot's pages: {0}")]
    OutOfMemory(#[from] OutOfMemory),
    /// The id is in use.
    #[error("vCPU {0} exists already")]
    VcpuExists(u32),
}

fn owned(memory: &Option<Range<Hva>>) -> String {
    match memory {
        Some(range) => format!(", {}..{}", range.start, range.end),
        None => String::from(": none was given"),
    }
}
