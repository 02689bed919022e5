//! The interface between a hart and memory.

use super::int::{AmoInt, AmoOp, GuestInt};
use super::paging::View;

/// The number of instructions in one code page.
pub const PAGE_WORDS: usize = 1024;

/// One hart's view of guest memory: usually a TLB over the guest's tables and the second-stage
/// tables.
///
/// **Required guarantee.** An access that returns `Ok` has happened once, as one single-copy atomic
/// access of its width. An access that returns `Err` has changed nothing the guest can see, and may
/// be repeated.
///
/// Addresses are virtual in the current [`View`], and may be any `u64`. The interpreter's loop
/// calls the generic methods, and the compiler inlines them there. Keep the hit path short, mark it
/// `#[inline(always)]`, and put the miss path behind a call. One comparison can check both tag and
/// alignment: `address & !(PAGE_MASK ^ (T::BYTES - 1)) == tag`.
pub trait Bus {
    /// Loads with no ordering (RVWMO's ordinary load).
    ///
    /// # Errors
    /// - [`BusFault::Misaligned`] if `address` is not a multiple of `T::BYTES`, whether or not
    ///   memory is there. The hart then splits the access.
    /// - Every other [`BusFault`].
    fn load<T: GuestInt>(&mut self, address: u64) -> Result<T, BusFault>;

    /// Stores with no ordering.
    ///
    /// # Errors
    /// The same as [`Bus::load`].
    fn store<T: GuestInt>(&mut self, address: u64, value: T) -> Result<(), BusFault>;

    /// Stores `bytes` (at most 8) at `address`. The range may be misaligned and may reach into the
    /// next page.
    ///
    /// The store is not atomic, but it is all or nothing: every page must be there and writable
    /// before the first byte is written. If `address + bytes.len()` exceeds `u64::MAX`, the result
    /// is an access fault.
    ///
    /// # Errors
    /// Any fault but [`BusFault::Misaligned`].
    fn store_bytes(&mut self, address: u64, bytes: &[u8]) -> Result<(), BusFault>;

    /// Does a sequentially consistent read-modify-write, such as [`AmoInt::amo`]. `address` is
    /// aligned. Returns the old value.
    ///
    /// # Errors
    /// Any fault but [`BusFault::Misaligned`].
    fn amo<T: AmoInt>(&mut self, address: u64, op: AmoOp, operand: T) -> Result<T, BusFault>;

    /// Loads with sequential consistency, and opens a reservation on the `T::BYTES` bytes at
    /// `address`. `address` is aligned. The hart keeps the result and passes it to
    /// [`Bus::store_conditional`].
    ///
    /// # Errors
    /// Any fault but [`BusFault::Misaligned`].
    fn load_reserved<T: AmoInt>(&mut self, address: u64) -> Result<Reserved<T>, BusFault>;

    /// Stores `value` at `address` if no other hart has stored to the reserved bytes since
    /// `reserved` was returned for the same `address` and `T`. Returns whether it stored. It may
    /// fail without reason, but not forever.
    ///
    /// # Errors
    /// Any fault but [`BusFault::Misaligned`]. The reservation outlives the fault: the hart repeats
    /// the access with the same `reserved`.
    fn store_conditional<T: AmoInt>(
        &mut self,
        address: u64,
        reserved: Reserved<T>,
        value: T,
    ) -> Result<bool, BusFault>;

    /// The guest-physical address of the page of code at `address`, if the view allows to fetch
    /// from it. The hart keeps the answer until SFENCE.VMA, or a write of `satp` that changes its
    /// mode.
    ///
    /// # Errors
    /// Any fault but [`BusFault::Misaligned`].
    fn locate_code(&mut self, address: u64) -> Result<u64, BusFault>;

    /// Copies the code page at the guest-physical address `gpa` (4096-byte aligned) into `words`.
    /// The hart keeps decoded code until FENCE.I or
    /// [`Hart::invalidate_code`](super::Hart::invalidate_code).
    ///
    /// # Errors
    /// Any fault but [`BusFault::Misaligned`] and [`BusFault::Page`]. Code in MMIO is an access
    /// fault to the guest.
    fn fetch_page(&mut self, gpa: u64, words: &mut [u32; PAGE_WORDS]) -> Result<(), BusFault>;

    /// Makes `view` the current one. The hart calls it before its first access after each entry,
    /// and after each change of its view. A change between Sv39 and Sv48 forgets all translations.
    fn set_view(&mut self, view: View);

    /// SFENCE.VMA: forgets cached translations of the guest's tables.
    /// - Without `asid`: those of all address spaces. With it: those of that address space, except
    ///   global ones.
    /// - Without `address`: those of all addresses. With it: those from the leaf that maps
    ///   `address`.
    ///
    /// It may forget more. Later walks see all stores that come before the fence.
    fn fence_translations(&mut self, address: Option<u64>, asid: Option<u16>);

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
    /// A number by which the bus recognises the memory at the address. An SC whose address leads
    /// to other memory fails. 0 if the bus needs none.
    pub place: u64,
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
        address: u64,
        /// Its guest-physical address.
        gpa: u64,
    },
    /// The guest may not make this access at `address`: it takes an access fault.
    Access {
        /// The first byte of the access that the bus refuses.
        address: u64,
    },
    /// The guest's tables do not allow this access at `address`: it takes a page fault.
    Page {
        /// The first byte of the access that they do not allow.
        address: u64,
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
