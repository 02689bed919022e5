//! Why a VM refused a call.

use core::ops::Range;
use pageferry_addr::{Hva, RamPage};
use pageferry_memslot::SlotError;
use pageferry_tdp::ring::BadRing;

/// A refused call; nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VmError {
    /// The memory slots' rules refuse the request.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// The host range is not inside the memory that was given with it.
    #[error("host range {hva} + {size:#x} of slot {slot} is not inside the memory given for it{}", owned(.memory))]
    NotOwned {
        /// The slot.
        slot: u16,
        /// The first address.
        hva: Hva,
        /// In bytes.
        size: u64,
        /// The memory given, if any was.
        memory: Option<Range<Hva>>,
    },
    /// The flag `USERFAULT` needs a bitmap.
    #[error("slot {0} is to have USERFAULT but no bitmap was given")]
    NoUserfaultBitmap(u16),
    /// The bitmap has not a bit for each page.
    #[error("the userfault bitmap has {bits} bits, but slot {slot} needs {pages} from {first:?}")]
    UserfaultBitmapTooSmall {
        /// The slot.
        slot: u16,
        /// How many bits there are.
        bits: usize,
        /// The bit of the slot's first page.
        first: RamPage,
        /// How many pages the slot has.
        pages: u64,
    },
    /// There is no such slot.
    #[error("there is no slot {0}")]
    NoSuchSlot(u16),
    /// The slot's writes are not logged.
    #[error("slot {0} has no dirty log; give it LOG_DIRTY_PAGES first")]
    NoDirtyLog(u16),
    /// The buffer for the dirty log has another size than the log.
    #[error("the dirty log of slot {slot} has {needed} words, not {given}")]
    DirtyLogSize {
        /// The slot.
        slot: u16,
        /// The words of the log: one for each 64 pages begun.
        needed: usize,
        /// The words of the buffer.
        given: usize,
    },
    /// The part of a dirty log that is to be cleared does not begin at a word, or is not inside the
    /// log.
    #[error(
        "the dirty log of slot {slot} has {log} words of 64 pages: {words} from page {first} are not a part of it"
    )]
    DirtyLogPart {
        /// The slot.
        slot: u16,
        /// The first page.
        first: u64,
        /// How many words were given.
        words: usize,
        /// The words of the log.
        log: usize,
    },
    /// No store reaches a read-only slot, so none can be tracked.
    #[error("slot {0} is read-only: its stores leave the guest as MMIO and are not tracked")]
    ReadOnlySlot(u16),
    /// The slot does not have all of the pages.
    #[error("slot {slot} has {has} pages: {} to {} are not a part of them", .pages.start, .pages.end)]
    PagesOutside {
        /// The slot.
        slot: u16,
        /// The pages that were given, the last one excluded.
        pages: Range<u64>,
        /// How many pages the slot has.
        has: u64,
    },
    /// The id is not one this VM has room for.
    #[error("vCPU {id} is too many: ids are below {max}")]
    VcpuIdTooLarge {
        /// The id.
        id: u32,
        /// The VM's limit.
        max: u32,
    },
    /// The VM is to have dirty rings of a size that there is not.
    #[error(transparent)]
    DirtyRing(BadRing),
    /// The id is taken.
    #[error("vCPU {0} exists already")]
    VcpuExists(u32),
}

fn owned(memory: &Option<Range<Hva>>) -> String {
    match memory {
        Some(range) => format!(", {}..{}", range.start, range.end),
        None => String::from(": none was given"),
    }
}
