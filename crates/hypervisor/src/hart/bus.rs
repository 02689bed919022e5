//! The interface between a hart and memory.

use super::int::{AmoInt, AmoOp, GuestInt};

/// The number of instructions in one code page.
pub const PAGE_WORDS: usize = 1024;

/// One hart's view of guest memory: usually a TLB over second-stage tables.
///
/// **Required guarantee.** An access that returns `Ok` has happened once, as one single-copy atomic
/// access of its width. An access that returns `Err` has changed nothing the guest can see, and may
/// be repeated.
///
/// Addresses are guest-physical and may be any `u64`. The interpreter's loop calls the generic
/// methods, and the compiler inlines them there. Keep the hit path short, mark it
/// `#[inline(always)]`, and put the miss path behind a call. One comparison can check both tag and
/// alignment: `gpa & !(PAGE_MASK ^ (T::BYTES - 1)) == tag`.
pub trait Bus {
    /// Loads with no ordering (RVWMO's ordinary load).
    ///
    /// # Errors
    /// - [`BusFault::Misaligned`] if `gpa` is not a multiple of `T::BYTES`, whether or not memory
    ///   is there. The hart then splits the access.
    /// - Every other [`BusFault`].
    fn load<T: GuestInt>(&mut self, gpa: u64) -> Result<T, BusFault>;

    /// Stores with no ordering.
    ///
    /// # Errors
    /// The same as [`Bus::load`].
    fn store<T: GuestInt>(&mut self, gpa: u64, value: T) -> Result<(), BusFault>;

    /// Stores `bytes` (at most 8) at `gpa`. The range may be misaligned and may reach into the next
    /// page.
    ///
    /// The store is not atomic, but it is all or nothing: every page must be there and writable
    /// before the first byte is written. If `gpa + bytes.len()` exceeds `u64::MAX`, the result is
    /// an access fault.
    ///
    /// # Errors
    /// Any fault but [`BusFault::Misaligned`].
    fn store_bytes(&mut self, gpa: u64, bytes: &[u8]) -> Result<(), BusFault>;

    /// Does a sequentially consistent read-modify-write, such as [`AmoInt::amo`]. `gpa` is aligned.
    /// Returns the old value.
    ///
    /// # Errors
    /// Any fault but [`BusFault::Misaligned`].
    fn amo<T: AmoInt>(&mut self, gpa: u64, op: AmoOp, operand: T) -> Result<T, BusFault>;

    /// Loads with sequential consistency, and opens a reservation on the `T::BYTES` bytes at `gpa`.
    /// `gpa` is aligned. The hart keeps the result and passes it to [`Bus::store_conditional`].
    ///
    /// # Errors
    /// Any fault but [`BusFault::Misaligned`].
    fn load_reserved<T: AmoInt>(&mut self, gpa: u64) -> Result<Reserved<T>, BusFault>;

    /// Stores `value` at `gpa` if no other hart has stored to the reserved bytes since `reserved`
    /// was returned for the same `gpa` and `T`. Returns whether it stored. It may fail without
    /// reason, but not forever.
    ///
    /// # Errors
    /// Any fault but [`BusFault::Misaligned`]. The reservation outlives the fault: the hart repeats
    /// the access with the same `reserved`.
    fn store_conditional<T: AmoInt>(
        &mut self,
        gpa: u64,
        reserved: Reserved<T>,
        value: T,
    ) -> Result<bool, BusFault>;

    /// Copies the code page at `gpa` (4096-byte aligned) into `words`. The hart keeps decoded code
    /// until FENCE.I or [`Hart::invalidate_code`](super::Hart::invalidate_code).
    ///
    /// # Errors
    /// Any fault but [`BusFault::Misaligned`]. Code in MMIO is an access fault to the guest.
    fn fetch_page(&mut self, gpa: u64, words: &mut [u32; PAGE_WORDS]) -> Result<(), BusFault>;

    /// The value of the `time` CSR: the VM's clock in timebase ticks. It is monotonic, and the same
    /// for all harts of a VM.
    fn time(&mut self) -> u64;
}

/// The result of [`Bus::load_reserved`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved<T> {
    /// The loaded value.
    pub value: T,
    /// A number by which the bus recognises a store by another hart. 0 if the bus needs none.
    pub version: u64,
}

/// The reason for which an access did not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BusFault {
    /// The address is not naturally aligned. The bus checked nothing else.
    Misaligned,
    /// The hart must leave the guest first, because its request word is set. The instruction is not
    /// retired.
    Requested,
    /// There is no memory at `gpa`: the VMM has to emulate the access.
    Mmio {
        /// The first byte of the access that no memory slot covers.
        gpa: u64,
    },
    /// The guest may not make this access at `gpa`: it takes an access fault.
    Access {
        /// The first byte of the access that the bus refuses.
        gpa: u64,
    },
    /// The memory belongs to the guest, but is missing or not writable now. The hart leaves the
    /// guest without retiring the instruction, and the next entry repeats it.
    Memory(MemoryFault),
}

/// A range of guest memory that is missing or not writable now.
///
/// These are the contents of a memory-fault exit, like KVM's `KVM_EXIT_MEMORY_FAULT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryFault {
    /// The start of the range, in bytes.
    pub gpa: u64,
    /// The length of the range, in bytes.
    pub size: u64,
    /// Flags that the bus defines. The hart passes them on.
    pub flags: u64,
}

/// The kind of a guest instruction's memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// An instruction fetch.
    Fetch,
    /// A load or LR.
    Load,
    /// A store, SC or AMO.
    Store,
}
