#![expect(unsafe_code, reason = "copies verified bytes into missing guest pages")]
//! The state that the threads of a receiving VM share: waiting vCPUs and VMM threads, the fault
//! threads, and the reader of the stream.
//!
//! **Guarantee.** A page's bytes are verified before any vCPU can see them. Each page is placed at
//! most once, by one thread. A waiting vCPU continues as soon as its page is placed, by any thread.
//!
//! **Mechanism.** The page states are the one truth. A thread places a page in these steps:
//!
//! 1. It takes the page's `placing` bit. A second writer of the same page is refused before it can
//!    touch memory. Only a broken peer causes one.
//! 2. It writes and verifies the bytes.
//! 3. It calls `Machine::install`.
//! 4. It clears the missing bit by `PageStates::arrive` (release).
//! 5. It wakes the threads that sleep until this page arrives ([`Waiters`]).
//!
//! Replies on the urgent connection are read by a waiting thread that finds no other reader. The
//! mutex `urgent` is only ever tried. A vCPU that waits alone reads its own reply. No other thread
//! has to wake between the fault and the guest.

use super::collapse::Collapser;
use super::stalls::Stalls;
use super::urgent::UrgentReader;
use crate::channel::Spinner;
use crate::error::MigrationError;
use crate::link::UrgentLink;
use crate::sync::{AtomicBool, AtomicU64, Ordering, fence};
use crate::wire::{PAGE_BYTES, UrgentMessage, WireError};
use pageferry_addr::RamPage;
use pageferry_machine::Machine;
use pageferry_userfault::{Claim, PageBitmap, PageStates, Waiters};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::Thread;
use std::time::Duration;

/// The longest sleep of a waiter before it checks its conditions again. It guards against a lost
/// wake-up. It also bounds the delay until a soft vCPU that waits for a page notices a pause.
const SLEEP_LIMIT: Duration = Duration::from_millis(5);

/// The longest wait for a reply that no vCPU waits for. The caller retries.
const FETCH_LIMIT: Duration = Duration::from_micros(500);

/// The most VMM threads that an arrival wakes. More than these look again every [`SLEEP_LIMIT`].
const VMM_SLOTS: usize = 8;

/// The shared state of a receiving VM.
pub(super) struct Core {
    pub(super) machine: Arc<dyn Machine>,
    pub(super) states: PageStates,
    pub(super) link: UrgentLink,
    pub(super) stalls: Stalls,
    /// The number of pages that the host maps together.
    unit: usize,
    /// Makes huge pages of the ranges of memory that are all here.
    collapser: OnceLock<Collapser>,
    placing: PageBitmap,
    urgent: Mutex<UrgentReader>,
    waiters: Waiters,
    /// The vCPUs' threads, by slot.
    threads: Box<[OnceLock<Thread>]>,
    /// VMM threads that wait for pages now. Their slots follow those of the vCPUs.
    vmm: [Mutex<Option<Thread>>; VMM_SLOTS],
    /// The slot + 1 of the thread that sleeps on the urgent connection, or 0.
    reader: AtomicU64,
    wake_event: OwnedFd,
    failed: AtomicBool,
    failure: Mutex<Option<MigrationError>>,
    /// The number of pages that arrived on the urgent connection.
    pub(super) urgent_pages: AtomicU64,
}

