#![expect(
    unsafe_code,
    reason = "implements the unsafe trait of memory slots, by delegating to `Scalable`"
)]
//! The serialised MMU, for comparison: one lock around every fault, as in KVM before it took faults
//! in parallel.
//!
//! It is [`Scalable`] with one difference. A fault holds the VM's lock from the slot look-up until
//! its entry is in the tables. A sweep of the tables, for a dirty log or an MMU notifier, holds it
//! as well. The code under the lock is the same, so only the lock makes the difference.
//!
//! The lock spins, as the kernel's did, and then yields. If a vCPU does not get the lock in time,
//! it leaves its guest and retries. The holder may be waiting for that vCPU to leave.

use pageferry_addr::{Gfn, Hva};
use pageferry_hypervisor::{
    Found, Limits, MemslotReader, Memslots, Request, Scalable, Slot, SlotData, SlotError,
};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// Memory slots under which faults run one at a time.
#[derive(Debug)]
pub(crate) struct Serialised {
    inner: Scalable,
    lock: Arc<Mutex<()>>,
}

/// One vCPU's reader.
#[derive(Debug)]
pub(crate) struct SerialisedReader {
    inner: <Scalable as Memslots>::Reader,
    lock: Arc<Mutex<()>>,
}

// SAFETY: every call is delegated to `Scalable`, which keeps the contract. The one difference: a
// fault that does not get the lock finds [`Found::Invalid`], changes nothing, and is retried.
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
