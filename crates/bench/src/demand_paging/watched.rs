#![expect(
    unsafe_code,
    reason = "implements the unsafe trait of memory slots, by delegating to `Scalable`"
)]
//! The hypervisor's own scheme of memory slots, with a lock or a clock around every fault.
//!
//! A fault looks up its slot, and then does the rest of its work, the walk and the change of the
//! tables, inside [`MemslotReader::lookup`]. So a wrapper of a [`Memslots`] can surround every
//! fault of a [`pageferry_hypervisor::Vm`] without a change to the hypervisor. If the hypervisor
//! moves that work elsewhere, the tests here fail.

use super::ticket::TicketLock;
use pageferry_addr::{Gfn, Hva};
use pageferry_hypervisor::{
    Found, Limits, MemslotReader, Memslots, Request, Scalable, Slot, SlotData, SlotError,
};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Code that runs around the faults of one VM. Each vCPU has a clone.
pub(crate) trait Watch: Clone + Default + Send + 'static {
    /// A fault begins.
    fn began(&mut self) {}

    /// The slot was found. `rest` does the remaining work of the fault.
    fn found<R>(&mut self, rest: impl FnOnce() -> R) -> R;
}

/// One exclusive lock around the work of every fault, handed over in the order of arrival: the
/// model's serialised MMU. The slot look-up stays outside the lock, as it did in KVM. Nothing
/// sweeps the tables of these VMs while their vCPUs run, so only faults take the lock.
#[derive(Clone, Default)]
pub(crate) struct OrderedLock(Arc<TicketLock>);

#[cfg(test)]
impl OrderedLock {
    /// Whether a fault holds the lock.
    pub(super) fn is_held(&self) -> bool {
        self.0.is_held()
    }
}

impl Watch for OrderedLock {
    #[inline]
    fn found<R>(&mut self, rest: impl FnOnce() -> R) -> R {
        let _held = self.0.lock();
        rest()
    }
}

/// The times of one fault, in nanoseconds. Each includes the cost of reading the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FaultTimes {
    /// The look-up of the slot.
    pub(crate) lookup: u32,
    /// The remaining work.
    pub(crate) rest: u32,
    /// Whether the fault ended in an exit, because the page is missing.
    pub(crate) missing: bool,
}

/// A clock. The thread that faulted, which is the vCPU's own, keeps the times.
#[derive(Clone, Default)]
pub(crate) struct Clock(Option<Instant>);

thread_local! {
    static TIMES: RefCell<Vec<FaultTimes>> = const { RefCell::new(Vec::new()) };
}

impl Clock {
    /// Reserves room on this thread, so that no fault waits for the allocator.
    pub(crate) fn reserve(faults: usize) {
        TIMES.with_borrow_mut(|times| times.reserve(faults));
    }

    /// Records that this thread's last fault ended in an exit.
    pub(crate) fn was_missing() {
        TIMES.with_borrow_mut(|times| {
            if let Some(last) = times.last_mut() {
                last.missing = true;
            }
        });
    }

    /// Returns and forgets this thread's times.
    pub(crate) fn take() -> Vec<FaultTimes> {
        TIMES.take()
    }
}

impl Watch for Clock {
    #[inline]
    fn began(&mut self) {
        self.0 = Some(Instant::now());
    }

    #[inline]
    fn found<R>(&mut self, rest: impl FnOnce() -> R) -> R {
        let found = Instant::now();
        let result = rest();
        let end = Instant::now();
        let ns = |from: Instant, to: Instant| {
            u32::try_from(to.duration_since(from).as_nanos()).unwrap_or(u32::MAX)
        };
        let began = self.0.take().unwrap_or(found);
        let timed = FaultTimes {
            lookup: ns(began, found),
            rest: ns(found, end),
            missing: false,
        };
        TIMES.with_borrow_mut(|times| times.push(timed));
        result
    }
}

/// [`Scalable`] with code around every fault.
pub(crate) struct Watched<W> {
    slots: Scalable,
    watch: W,
}

/// A reader of [`Watched`].
pub(crate) struct WatchedReader<W> {
    reader: <Scalable as Memslots>::Reader,
    watch: W,
}

// SAFETY: every call is delegated to `Scalable`, which keeps the contract. The watch changes
// neither the found slot nor the moment when the caller learns of it.
unsafe impl<W: Watch> Memslots for Watched<W> {
    type Reader = WatchedReader<W>;
    type Update<'a> = <Scalable as Memslots>::Update<'a>;

    fn new(limits: Limits) -> Self {
        Self {
            slots: Scalable::new(limits),
            watch: W::default(),
        }
    }

    fn reader(&self) -> WatchedReader<W> {
        WatchedReader {
            reader: self.slots.reader(),
            watch: self.watch.clone(),
        }
    }

    fn begin(&mut self, request: Request<SlotData>) -> Result<Self::Update<'_>, SlotError> {
        self.slots.begin(request)
    }

    fn by_id(&self, id: u16) -> Option<&Slot<SlotData>> {
        self.slots.by_id(id)
    }

    fn for_each_in_hva<'a>(&'a self, hva: Range<Hva>, f: impl FnMut(&'a Slot<SlotData>)) {
        self.slots.for_each_in_hva(hva, f);
    }

    fn reclaim(&mut self) {
        self.slots.reclaim();
    }

    fn metadata_bytes(&self) -> usize {
        self.slots.metadata_bytes()
    }
}

impl<W: Watch> MemslotReader for WatchedReader<W> {
    #[inline]
    fn lookup<R>(&mut self, gfn: Gfn, f: impl FnOnce(Found<'_>) -> R) -> R {
        let Self { reader, watch } = self;
        watch.began();
        reader.lookup(gfn, |found| watch.found(|| f(found)))
    }

    fn refresh(&mut self) {
        self.reader.refresh();
    }
}