impl Core {
    pub(super) fn new(
        machine: Arc<dyn Machine>,
        missing: Arc<PageBitmap>,
        link: UrgentLink,
        vcpus: usize,
    ) -> Result<Self, MigrationError> {
        let pages = machine.ram().pages();
        let unit = machine.ram().backing().page_size().pages() as usize;
        let wake_event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| MigrationError::os("cannot create an eventfd", e))?;
        Ok(Self {
            machine,
            unit,
            collapser: OnceLock::new(),
            states: PageStates::try_new(missing)?,
            stalls: Stalls::new(vcpus),
            placing: PageBitmap::try_new(pages as usize)?,
            urgent: Mutex::new(UrgentReader::new(pages)),
            waiters: Waiters::new(vcpus + VMM_SLOTS),
            threads: (0..vcpus).map(|_| OnceLock::new()).collect(),
            vmm: Default::default(),
            reader: AtomicU64::new(0),
            wake_event,
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            urgent_pages: AtomicU64::new(0),
            link,
        })
    }

    /// Ends the migration with `error`. The first error counts.
    pub(super) fn fail(&self, error: MigrationError) {
        lock(&self.failure).get_or_insert(error);
        self.failed.store(true, Ordering::Release);
        if let Some(collapser) = self.collapser.get() {
            collapser.stop();
        }
        self.wake_all();
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(super) fn take_failure(&self) -> Option<MigrationError> {
        lock(&self.failure).take()
    }

    /// Requests `page` from the source, by one write and without a lock. Each vCPU and each fault
    /// event has at most one request in flight, each VMM thread a few, and each fault thread a
    /// window of them for huge pages (`pieces`). So the socket's buffer has room.
    pub(super) fn request(&self, page: RamPage) -> Result<(), MigrationError> {
        self.link.send_small(&UrgentMessage::request(page))
    }

    /// Takes the `placing` bits of `pages` pages from `first`.
    pub(super) fn begin_placing(&self, first: RamPage, pages: u64) -> Result<(), MigrationError> {
        let range = first.index()..(first.0 + pages) as usize;
        let missing = self.states.missing().count_range(range.clone());
        if missing as u64 == pages && self.placing.set_range(range) as u64 == pages {
            return Ok(());
        }
        Err(MigrationError::Peer(format!(
            "it sent page {first} (or one of the {pages} from there) that was not missing, or sent it twice"
        )))
    }

    /// Makes pages visible to vCPUs. Their bytes are in place and verified.
    pub(super) fn arrived(&self, first: RamPage, pages: u64) -> Result<(), MigrationError> {
        self.machine.install(first, pages)?;
        self.made_present(first, pages);
        Ok(())
    }

    /// Marks installed pages as present, and wakes their waiters.
    pub(super) fn made_present(&self, first: RamPage, pages: u64) {
        // The result is not needed: `Waiters` knows the sleepers, and a spinner needs no wake-up.
        let _ = self.states.arrive(first, pages as usize);
        self.close_stalls(first, pages);
        self.waiters
            .arrived(first.0..first.0 + pages, |slot| self.wake(slot));
    }

    /// Closes the stalls on pages that are present now. A stall on a huge page lasts until its last
    /// piece is present.
    fn close_stalls(&self, first: RamPage, pages: u64) {
        if self.unit == 1 {
            return self.stalls.close(first, pages);
        }
        // Of two threads that bring the last pieces, one must find both bits clear.
        fence(Ordering::SeqCst);
        let end = (first.0 + pages) as usize;
        let mut at = first.index();
        while at < end && self.stalls.any_open() {
            let whole = self.mapped_with(RamPage(at as u64));
            at = whole.end;
            if !self.is_any_missing(whole.clone()) {
                self.stalls
                    .close(RamPage(whole.start as u64), whole.len() as u64);
            }
        }
    }

    /// The pages that are mapped together with `page`, and only together.
    pub(super) fn mapped_with(&self, page: RamPage) -> std::ops::Range<usize> {
        let start = page.index() - page.index() % self.unit;
        start..start + self.unit
    }

    /// Whether a page of `range` is missing.
    pub(super) fn is_any_missing(&self, range: std::ops::Range<usize>) -> bool {
        let first = self.states.missing().next_set(range.start);
        first.is_some_and(|first| first < range.end)
    }

    /// Maps every present page of `range` (RAM indices).
    pub(super) fn install_present(
        &self,
        range: std::ops::Range<u64>,
    ) -> Result<(), MigrationError> {
        let missing = self.states.missing();
        let end = range.end as usize;
        let mut at = range.start as usize;
        while let Some(start) = missing.next_clear(at).filter(|start| *start < end) {
            at = missing.next_set(start).unwrap_or(end).min(end);
            self.machine
                .install(RamPage(start as u64), (at - start) as u64)?;
        }
        Ok(())
    }

    /// Places one page that arrived on the urgent connection.
    fn place_urgent(
        &self,
        message: &UrgentMessage,
        bytes: Option<&[u8; PAGE_BYTES]>,
    ) -> Result<(), MigrationError> {
        const ZERO: [u8; PAGE_BYTES] = [0; PAGE_BYTES];
        if let Some(bytes) = bytes {
            message.verify_page(bytes)?;
        }
        self.begin_placing(message.page, 1)?;
        // This comes before the missing bit is cleared (release). A thread that finds no page
        // missing (acquire) also finds the count.
        self.urgent_pages.fetch_add(1, Ordering::Relaxed);
        let bytes = bytes.unwrap_or(&ZERO);
        if self.machine.receives_in_place() {
            // SAFETY: the page is missing, so neither vCPUs nor the VMM's own accesses reach it. This
            // thread alone places it, since it has the page's `placing` bit. `alias` gives 4096
            // mapped bytes, which do not overlap a private buffer.
            unsafe {
                let to = self.machine.ram().unchecked().alias(message.page, 1);
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, PAGE_BYTES);
            }
            self.arrived(message.page, 1)?;
        } else {
            self.machine.install_copy(message.page, bytes)?;
            self.made_present(message.page, 1);
        }
        Ok(())
    }

    /// Reads the replies that have arrived, unless another thread does. Returns the number of
    /// pages.
    pub(super) fn pump(&self) -> Result<usize, MigrationError> {
        let mut reader = match self.urgent.try_lock() {
            Ok(reader) => reader,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(0),
        };
        reader.pump(&self.link, |message, bytes| {
            self.place_urgent(message, bytes)
        })
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
            self.signal_reader();
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

    fn signal_reader(&self) {
        // A full eventfd is readable too.
        let _ = rustix::io::write(&self.wake_event, &1u64.to_ne_bytes());
    }

    /// Wakes all sleepers, for a pause, a failure or the end.
    pub(super) fn wake_all(&self) {
        self.signal_reader();
        for thread in self.threads.iter().filter_map(OnceLock::get) {
            thread.unpark();
        }
        for thread in &self.vmm {
            lock(thread).as_ref().map(Thread::unpark);
        }
    }

    /// Sleeps on the thread that owns `slot` until `page` may have arrived, a reply may have
    /// arrived, or [`SLEEP_LIMIT`] is over. Calls `ready` once more before it sleeps.
    pub(super) fn sleep(
        &self,
        slot: Option<usize>,
        page: RamPage,
        ready: impl Fn() -> bool,
    ) -> Result<(), MigrationError> {
        let Some(slot) = slot else {
            std::thread::sleep(SLEEP_LIMIT);
            return Ok(());
        };
        self.waiters.announce(slot, page.0);
        let me = slot as u64 + 1;
        // One of the sleepers polls the connection. It wakes the others.
        let reads = self
            .reader
            .compare_exchange(0, me, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok();
        let slept = if ready() {
            Ok(())
        } else if reads {
            self.poll(self.wake_event.as_fd(), true)
        } else {
            std::thread::park_timeout(SLEEP_LIMIT);
            Ok(())
        };
        self.waiters.withdraw(slot);
        if reads {
            // Only the signalled thread empties the eventfd, so that no other thread takes its
            // signal.
            let _ = rustix::io::read(&self.wake_event, &mut [0; 8]);
            self.reader.store(0, Ordering::SeqCst);
            // A thread that still sleeps must poll the connection now.
            if let Some((next_reader, _)) = self.waiters.asleep().next() {
                self.wake(next_reader);
            }
        }
        slept
    }

    /// Sleeps until `fd` is readable, or [`SLEEP_LIMIT`] is over. With `replies` it also polls the
    /// urgent connection.
    pub(super) fn poll(&self, fd: BorrowedFd<'_>, replies: bool) -> Result<(), MigrationError> {
        let mut fds = [
            PollFd::from_borrowed_fd(fd, PollFlags::IN),
            PollFd::from_borrowed_fd(self.link.fd(), PollFlags::IN),
        ];
        let nap = Timespec {
            tv_sec: 0,
            tv_nsec: SLEEP_LIMIT.subsec_nanos().into(),
        };
        let watched = if replies { &mut fds[..] } else { &mut fds[..1] };
        match poll(watched, Some(&nap)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(MigrationError::os("cannot wait for pages", e)),
        }
    }

    /// Requests a page that no vCPU waits for. Reads replies until the page arrives, for at most
    /// [`FETCH_LIMIT`].
    pub(super) fn fetch(&self, page: RamPage) {
        if self.states.claim(page) == Claim::Mine
            && let Err(error) = self.request(page)
        {
            return self.fail(error);
        }
        let spinner = Spinner::new(FETCH_LIMIT);
        while self.states.is_missing(page) && spinner.spin() {
            if let Err(error) = self.pump() {
                return self.fail(error);
            }
        }
    }

    /// Begins to make huge pages of the ranges of memory whose pages are all here.
    pub(super) fn collapse(&self) {
        self.collapser
            .get_or_init(|| Collapser::start(&self.machine));
    }

    /// Returns the number of missing pages.
    pub(super) fn missing(&self) -> u64 {
        self.states.missing().count() as u64
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the error for a reply of a kind that a source never sends.
pub(super) fn not_a_reply(kind: u8) -> MigrationError {
    MigrationError::Wire(WireError::BadField {
        what: "urgent reply",
        field: "kind",
        value: kind.into(),
    })
}
