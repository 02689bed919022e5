#![expect(
    unsafe_code,
    reason = "keeps memory slots for a VM, by handing all of it to the scheme inside"
)]
//! The serialised MMU, for comparison: one lock around every fault, as KVM had before the series.
//!
//! A scheme of memory slots that is [`Scalable`] in all but this: a fault holds one lock, the VM's,
//! from its look at the slots until its entry is in the tables, and so does whoever sweeps the
//! tables for a log or a notifier. The code under the lock is the same, so what differs is the
//! lock.
//!
//! The lock spins, as the kernel's did, and then yields. A vCPU that does not get it for long
//! leaves its guest and comes again, since who holds it may wait for that vCPU to leave.

use pageferry_addr::{Gfn, Hva};
use pageferry_hypervisor::{
    Found, Limits, MemslotReader, Memslots, Request, Scalable, Slot, SlotData, SlotError,
};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// Memory slots whose faults take turns.
#[derive(Debug)]
pub struct Serialised {
    inner: Scalable,
    lock: Arc<Mutex<()>>,
}

/// One vCPU's reader.
#[derive(Debug)]
pub struct SerialisedReader {
    inner: <Scalable as Memslots>::Reader,
    lock: Arc<Mutex<()>>,
}

// SAFETY: all is `Scalable`'s, but for faults that find nothing done yet and come again.
unsafe impl Memslots for Serialised {
    type Reader = SerialisedReader;
    type Update<'a> = <Scalable as Memslots>::Update<'a>;

    fn new(limits: Limits) -> Self {
        Self {
            inner: Scalable::new(limits),
            lock: Arc::default(),
        }
    }

    fn reader(&self) -> SerialisedReader {
        SerialisedReader {
            inner: Memslots::reader(&self.inner),
            lock: Arc::clone(&self.lock),
        }
    }

    fn begin(&mut self, request: Request<SlotData>) -> Result<Self::Update<'_>, SlotError> {
        self.inner.begin(request)
    }

    fn by_id(&self, id: u16) -> Option<&Slot<SlotData>> {
        self.inner.by_id(id)
    }

    fn for_each_in_hva<'a>(&'a self, hva: Range<Hva>, f: impl FnMut(&'a Slot<SlotData>)) {
        self.inner.for_each_in_hva(hva, f);
    }

    fn exclude(&self) -> impl Sized {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reclaim(&mut self) {
        self.inner.reclaim();
    }

    fn metadata_bytes(&self) -> usize {
        self.inner.metadata_bytes()
    }
}

impl MemslotReader for SerialisedReader {
    #[inline]
    fn lookup<R>(&mut self, gfn: Gfn, f: impl FnOnce(Found<'_>) -> R) -> R {
        let Some(_held) = acquire(&self.lock) else {
            return f(Found::Invalid);
        };
        self.inner.lookup(gfn, f)
    }
}

/// Spins for some microseconds, then yields a few times.
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
