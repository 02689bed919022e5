//! The threads that wait for missing pages: vCPUs, and threads of the VMM.
//!
//! **Guarantee.** A thread that sleeps for a page is woken when the page has arrived, by any
//! thread. While threads sleep, one of them polls the urgent channels.
//!
//! **Mechanism.** Each sleeper announces its page ([`Waiters`]). The one that polls is woken by a
//! [`Bell`], the others by unparking. A wake-up that is lost costs [`SLEEP_LIMIT`].

use crate::error::MigrationError;
use crate::sync::{AtomicU64, Ordering};
use pageferry_addr::RamPage;
use pageferry_transport::Bell;
use pageferry_userfault::Waiters;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::Duration;

/// The longest sleep of a waiter before it checks its conditions again. It guards against a lost
/// wake-up. It also bounds the delay until a soft vCPU that waits for a page notices a pause.
pub(super) const SLEEP_LIMIT: Duration = Duration::from_millis(5);

/// The most VMM threads that an arrival wakes. More than these look again every [`SLEEP_LIMIT`].
const VMM_SLOTS: usize = 8;

/// The threads that wait, by slot.
pub(super) struct Sleepers {
    waiters: Waiters,
    /// The vCPUs' threads.
    threads: Box<[OnceLock<Thread>]>,
    /// VMM threads that wait for pages now. Their slots follow those of the vCPUs.
    vmm: [Mutex<Option<Thread>>; VMM_SLOTS],
    /// The slot + 1 of the thread that sleeps on the urgent channels, or 0.
    reader: AtomicU64,
    wake_event: Bell,
    /// The number of threads that wait for missing pages.
    pub(super) waiting: AtomicU64,
    /// The number of cores that this process may use.
    cores: u64,
}

impl Sleepers {
    pub(super) fn new(vcpus: usize) -> Result<Self, MigrationError> {
        Ok(Self {
            waiters: Waiters::new(vcpus + VMM_SLOTS),
            threads: (0..vcpus).map(|_| OnceLock::new()).collect(),
            vmm: Default::default(),
            reader: AtomicU64::new(0),
            wake_event: Bell::new().map_err(MigrationError::eventfd)?,
            waiting: AtomicU64::new(0),
            cores: std::thread::available_parallelism().map_or(1, usize::from) as u64,
        })
    }

    /// Whether more threads wait than there are cores. Then a thread that spins takes time from
    /// those whose pages have come.
    pub(super) fn is_crowded(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > self.cores
    }

    /// Wakes the threads that sleep for these pages, which have arrived.
    pub(super) fn arrived(&self, pages: Range<u64>) {
        // A spinner needs no wake-up.
        self.waiters.arrived(pages, |slot| self.wake(slot));
    }

    /// Makes the calling vCPU thread the owner of `slot`, for wake-ups.
    pub(super) fn register(&self, slot: usize) {
        self.threads[slot].get_or_init(|| {
            crate::latency::prefer_short_slices();
            std::thread::current()
        });
    }

    fn wake(&self, slot: usize) {
        if self.reader.load(Ordering::SeqCst) == slot as u64 + 1 {
            self.wake_event.ring();
        }
        if let Some(thread) = self.threads.get(slot) {
            thread.get().map(Thread::unpark);
        } else if let Some(thread) = &*lock(&self.vmm[slot - self.threads.len()]) {
            thread.unpark();
        }
    }

    /// Calls `wait` with a slot for the calling VMM thread, or without one if all are taken.
    pub(super) fn with_vmm_slot<T>(&self, wait: impl FnOnce(Option<usize>) -> T) -> T {
        let free = self.vmm.iter().position(|slot| {
            let mut slot = lock(slot);
            let free = slot.is_none();
            if free {
                *slot = Some(std::thread::current());
            }
            free
        });
        let result = wait(free.map(|index| self.threads.len() + index));
        if let Some(index) = free {
            *lock(&self.vmm[index]) = None;
        }
        result
    }

    /// Wakes all sleepers, for a pause, a failure or the end.
    pub(super) fn wake_all(&self) {
        self.wake_event.ring();
        for thread in self.threads.iter().filter_map(OnceLock::get) {
            thread.unpark();
        }
        for thread in &self.vmm {
            lock(thread).as_ref().map(Thread::unpark);
        }
    }

    /// Sleeps on the thread that owns `slot` until `page` may have arrived, a reply may have
    /// arrived, or [`SLEEP_LIMIT`] is over. Calls `ready` once more before it sleeps. `poll` sleeps
    /// until a channel or the descriptor is readable.
    pub(super) fn sleep(
        &self,
        slot: Option<usize>,
        page: RamPage,
        ready: impl Fn() -> bool,
        poll: impl FnOnce(BorrowedFd<'_>),
    ) {
        let Some(slot) = slot else {
            return std::thread::sleep(SLEEP_LIMIT);
        };
        self.waiters.announce(slot, page.0);
        let me = slot as u64 + 1;
        // One of the sleepers polls the channels. It wakes the others.
        let reads = self
            .reader
            .compare_exchange(0, me, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok();
        let sleeps = !ready();
        if sleeps && reads {
            poll(self.wake_event.as_fd());
        } else if sleeps {
            std::thread::park_timeout(SLEEP_LIMIT);
        }
        self.waiters.withdraw(slot);
        if reads {
            // Only the signalled thread empties the eventfd, so that no other thread takes its
            // signal.
            self.wake_event.hush();
            self.reader.store(0, Ordering::SeqCst);
            // A thread that still sleeps must poll the channels now.
            if let Some((next_reader, _)) = self.waiters.asleep().next() {
                self.wake(next_reader);
            }
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
