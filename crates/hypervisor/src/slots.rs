#![expect(
    unsafe_code,
    reason = "declares the contract of what keeps the memory slots"
)]
//! Who keeps the memory slots: the seam between the hypervisor and a scheme of slots.
//!
//! **Guarantee.** A look-up takes no lock that a change of the slots holds, and finds the slots as they are: a
//! vCPU that enters its guest after a change began and the vCPU's gate was requested sees that change or
//! a later one.
//!
//! **Mechanism.** [`Memslots`] is what the writer of the slots owns (under its mutex), [`MemslotReader`] what each vCPU
//! owns. A change has two halves, as the kernel's: [`Memslots::begin`] makes the slot that goes or moves
//! *invalid*, which tells faults to come again; then the VM revokes what vCPUs have of it; then
//! [`MemslotUpdate::commit`] puts the new state in place. Why this order suffices is said in `revoke.rs`. All is
//! static dispatch: a VM is compiled for one scheme, [`Scalable`](crate::Scalable) unless its user names another.
//!
//! **Neighbours.** [`crate::Vm`] changes slots, the fault path in `memory.rs` reads them. A scheme knows nothing of
//! vCPUs, tables and flushes. Other schemes than `Scalable` exist for measurements and tests.

use crate::region::SlotData;
use core::ops::Range;
use pageferry_addr::{Gfn, GfnRange, Hva};
use pageferry_memslot::{Limits, Request, Slot, SlotError, SlotFlags};

/// What a look-up of a frame found.
#[derive(Clone, Copy, Debug)]
pub enum Found<'a> {
    /// No slot holds the frame: it is a device's, or nobody's.
    Nothing,
    /// A slot holds it that is being deleted or moved: look again, after the guest was left once.
    Invalid,
    /// This slot holds it.
    Slot(&'a Slot<SlotData>),
}

/// What a change will do: from [`MemslotUpdate::begun`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun {
    /// Nothing: the request asks for what is there.
    Nothing,
    /// A slot comes.
    Created {
        /// Its frames.
        new: GfnRange,
    },
    /// A slot goes; it is invalid from now on.
    Deleted {
        /// Its frames.
        old: GfnRange,
    },
    /// A slot gets other frames, and perhaps other flags; the old ones are invalid from now on.
    Moved {
        /// Its frames until now.
        old: GfnRange,
        /// Its frames to be.
        new: GfnRange,
    },
    /// A slot gets other flags where it is; until the commit it has the old ones.
    FlagsChanged {
        /// Its frames.
        range: GfnRange,
        /// Its flags until now.
        old: SlotFlags,
        /// Its flags to be.
        new: SlotFlags,
    },
}

/// A scheme of memory slots, in the hands of the one who changes them: one value a VM, one change at a time.
///
/// # Safety
///
/// Guests reach host memory through what a scheme finds, so the VM's memory safety rests on these:
/// 1. A [`Slot`] that a reader or [`by_id`](Self::by_id) finds was asked for by a request that was committed, its
///    `range`, `hva` and `flags` are that request's, and its `data` is the one that came with it: not a copy, so that
///    what the VM sets in the data of a slot by id, readers find.
/// 2. A look-up that happens after a [`commit`](MemslotUpdate::commit) finds no slot that the commit deleted or
///    replaced, and no slot at frames it was moved away from.
/// 3. A look-up that happens after [`begin`](Self::begin) of a deletion or move, and before the update is
///    committed or dropped, finds [`Found::Invalid`] or [`Found::Nothing`] at every frame of the old slot.
/// 4. A slot that is not deleted or replaced keeps its `data`, and so does one that is, until its commit begins.
/// 5. [`begun`](MemslotUpdate::begun) tells the frames and flags that the commit removes and adds, as they are, and an
///    update that is dropped changes nothing.
///
/// "Happens after" is that of the memory model: the VM orders look-ups behind a change by the vCPUs' gates.
pub unsafe trait Memslots: Send + Sized + 'static {
    /// What each vCPU looks slots up with.
    type Reader: MemslotReader;
    /// A change that has begun.
    type Update<'a>: MemslotUpdate;

    /// No slots, within `limits`.
    fn new(limits: Limits) -> Self;

    /// A reader for one more vCPU.
    fn reader(&self) -> Self::Reader;

    /// Begins a change: checks `request` by the rules of `KVM_SET_USER_MEMORY_REGION2` and, where a slot goes or moves,
    /// makes it invalid for readers.
    ///
    /// # Errors
    /// By those rules; nothing has changed then.
    fn begin(&mut self, request: Request<SlotData>) -> Result<Self::Update<'_>, SlotError>;

    /// The slot with this id.
    fn by_id(&self, id: u16) -> Option<&Slot<SlotData>>;

    /// Calls `f` for each slot whose memory any byte of `hva` lies in.
    fn for_each_in_hva<'a>(&'a self, hva: Range<Hva>, f: impl FnMut(&'a Slot<SlotData>));

    /// What is held while a call of the VM changes entries of the tables for a log or a notifier. Nothing, unless the scheme keeps
    /// faults out meanwhile, for comparison with the time when MMUs had one lock. It is let go before vCPUs are waited
    /// for; but a sweep that cuts many tables off flushes in between, so that a look-up must not wait for it without a
    /// limit.
    fn exclude(&self) -> impl Sized {}

    /// Frees what no reader uses any more, the data of replaced slots above all. Called after each change for which all
    /// vCPUs have left their guests once.
    fn reclaim(&mut self) {}

    /// The bytes that the scheme has allocated to keep its slots, as good as it knows.
    fn metadata_bytes(&self) -> usize;
}

/// A change between its two halves. Dropping it gives the change up: all is as before, and the slot that was
/// to go or to move is valid again.
pub trait MemslotUpdate {
    /// What the change will do.
    fn begun(&self) -> Begun;

    /// Puts the new state in place. Does nothing after [`Begun::Nothing`].
    fn commit(self);
}

/// One vCPU's eyes: used by one thread at a time.
pub trait MemslotReader: Send {
    /// Calls `f` with what holds `gfn` now. The slot may go as soon as `f` has returned.
    fn lookup<R>(&mut self, gfn: Gfn, f: impl FnOnce(Found<'_>) -> R) -> R;

    /// Lets go of what the reader keeps of older versions. Called outside the guest, after a change asked all vCPUs to
    /// leave. For schemes that keep nothing it has nothing to do.
    fn refresh(&mut self) {}
}
