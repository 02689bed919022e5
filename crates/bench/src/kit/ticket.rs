//! A lock that is handed over in the order of arrival. The serialised MMU holds it around every
//! fault.
//!
//! It is a ticket lock, as the kernel's spin locks were; queued spin locks keep the same order. A
//! waiting thread spins, and yields its core from time to time. If there are more threads than
//! cores, the next thread in the order may have no core, and all threads wait for the scheduler. So
//! measure it with a core for each thread.

use super::CacheLine;
use std::sync::atomic::{AtomicU32, Ordering};

/// The lock. Each of its words has a cache line. So a thread that asks for the lock does not take
/// the line away from the holder. In the kernel's queued locks, too, each waiter has its own line.
#[derive(Debug, Default)]
pub(crate) struct TicketLock {
    next: CacheLine<AtomicU32>,
    serving: CacheLine<AtomicU32>,
}

/// Releases the lock to the next waiter when it is dropped.
pub(crate) struct TicketGuard<'a> {
    lock: &'a TicketLock,
    ticket: u32,
}

impl TicketGuard<'_> {
    /// The number of earlier holders, modulo 2^32.
    pub(crate) const fn ticket(&self) -> u32 {
        self.ticket
    }
}

impl TicketLock {
    #[inline]
    pub(crate) fn lock(&self) -> TicketGuard<'_> {
        // Relaxed: the load below acquires.
        let mine = self.next.fetch_add(1, Ordering::Relaxed);
        let mut spins = 0_u32;
        // Acquire: pairs with the release store of the previous holder. Its work happens before
        // ours.
        while self.serving.load(Ordering::Acquire) != mine {
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(256) {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        TicketGuard {
            lock: self,
            ticket: mine,
        }
    }

    /// Whether a thread holds the lock. The answer may be out of date when it is returned.
    #[cfg(test)]
    pub(crate) fn is_held(&self) -> bool {
        self.next.load(Ordering::Relaxed) != self.serving.load(Ordering::Relaxed)
    }
}

impl Drop for TicketGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        // Only the holder changes this word, and its value is the holder's ticket.
        let next = self.ticket.wrapping_add(1);
        self.lock.serving.store(next, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn only_one_thread_is_inside() {
        let (lock, count) = (TicketLock::default(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..5000 {
                        let _held = lock.lock();
                        // Not one operation: two threads inside would lose an increment.
                        let seen = count.load(Ordering::Relaxed);
                        count.store(seen + 1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(count.load(Ordering::Relaxed), 15_000);
    }

    #[test]
    fn a_panic_inside_lets_the_next_one_in() {
        let lock = TicketLock::default();
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = lock.lock();
            panic!("inside");
        }));
        assert!(caught.is_err());
        assert_eq!(lock.lock().ticket(), 1);
        assert_eq!(lock.lock().ticket(), 2);
    }
}
