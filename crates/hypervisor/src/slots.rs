#![expect(
    unsafe_code,
    reason = "declares the contract of what keeps the memory slots, and fulfils it"
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
//! static dispatch: a VM is compiled for one scheme, [`Scalable`] unless its user names another.
//!
//! **Neighbours.** [`crate::Vm`] changes slots, the fault path in `memory.rs` reads them. A scheme knows nothing of
//! vCPUs, tables and flushes. Other schemes than `Scalable` exist for measurements and tests.

use crate::region::SlotData;
use crate::sync::{AtomicU64, Ordering};
use core::ops::Range;
use pageferry_addr::{Gfn, GfnRange, Hva};
use pageferry_memslot::versions::{Change, LastUsed, Limits, Request, Slot, SlotError, SlotFlags, SlotTable};
use std::sync::{Arc, Mutex, PoisonError};

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
///    `range`, `hva` and `flags` are that request's, and its `data` is the one that came with it.
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
    fn for_each_in_hva(&self, hva: Range<Hva>, f: impl FnMut(&Slot<SlotData>));

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

type Table = SlotTable<SlotData>;

/// The scheme that VMs have by default.
#[derive(Debug)]
pub struct Scalable {
    table: Arc<Table>,
    published: Arc<Published>,
}

/// What readers take up when the generation has changed.
#[derive(Clone, Debug)]
struct Version {
    generation: u64,
    table: Arc<Table>,
    /// The frames of the slot that is being deleted or moved.
    invalid: Option<GfnRange>,
}

#[derive(Debug)]
struct Published {
    generation: AtomicU64,
    version: Mutex<Version>,
}

impl Published {
    fn publish(&self, table: &Arc<Table>, invalid: Option<GfnRange>) {
        let mut version = self.version.lock().unwrap_or_else(PoisonError::into_inner);
        *version = Version {
            generation: version.generation + 1,
            table: Arc::clone(table),
            invalid,
        };
        self.generation.store(version.generation, Ordering::Release);
    }

    fn current(&self) -> Version {
        let version = self.version.lock();
        version.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A change of [`Scalable`].
#[derive(Debug)]
pub struct ScalableUpdate<'a> {
    slots: &'a mut Scalable,
    next: Option<Arc<Table>>,
    begun: Begun,
}

/// A reader of [`Scalable`].
#[derive(Debug)]
pub struct ScalableReader {
    published: Arc<Published>,
    version: Version,
    last: LastUsed,
}

// SAFETY: 1. `SlotTable` makes slots from requests only. 2. and 3. `begin` and `commit` publish a version with
// release order; who looks up afterwards acquires it and drops the one before. 4. Tables never change.
unsafe impl Memslots for Scalable {
    type Reader = ScalableReader;
    type Update<'a> = ScalableUpdate<'a>;

    fn new(limits: Limits) -> Self {
        let table = Arc::new(SlotTable::new(limits));
        Self {
            published: Arc::new(Published {
                generation: AtomicU64::new(0),
                version: Mutex::new(Version {
                    generation: 0,
                    table: Arc::clone(&table),
                    invalid: None,
                }),
            }),
            table,
        }
    }

    fn reader(&self) -> ScalableReader {
        ScalableReader {
            published: Arc::clone(&self.published),
            version: self.published.current(),
            last: LastUsed::default(),
        }
    }

    fn begin(&mut self, request: Request<SlotData>) -> Result<ScalableUpdate<'_>, SlotError> {
        let (next, change) = self.table.apply(request)?;
        let begun = match change {
            Change::Nothing => Begun::Nothing,
            Change::Created { new } => Begun::Created { new: new.range },
            Change::Deleted { old } => Begun::Deleted { old: old.range },
            Change::Moved { old, new } => Begun::Moved {
                old: old.range,
                new: new.range,
            },
            Change::FlagsChanged { old, new } => Begun::FlagsChanged {
                range: old.range,
                old: old.flags,
                new: new.flags,
            },
        };
        if let Begun::Deleted { old } | Begun::Moved { old, .. } = begun {
            self.published.publish(&self.table, Some(old));
        }
        Ok(ScalableUpdate {
            slots: self,
            next: Some(Arc::new(next)),
            begun,
        })
    }

    fn by_id(&self, id: u16) -> Option<&Slot<SlotData>> {
        self.table.by_id(id).map(|slot| &**slot)
    }

    fn for_each_in_hva(&self, hva: Range<Hva>, mut f: impl FnMut(&Slot<SlotData>)) {
        self.table.iter_hva(hva).for_each(|slot| f(slot));
    }

    fn metadata_bytes(&self) -> usize {
        size_of::<Table>() + self.table.len() * size_of::<Slot<SlotData>>()
    }
}

impl MemslotUpdate for ScalableUpdate<'_> {
    fn begun(&self) -> Begun {
        self.begun
    }

    fn commit(mut self) {
        if let (Some(next), true) = (self.next.take(), self.begun != Begun::Nothing) {
            self.slots.table = next;
            self.slots.published.publish(&self.slots.table, None);
        }
    }
}

impl Drop for ScalableUpdate<'_> {
    fn drop(&mut self) {
        if self.next.is_some() && self.begun != Begun::Nothing {
            self.slots.published.publish(&self.slots.table, None);
        }
    }
}

impl MemslotReader for ScalableReader {
    #[inline]
    fn lookup<R>(&mut self, gfn: Gfn, f: impl FnOnce(Found<'_>) -> R) -> R {
        self.refresh();
        if self.version.invalid.is_some_and(|old| old.contains(gfn)) {
            return f(Found::Invalid);
        }
        match self.last.lookup(&self.version.table, gfn) {
            Some(slot) => f(Found::Slot(slot)),
            None => f(Found::Nothing),
        }
    }

    #[inline]
    fn refresh(&mut self) {
        if self.published.generation.load(Ordering::Acquire) != self.version.generation {
            self.version = self.published.current();
        }
    }
}
