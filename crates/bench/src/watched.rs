#![expect(
    unsafe_code,
    reason = "implements the unsafe trait of memory slots, by delegating to `Scalable`"
)]
//! The hypervisor's own scheme of memory slots, with a lock or a clock around every fault.
//!
//! A fault looks up its slot, and then does the rest of its work, the walk and the change of the
//! tables, inside [`MemslotReader::lookup`]. So a wrapper of a [`Memslots`] can surround every
//! fault of a [`pageferry_hypervisor::Vm`] without a change to the hypervisor. If the hypervisor
//! moves that work elsewhere, the tests of `demand_paging` fail.

use crate::kit::TicketLock;
use pageferry_addr::{Gfn, Hva};
use pageferry_hypervisor::{
    Found, Limits, MemslotReader, Memslots, Request, Scalable, Slot, SlotData, SlotError,
};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

/// A vCPU's reader of the hypervisor's own scheme.
type Reader = <Scalable as Memslots>::Reader;

/// Code that runs around the faults of one VM. Each vCPU has a clone.
pub(crate) trait Watch: Clone + Default + Send + Sync + 'static {
    /// Looks up the slot. `rest` does the remaining work of the fault.
    fn fault<R>(&mut self, reader: &mut Reader, gfn: Gfn, rest: impl FnOnce(Found<'_>) -> R) -> R;

    /// Keeps faults out for as long as the result lives.
    fn exclude(&self) -> impl Sized {}
}

/// The serialised MMU, for comparison: one lock around every fault, as in KVM before it took faults
/// in parallel.
///
/// A fault holds the VM's lock from the slot look-up until its entry is in the tables. A sweep of
/// the tables, for a dirty log or an MMU notifier, holds it as well. The code under the lock is
/// that of [`Scalable`], so only the lock makes the difference.
pub(crate) type Serialised = Watched<SpinLock>;

/// A lock that spins, as the kernel's did, and then yields. If a vCPU does not get the lock in
/// time, it leaves its guest and retries. The holder may be waiting for that vCPU to leave.
#[derive(Clone, Default)]
pub(crate) struct SpinLock(Arc<Mutex<()>>);

impl Watch for SpinLock {
    #[inline]
    fn fault<R>(&mut self, reader: &mut Reader, gfn: Gfn, rest: impl FnOnce(Found<'_>) -> R) -> R {
        let Some(_held) = acquire(&self.0) else {
            return rest(Found::Invalid);
        };
        reader.lookup(gfn, rest)
    }

    fn exclude(&self) -> impl Sized {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Spins for some microseconds, then yields a few times. `None`: the lock stayed taken.
fn acquire(lock: &Mutex<()>) -> Option<MutexGuard<'_, ()>> {
    const SPINS: u32 = 2000;
    const YIELDS: u32 = 20;
    for turn in 0..SPINS + YIELDS {
        match lock.try_lock() {
            Ok(held) => return Some(held),
            Err(TryLockError::Poisoned(held)) => return Some(held.into_inner()),
            Err(TryLockError::WouldBlock) if turn < SPINS => std::hint::spin_loop(),
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
    None
}

/// One exclusive lock around the work of every fault, handed over in the order of arrival: the
/// model's serialised MMU. The slot look-up stays outside the lock, as it did in KVM. Nothing
/// sweeps the tables of these VMs while their vCPUs run, so only faults take the lock.
#[derive(Clone, Default)]
pub(crate) struct OrderedLock(Arc<TicketLock>);

impl Watch for OrderedLock {
    #[inline]
    fn fault<R>(&mut self, reader: &mut Reader, gfn: Gfn, rest: impl FnOnce(Found<'_>) -> R) -> R {
        reader.lookup(gfn, |found| {
            let _held = self.0.lock();
            rest(found)
        })
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
pub(crate) struct Clock;

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
    fn fault<R>(&mut self, reader: &mut Reader, gfn: Gfn, rest: impl FnOnce(Found<'_>) -> R) -> R {
        let began = Instant::now();
        reader.lookup(gfn, |slot| {
            let found = Instant::now();
            let result = rest(slot);
            let end = Instant::now();
            let ns = |from: Instant, to: Instant| {
                u32::try_from(to.duration_since(from).as_nanos()).unwrap_or(u32::MAX)
            };
            let timed = FaultTimes {
                lookup: ns(began, found),
                rest: ns(found, end),
                missing: false,
            };
            TIMES.with_borrow_mut(|times| times.push(timed));
            result
        })
    }
}

/// [`Scalable`] with code around every fault.
pub(crate) struct Watched<W> {
    slots: Scalable,
    watch: W,
}

/// A reader of [`Watched`].
pub(crate) struct WatchedReader<W> {
    reader: Reader,
    watch: W,
}

// SAFETY: every call is delegated to `Scalable`, which keeps the contract. The watch changes
// neither the found slot nor the moment when the caller learns of it. A fault for which it finds
// [`Found::Invalid`] changes nothing, and is retried.
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

    fn exclude(&self) -> impl Sized {
        self.watch.exclude()
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
        self.watch.fault(&mut self.reader, gfn, f)
    }

    fn refresh(&mut self) {
        self.reader.refresh();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_in_order_is_held_around_the_rest_of_a_fault() {
        let slots = Watched::<OrderedLock>::new(Limits::default());
        let lock = slots.watch.clone();
        let held = || lock.0.is_held();
        let inside = Memslots::reader(&slots).lookup(Gfn(0), |_| held());
        assert!(inside && !held());
    }
}
