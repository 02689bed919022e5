//! Atomics of a processor with store buffers, for models: x86-TSO (P. Sewell and others, *x86-TSO:
//! a rigorous and usable programmer's model for x86 multiprocessors*, 2010) on top of shuttle's
//! scheduler.
//!
//! A store goes to its thread's buffer, first in, first out, and reaches memory at some later,
//! random moment. A load sees the thread's own buffer, then memory. An exchange and a full fence
//! empty the thread's buffer first. So this model notices a missing fence. A model in which each
//! access is visible at once cannot. It does not model weaker orders: on this processor all loads
//! acquire and all stores release.
//!
//! It exists with `--cfg shuttle --cfg pageferry_tso` only.

use crate::Barrier;
use shuttle::rand::Rng;
use shuttle::thread::ThreadId;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::{self, Ordering};
use std::vec::Vec;

type Word = atomic::AtomicU64;

/// A store that is not in memory yet.
struct Store {
    to: *const Word,
    value: u64,
}

impl Store {
    fn perform(&self) {
        // SAFETY: dropping a word removes all stores to it from the buffers.
        unsafe { &*self.to }.store(self.value, Ordering::SeqCst);
    }
}

/// One thread's stores, oldest first.
struct Buffer {
    owner: ThreadId,
    stores: VecDeque<Store>,
}

/// The average number of accesses, by any thread, that a store stays in its buffer if nothing
/// empties the buffer.
const SLOWNESS: u32 = 12;

std::thread_local! {
    /// The buffers of all threads of the model, which run on one thread of the host.
    static BUFFERS: RefCell<Vec<Buffer>> = const { RefCell::new(Vec::new()) };
}

/// Lets another thread run, and lets some stores reach memory.
fn point() {
    shuttle::sync::atomic::AtomicBool::new(false).load(Ordering::SeqCst);
    BUFFERS.with_borrow_mut(|buffers| {
        for Buffer { stores, .. } in buffers {
            while !stores.is_empty() && shuttle::rand::thread_rng().gen_range(0..SLOWNESS) == 0 {
                stores
                    .pop_front()
                    .into_iter()
                    .for_each(|store| store.perform());
            }
        }
    });
}

/// Calls `body` with the running thread's buffer.
fn own<R>(body: impl FnOnce(&mut VecDeque<Store>) -> R) -> R {
    let me = shuttle::thread::current().id();
    BUFFERS.with_borrow_mut(|buffers| {
        let known = buffers.iter().position(|buffer| buffer.owner == me);
        let known = known.unwrap_or_else(|| {
            buffers.push(Buffer {
                owner: me,
                stores: VecDeque::new(),
            });
            buffers.len() - 1
        });
        body(&mut buffers[known].stores)
    })
}

fn drain(stores: &mut VecDeque<Store>) {
    stores.drain(..).for_each(|store| store.perform());
}

/// A fence of the running thread.
pub fn fence(order: Ordering) {
    if order == Ordering::SeqCst {
        point();
        own(drain);
    }
}

/// A barrier that reaches all threads, one after the other.
#[must_use]
pub fn barrier() -> Barrier {
    // SAFETY: the call empties each thread's buffer at some moment. Loads are not delayed.
    unsafe {
        Barrier::new(|| {
            fence(Ordering::SeqCst);
            let threads = BUFFERS.with_borrow(Vec::len);
            for thread in 0..threads {
                point();
                BUFFERS.with_borrow_mut(|buffers| drain(&mut buffers[thread].stores));
            }
            fence(Ordering::SeqCst);
        })
    }
}

/// A word.
#[derive(Debug)]
pub struct AtomicU64(Word);

impl AtomicU64 {
    /// A word that holds `value`.
    #[must_use]
    pub const fn new(value: u64) -> Self {
        Self(Word::new(value))
    }

    /// Loads.
    #[must_use]
    pub fn load(&self, _: Ordering) -> u64 {
        point();
        let mine = own(|stores| {
            let newest = stores
                .iter()
                .rev()
                .find(|store| store.to == &raw const self.0);
            newest.map(|store| store.value)
        });
        mine.unwrap_or_else(|| self.0.load(Ordering::SeqCst))
    }

    /// Stores.
    pub fn store(&self, value: u64, order: Ordering) {
        point();
        own(|stores| {
            stores.push_back(Store { to: &self.0, value });
            if order == Ordering::SeqCst {
                drain(stores);
            }
        });
    }

    fn exclusive<R>(&self, body: impl FnOnce(&Word) -> R) -> R {
        point();
        own(drain);
        body(&self.0)
    }

    /// Exchanges.
    pub fn swap(&self, value: u64, _: Ordering) -> u64 {
        self.exclusive(|word| word.swap(value, Ordering::SeqCst))
    }

    /// Adds.
    pub fn fetch_add(&self, value: u64, _: Ordering) -> u64 {
        self.exclusive(|word| word.fetch_add(value, Ordering::SeqCst))
    }

    /// Subtracts.
    pub fn fetch_sub(&self, value: u64, _: Ordering) -> u64 {
        self.exclusive(|word| word.fetch_sub(value, Ordering::SeqCst))
    }

    /// Removes bits.
    pub fn fetch_and(&self, value: u64, _: Ordering) -> u64 {
        self.exclusive(|word| word.fetch_and(value, Ordering::SeqCst))
    }

    /// Compares and exchanges.
    ///
    /// # Errors
    /// The present value, if it is not `current`.
    pub fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        _: Ordering,
        _: Ordering,
    ) -> Result<u64, u64> {
        self.exclusive(|word| {
            word.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst)
        })
    }
}

impl Drop for AtomicU64 {
    fn drop(&mut self) {
        BUFFERS.with_borrow_mut(|buffers| {
            for Buffer { stores, .. } in buffers {
                stores.retain(|store| store.to != &raw const self.0);
            }
        });
    }
}

/// A truth value.
#[derive(Debug)]
pub struct AtomicBool(AtomicU64);

impl AtomicBool {
    /// A truth value with the value `value`.
    #[must_use]
    pub const fn new(value: bool) -> Self {
        Self(AtomicU64::new(value as u64))
    }

    /// Loads.
    #[must_use]
    pub fn load(&self, order: Ordering) -> bool {
        self.0.load(order) != 0
    }

    /// Stores.
    pub fn store(&self, value: bool, order: Ordering) {
        self.0.store(value.into(), order);
    }

    /// Exchanges.
    pub fn swap(&self, value: bool, order: Ordering) -> bool {
        self.0.swap(value.into(), order) != 0
    }
}
