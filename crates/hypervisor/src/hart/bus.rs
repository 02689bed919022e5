//! What a hart asks of memory.

use super::int::{AmoInt, AmoOp, GuestInt};

/// Instructions in one code page.
pub const PAGE_WORDS: usize = 1024;

/// Guest memory, as one hart sees it: usually a TLB over second-stage tables.
///
/// **Guarantee asked for.** An access that returns `Ok` has happened, once, as one single-copy
/// atomic access of its width. An access that returns `Err` has changed nothing the guest can see,
/// and may be repeated.
///
/// Addresses are guest-physical and may be any `u64`. The generic methods are called from the
/// interpreter's loop and are compiled into it: keep the hit path short, mark it
/// `#[inline(always)]`, and put the miss path behind a call. One comparison can check both tag and
/// alignment: `gpa & !(PAGE_MASK ^ (T::BYTES - 1)) == tag`.
pub trait Bus {
    /// A load with no ordering (RVWMO's ordinary load).
    ///
    /// # Errors
    /// [`BusFault::Misaligned`] if `gpa` is not a multiple of `T::BYTES`, even where it lies in
    /// MMIO or nowhere; the hart splits the access. The other faults as they are described.
    fn load<T: GuestInt>(&mut self, gpa: u64) -> Result<T, BusFault>;

    /// A store with no ordering.
    ///
    /// # Errors
    /// As [`Bus::load`].
    fn store<T: GuestInt>(&mut self, gpa: u64, value: T) -> Result<(), BusFault>;

    /// Stores `bytes` (at most 8) at `gpa`, which may be misaligned and may reach into the next
    /// page. The store is not atomic, but it is all or nothing: every page must be there, writable,
    /// before the first byte is written. `gpa + bytes.len()` may exceed `u64::MAX`: an access
    /// fault.
    ///
    /// # Errors
    /// Any fault but [`BusFault::Misaligned`].
    fn store_bytes(&mut self, gpa: u64, bytes: &[u8]) -> Result<(), BusFault>;

    /// An atomic read-modify-write, sequentially consistent ([`AmoInt::amo`] is). `gpa` is aligned.
    /// Returns the value before.
    ///
    /// # Errors
    /// Any fault but [`BusFault::Misaligned`].
    fn amo<T: AmoInt>(&mut self, gpa: u64, op: AmoOp, operand: T) -> Result<T, BusFault>;

    /// A sequentially consistent load that opens a reservation on the `T::BYTES` bytes at `gpa`,
    /// which is aligned. The hart keeps what is returned and hands it to
    /// [`Bus::store_conditional`].
    ///
    /// # Errors
    /// Any fault but [`BusFault::Misaligned`].
    fn load_reserved<T: AmoInt>(&mut self, gpa: u64) -> Result<Reserved<T>, BusFault>;

    /// Stores `value` at `gpa` if nobody else has stored to the reserved bytes since `reserved` was
    /// returned for the same `gpa` and `T`. Returns whether it stored; it may refuse for no reason,
    /// but not for ever.
    ///
    /// # Errors
    /// Any fault but [`BusFault::Misaligned`]. The reservation outlives the fault: the access is
    /// repeated with the same `reserved`.
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

    /// The VM's clock as the `time` CSR shows it, in the VM's timebase ticks. Monotonic, and the
    /// same for all harts of a VM.
    fn time(&mut self) -> u64;
}

/// What [`Bus::load_reserved`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved<T> {
    /// The value loaded.
    pub value: T,
    /// Whatever else the bus needs to recognise a store by somebody else; 0 if it needs nothing.
    pub version: u64,
}

/// Why an access did not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BusFault {
    /// The address is not naturally aligned; nothing else was looked at.
    Misaligned,
    /// The hart must leave the guest first, because its request word is set. The instruction is not
    /// retired.
    Requested,
    /// No memory answers at `gpa`: the access is the VMM's to emulate.
    Mmio {
        /// The first byte of the access that no memory slot covers.
        gpa: u64,
    },
    /// The guest may not do that at `gpa`: it takes an access fault.
    Access {
        /// The first byte of the access that is refused.
        gpa: u64,
    },
    /// The memory is the guest's, but is not there, or not to be stored to, now. The hart leaves
    /// the guest, the instruction is not retired, and the next entry repeats it.
    Memory(MemoryFault),
}

/// Guest memory that is not there, or not to be stored to, now: the contents of a memory-fault
/// exit, as KVM's `KVM_EXIT_MEMORY_FAULT` has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryFault {
    /// Where that range begins, in bytes.
    pub gpa: u64,
    /// How long it is, in bytes.
    pub size: u64,
    /// The bus's own flags. The hart passes them on.
    pub flags: u64,
}

/// What a guest instruction tried to do to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// An instruction fetch.
    Fetch,
    /// A load or LR.
    Load,
    /// A store, SC or AMO.
    Store,
}
