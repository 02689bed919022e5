#![expect(
    unsafe_code,
    reason = "declares the contract of what keeps the memory slots"
)]
//! The seam between the hypervisor and the scheme that keeps its memory slots.
//!
//! **Guarantee.** A look-up takes no lock that a change of the slots holds, and finds the current
//! slots. A vCPU that enters its guest after a change began, and after the request at its gate,
//! sees that change or a later one.
//!
//! **Mechanism.** The thread that changes the slots owns [`Memslots`], under its mutex. Each vCPU
//! owns a [`MemslotReader`]. A change has two halves, as in the kernel. [`Memslots::begin`] makes
//! the slot that is deleted or moved *invalid*, which makes faults retry. Then the VM revokes what
//! vCPUs have of it. Then [`MemslotUpdate::commit`] puts the new state in place. `revoke.rs` proves
//! that this order suffices. All is static dispatch: a VM is compiled for one scheme,
//! [`Scalable`](crate::Scalable) unless its user names another.
//!
//! **Neighbours.** [`crate::Vm`] changes slots, and the fault path in `memory.rs` reads them. A
//! scheme knows nothing of vCPUs, tables and flushes. Schemes other than `Scalable` exist for
//! measurements and tests.

use crate::region::SlotData;
use core::ops::Range;
use pageferry_addr::{Gfn, GfnRange, Hva};
use pageferry_memslot::{Limits, Request, Slot, SlotError, SlotFlags};

/// The result of looking a frame up.
#[derive(Clone, Copy, Debug)]
pub enum Found<'a> {
    /// No slot holds the frame: it belongs to a device, or to nothing.
    Nothing,
    /// The slot that holds it is being deleted or moved: leave the guest once, then look again.
    Invalid,
    /// This slot holds it.
    Slot(&'a Slot<SlotData>),
}

/// The effect of a change: from [`MemslotUpdate::begun`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun {
    /// None: the request asks for the present state.
    Nothing,
    /// A slot is created.
    Created {
        /// Its frames.
        new: GfnRange,
    },
    /// A slot is deleted; it is invalid from now on.
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

/// A scheme of memory slots, as its writer sees it: one value a VM, one change at a time.
///
/// # Safety
///
/// Guests reach host memory through what a scheme finds, so the VM's memory safety rests on these:
/// 1. A [`Slot`] that a reader or [`by_id`](Self::by_id) finds was asked for by a request that was
///    committed, its `range`, `hva` and `flags` are that request's, and its `data` is the one that
///    came with it: not a copy, so that what the VM sets in the data of a slot by id, readers find.
/// 2. A look-up that happens after a [`commit`](MemslotUpdate::commit) finds no slot that the
///    commit deleted or replaced, and no slot at frames it was moved away from.
/// 3. A look-up that happens after [`begin`](Self::begin) of a deletion or move, and before the
///    update is committed or dropped, finds [`Found::Invalid`] or [`Found::Nothing`] at every frame
///    of the old slot.
/// 4. A slot that is not deleted or replaced keeps its `data`, and so does one that is, until its
///    commit begins.
/// 5. [`begun`](MemslotUpdate::begun) tells the frames and flags that the commit removes and adds,
///    as they are, and an update that is dropped changes nothing.
///
/// "Happens after" is that of the memory model: the VM orders look-ups behind a change by the
/// vCPUs' gates.
pub unsafe trait Memslots: Send + Sized + 'static {
    /// The reader with which each vCPU looks slots up.
    type Reader: MemslotReader;
    /// A change that has begun.
    type Update<'a>: MemslotUpdate;

    /// No slots, within `limits`.
    fn new(limits: Limits) -> Self;

    /// A reader for one more vCPU.
    fn reader(&self) -> Self::Reader;

    /// Begins a change: checks `request` by the rules of `KVM_SET_USER_MEMORY_REGION2` and, where a
    /// slot goes or moves, makes it invalid for readers.
    ///
    /// # Errors
    /// By those rules; nothing has changed then.
    fn begin(&mut self, request: Request<SlotData>) -> Result<Self::Update<'_>, SlotError>;

    /// The slot with this id.
    fn by_id(&self, id: u16) -> Option<&Slot<SlotData>>;

    /// Calls `f` for each slot whose memory any byte of `hva` lies in.
    fn for_each_in_hva<'a>(&'a self, hva: Range<Hva>, f: impl FnMut(&'a Slot<SlotData>));

    /// A guard that the VM holds while it changes entries of the tables for a log or a notifier. It
    /// is empty, unless the scheme keeps faults out meanwhile, to compare with MMUs that have one
    /// lock. The VM drops it before it waits for vCPUs. But a sweep that cuts many tables off
    /// flushes in between, so a look-up must not wait for the guard without a limit.
    fn exclude(&self) -> impl Sized {}

    /// Frees what no reader uses any more, above all the data of replaced slots. The VM calls it
    /// after each change for which all vCPUs have left their guests once.
    fn reclaim(&mut self) {}

    /// The bytes that the scheme has allocated to keep its slots, as far as it knows.
    fn metadata_bytes(&self) -> usize;
}

/// A change between its two halves. Dropping it gives the change up: all is as before, and the slot
/// that was to be deleted or moved is valid again.
pub trait MemslotUpdate {
    /// The effect of the change.
    fn begun(&self) -> Begun;

    /// Puts the new state in place. Does nothing after [`Begun::Nothing`].
    fn commit(self);
}

/// Looks slots up for one vCPU. One thread at a time uses it.
pub trait MemslotReader: Send {
    /// Calls `f` with the slot that holds `gfn` now. The slot may be dropped as soon as `f` has
    /// returned.
    fn lookup<R>(&mut self, gfn: Gfn, f: impl FnOnce(Found<'_>) -> R) -> R;

    /// Drops what the reader keeps of older versions. The vCPU calls it outside the guest, after a
    /// change made all vCPUs leave. Schemes whose readers keep nothing do nothing.
    fn refresh(&mut self) {}
}
