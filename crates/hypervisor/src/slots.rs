#![expect(
    unsafe_code,
    reason = "declares the contract of a scheme that keeps the memory slots"
)]
//! The interface between the hypervisor and the scheme that keeps its memory slots.
//!
//! **Guarantee.** A look-up takes no lock that a change of the slots holds, and finds the current
//! slots. A vCPU that enters its guest after a change began, and after the request at its gate,
//! sees that change or a later one.
//!
//! **Mechanism.** The thread that changes the slots owns [`Memslots`], under a mutex. Each vCPU
//! owns a [`MemslotReader`]. A change has two halves, as in the kernel. [`Memslots::begin`] makes
//! the slot that is deleted or moved *invalid*, which makes faults retry. Then the VM revokes the
//! vCPUs' translations. Then [`MemslotUpdate::commit`] publishes the new state. `revoke.rs` proves
//! that this order suffices. Dispatch is static: a VM is compiled for one scheme, by default
//! [`Scalable`](crate::Scalable).
//!
//! **Neighbours.** [`crate::Vm`] changes slots, and the fault path in `memory.rs` reads them. A
//! scheme knows nothing of vCPUs, tables and flushes. Schemes other than `Scalable` exist for
//! measurements and tests.

use crate::region::SlotData;
use core::ops::Range;
use pageferry_addr::{Gfn, GfnRange, Hva};
use pageferry_memslot::{Limits, OutOfMemory, Request, Slot, SlotError, SlotFlags};

/// The result of a look-up by frame.
#[derive(Clone, Copy, Debug)]
pub enum Found<'a> {
    /// No slot holds the frame: it belongs to a device, or to nothing.
    Nothing,
    /// The slot that holds it is being deleted or moved. Leave the guest once, then repeat the
    /// look-up.
    Invalid,
    /// This slot holds it.
    Slot(&'a Slot<SlotData>),
}

/// The effect of a change; see [`MemslotUpdate::begun`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun {
    /// None: the request asks for the present state.
    Nothing,
    /// A slot is created.
    Created {
        /// Its frames.
        new: GfnRange,
    },
    /// A slot is deleted. It is invalid from now on.
    Deleted {
        /// Its frames.
        old: GfnRange,
    },
    /// A slot gets other frames, and perhaps other flags. It is invalid until the commit.
    Moved {
        /// Its old frames.
        old: GfnRange,
        /// Its new frames.
        new: GfnRange,
    },
    /// A slot keeps its frames and gets other flags, from the commit on.
    FlagsChanged {
        /// Its frames.
        range: GfnRange,
        /// Its old flags.
        old: SlotFlags,
        /// Its new flags.
        new: SlotFlags,
    },
}

/// The writer's side of a scheme of memory slots: one value a VM, one change at a time.
///
/// # Safety
///
/// Guests reach host memory through the slots that a scheme finds. So the VM's memory safety
/// depends on these rules:
/// 1. A reader and [`by_id`](Self::by_id) find only [`Slot`]s of committed requests. `range`, `hva`
///    and `flags` of the slot are those of the request. `data` is the value that came with it, not
///    a copy: readers see changes that the VM makes inside the data of a slot by id.
/// 2. A look-up that happens after a [`commit`](MemslotUpdate::commit) finds no slot that the
///    commit deleted or replaced. It finds no slot at frames from which the commit moved it.
/// 3. Take a look-up that happens after [`begin`](Self::begin) of a deletion or move, and before
///    the update is committed or dropped. It finds [`Found::Invalid`] or [`Found::Nothing`] at
///    every frame of the old slot.
/// 4. A slot keeps its `data` until a commit that deletes or replaces the slot begins.
/// 5. [`begun`](MemslotUpdate::begun) returns exactly the frames and flags that the commit removes
///    and adds. An update that is dropped changes nothing.
///
/// "Happens after" is the relation of the memory model. The VM uses the vCPUs' gates to order
/// look-ups behind a change.
pub unsafe trait Memslots: Send + Sized + 'static {
    /// The reader of one vCPU.
    type Reader: MemslotReader;
    /// A change that has begun.
    type Update<'a>: MemslotUpdate;

    /// Makes a scheme without slots, within `limits`.
    fn new(limits: Limits) -> Self;

    /// Makes a reader for one more vCPU. It may panic or abort without memory.
    fn reader(&self) -> Self::Reader;

    /// Makes a reader for one more vCPU. The VM calls it for each vCPU. A scheme that can report a
    /// lack of memory overrides it.
    ///
    /// # Errors
    /// If the allocator refuses memory for the reader.
    fn try_reader(&self) -> Result<Self::Reader, OutOfMemory> {
        Ok(self.reader())
    }

    /// Begins a change: checks `request` by the rules of `KVM_SET_USER_MEMORY_REGION2`. If the
    /// request deletes or moves a slot, it makes that slot invalid for readers.
    ///
    /// # Errors
    /// If the request breaks those rules. Nothing has changed then.
    fn begin(&mut self, request: Request<SlotData>) -> Result<Self::Update<'_>, SlotError>;

    /// The slot with this id.
    fn by_id(&self, id: u16) -> Option<&Slot<SlotData>>;

    /// Calls `f` for each slot whose memory overlaps `hva`.
    fn for_each_in_hva<'a>(&'a self, hva: Range<Hva>, f: impl FnMut(&'a Slot<SlotData>));

    /// A guard that the VM holds while it changes entries of the tables for a log or a notifier.
    ///
    /// The guard is empty by default. A scheme may keep faults out while it is held, to measure
    /// MMUs that have one lock. The VM drops it before it waits for vCPUs. But a sweep that cuts
    /// many tables off flushes in between, so a look-up must wait for the guard with a limit.
    fn exclude(&self) -> impl Sized {}

    /// Frees what no reader uses any more, above all the data of replaced slots. The VM calls it
    /// after each change for which all vCPUs have left their guests once.
    fn reclaim(&mut self) {}

    /// The number of bytes that the scheme has allocated to keep its slots, as far as it knows.
    fn metadata_bytes(&self) -> usize;
}

/// A change between its two halves. Dropping it gives the change up: nothing has changed, and the
/// slot to delete or move is valid again.
pub trait MemslotUpdate {
    /// The effect of the change.
    fn begun(&self) -> Begun;

    /// Publishes the new state. It does nothing after [`Begun::Nothing`].
    fn commit(self);
}

/// Looks slots up for one vCPU. One thread at a time uses it.
pub trait MemslotReader: Send {
    /// Calls `f` with the slot that holds `gfn` now. The scheme may drop the slot as soon as `f`
    /// has returned.
    fn lookup<R>(&mut self, gfn: Gfn, f: impl FnOnce(Found<'_>) -> R) -> R;

    /// Drops the reader's older versions of the slots. The vCPU calls it outside the guest, after a
    /// change made all vCPUs leave. A scheme whose readers keep nothing does nothing.
    fn refresh(&mut self) {}
}
