//! A lock that is handed over in the order in which threads asked for it: what the serialised MMU
//! takes around every fault.
//!
//! A ticket lock, as the kernel's spin locks were and with the order its queued ones have. A thread
//! spins while it waits, and yields its processor from time to time: with more threads than
//! processors the next in the order may have none, and then everybody waits for the scheduler.
//! Measure it with a processor for each thread.

use std::sync::atomic::{AtomicU32, Ordering};

/// The lock. Its words have a cache line each: asking for it does not take the line away from the
/// one who lets it go, as with the kernel's queued locks, whose waiters are in a line of their own.
#[derive(Debug, Default)]
pub(crate) struct Ticket {
    next: Line,
    serving: Line,
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Line(AtomicU32);

/// Lets the next one in when it is dropped.
pub(crate) struct Held<'a> {
    lock: &'a Ticket,
    ticket: u32,
}

impl Held<'_> {
    /// How many had the lock before, modulo 2^32.
    pub(crate) const fn ticket(&self) -> u32 {
        self.ticket
    }
}

impl Ticket {
    #[inline]
    pub(crate) fn lock(&self) -> Held<'_> {
        // Orders nothing: whoever waits acquires below.
        let mine = self.next.0.fetch_add(1, Ordering::Relaxed);
        let mut spins = 0_u32;
        // Acquire: what was done under the lock before happens before what is done now.
        while self.serving.0.load(Ordering::Acquire) != mine {
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(256) {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        Held {
            lock: self,
            ticket: mine,
        }
    }

    /// Whether somebody holds it; true for a moment only.
    #[cfg(test)]
    pub(crate) fn is_held(&self) -> bool {
        self.next.0.load(Ordering::Relaxed) != self.serving.0.load(Ordering::Relaxed)
    }
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        // Only the holder changes this word, and its ticket is what the word says now.
        self.lock
            .serving
            .0
            .store(self.ticket.wrapping_add(1), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn only_one_thread_is_inside() {
        let (lock, count) = (Ticket::default(), AtomicU64::new(0));
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
        let lock = Ticket::default();
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = lock.lock();
            panic!("inside");
        }));
        assert!(caught.is_err());
        assert_eq!(lock.lock().ticket(), 1);
        assert_eq!(lock.lock().ticket(), 2);
    }
}
