#![expect(
    unsafe_code,
    reason = "promises that slots are found as the contract of a scheme says, by handing on one that does"
)]
//! The hypervisor's own scheme of memory slots with something around every fault: a lock that is
//! handed over in order, or a clock.
//!
//! A fault looks its slot up and then does the rest of its work, walk and change of the tables,
//! with what it found. A
//! [`Memslots`] sees both: so a wrapper of it can stand around every fault of a
//! [`pageferry_hypervisor::Vm`], without a change to the hypervisor. This holds as long as the
//! fault's work is done inside [`MemslotReader::lookup`]; the tests here fail if it moves
//! elsewhere.

use super::ticket::Ticket;
use pageferry_addr::{Gfn, Hva};
use pageferry_hypervisor::{
    Found, Limits, MemslotReader, Memslots, Request, Scalable, Slot, SlotData, SlotError,
};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// What stands around the faults of one VM; each vCPU has a clone.
pub(crate) trait Watch: Clone + Default + Send + 'static {
    /// A fault begins.
    fn began(&mut self) {}

    /// The slot was found: the work of the fault is `rest`.
    fn found<R>(&mut self, rest: impl FnOnce() -> R) -> R;
}

/// One exclusive lock around the work of every fault, first come, first served: what the model
/// calls serialised. The look-up of the slot stays outside, as it did in KVM. Nothing sweeps the
/// tables of these VMs while their vCPUs run, so nobody else takes it.
#[derive(Clone, Default)]
pub(crate) struct InOrder(Arc<Ticket>);

#[cfg(test)]
impl InOrder {
    /// Whether a fault is being worked on.
    pub(super) fn is_held(&self) -> bool {
        self.0.is_held()
    }
}

impl Watch for InOrder {
    #[inline]
    fn found<R>(&mut self, rest: impl FnOnce() -> R) -> R {
        let _held = self.0.lock();
        rest()
    }
}

/// How long one fault took, in nanoseconds, both with the cost of reading the clock in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timed {
    /// To find the slot.
    pub(crate) lookup: u32,
    /// The rest.
    pub(crate) rest: u32,
    /// Whether it ended in an exit since the page is missing.
    pub(crate) missing: bool,
}

/// A clock. What it measured is kept by the thread that faulted, which is the vCPU's own.
#[derive(Clone, Default)]
pub(crate) struct Clock(Option<Instant>);

thread_local! {
    static TIMES: RefCell<Vec<Timed>> = const { RefCell::new(Vec::new()) };
}

impl Clock {
    /// Makes room on this thread, so that no fault waits for the allocator.
    pub(crate) fn reserve(faults: usize) {
        TIMES.with_borrow_mut(|times| times.reserve(faults));
    }

    /// Marks this thread's last fault as one that ended in an exit.
    pub(crate) fn was_missing() {
        TIMES.with_borrow_mut(|times| {
            if let Some(last) = times.last_mut() {
                last.missing = true;
            }
        });
    }

    /// Takes what this thread has measured.
    pub(crate) fn take() -> Vec<Timed> {
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
        let timed = Timed {
            lookup: ns(began, found),
            rest: ns(found, end),
            missing: false,
        };
        TIMES.with_borrow_mut(|times| times.push(timed));
        result
    }
}

/// [`Scalable`] with a watch.
pub(crate) struct Watched<W> {
    slots: Scalable,
    watch: W,
}

/// Its reader.
pub(crate) struct WatchedReader<W> {
    reader: <Scalable as Memslots>::Reader,
    watch: W,
}

// SAFETY: all of it is what `Scalable` does; the watch changes neither what is found nor when the
// caller learns it.
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
