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
//! 5. It wakes the threads that sleep until this page arrives ([`super::sleepers`]).
//!
//! Replies on urgent channels are read by a waiting thread that finds no other reader
//! ([`super::urgent`]). A vCPU that waits alone reads its own reply. No other thread has to wake
//! between the fault and the guest. A vCPU whose channels are all lost waits on: the page stays
//! requested, and the supervisor repeats the request.

use super::collapse::Collapser;
use super::pages::ArrivingPages;
use super::shared::Letter;
use super::sleepers::{SLEEP_LIMIT, Sleepers, lock};
use super::stalls::Stalls;
use super::urgent::UrgentChannel;
use crate::clock::monotonic_ns;
use crate::error::MigrationError;
use crate::protocol_error::ProtocolError;
use crate::sync::{AtomicBool, AtomicU64, Ordering, fence};
use crate::wire::{PAGE_BYTES, UrgentKind, UrgentMessage};
use pageferry_addr::RamPage;
use pageferry_machine::{Machine, MachineError};
use pageferry_transport::channel::Spinner;
use pageferry_transport::{Mailbox, sleep_on};
use pageferry_userfault::{Claim, PageBitmap};
use rustix::event::{PollFd, PollFlags};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// The longest wait for memory of the host for a page that has come. A guest that needs the page
/// cannot run without it, so the VM is paused then.
const SHORTAGE_LIMIT: Duration = Duration::from_secs(60);

/// The longest wait for a reply that no vCPU waits for. The caller retries.
const FETCH_LIMIT: Duration = Duration::from_micros(500);

/// The shared state of a receiving VM.
pub(super) struct Core {
    pub(super) machine: Arc<dyn Machine>,
    pub(super) pages: ArrivingPages,
    pub(super) sleepers: Sleepers,
    pub(super) urgent: Box<[UrgentChannel]>,
    pub(super) letters: Arc<Mailbox<Letter>>,
    pub(super) stalls: Arc<Stalls>,
    /// Makes huge pages of the ranges of memory that are all here.
    collapser: OnceLock<Collapser>,
    /// Whether the source answers requests: it does so from SwitchOver on.
    answered: AtomicBool,
    /// Whether the source has handed the VM over.
    handed_over: AtomicBool,
    /// The reason why no page comes any more, once that is so.
    over: OnceLock<&'static str>,
    failure: Mutex<Option<MigrationError>>,
    /// Whether requests are to be repeated. Only the supervisor's thread touches it.
    repeat_due: AtomicBool,
    /// The number of pages that arrived on urgent channels.
    pub(super) urgent_pages: AtomicU64,
    /// The number of pages that were confirmed, on any channel.
    pub(super) confirmed_pages: AtomicU64,
}

impl Core {
    pub(super) fn new(
        machine: Arc<dyn Machine>,
        missing: Arc<PageBitmap>,
        letters: Arc<Mailbox<Letter>>,
        vcpus: usize,
        urgent_channels: u16,
    ) -> Result<Self, MigrationError> {
        let ram = machine.ram();
        let unit = ram.backing().page_size().pages() as usize;
        Ok(Self {
            pages: ArrivingPages::new(missing, ram.pages(), unit)?,
            machine,
            collapser: OnceLock::new(),
            sleepers: Sleepers::new(vcpus)?,
            stalls: Arc::new(Stalls::new(vcpus)),
            urgent: (0..urgent_channels).map(|_| UrgentChannel::new()).collect(),
            letters,
            answered: AtomicBool::new(false),
            handed_over: AtomicBool::new(false),
            over: OnceLock::new(),
            failure: Mutex::new(None),
            repeat_due: AtomicBool::new(false),
            urgent_pages: AtomicU64::new(0),
            confirmed_pages: AtomicU64::new(0),
        })
    }

    /// Ends the migration with `error`. The first error counts.
    pub(super) fn fail(&self, error: MigrationError) {
        lock(&self.failure).get_or_insert(error);
        if let Some(collapser) = self.collapser.get() {
            collapser.stop();
        }
        if self.end("the migration has failed") {
            // Threads that touch memory later fail too. The supervisor hears of it once.
            self.letters.post(Letter::Failed);
        }
    }

    /// Ends the wait of every thread for a page that has not come, now and later. The first reason
    /// counts; returns whether this is the first. A thread that waits looks at the page first, so
    /// it never misses one that is here.
    pub(super) fn end(&self, why: &'static str) -> bool {
        let first = self.over.set(why).is_ok();
        self.sleepers.wake_all();
        first
    }

    /// Whether no page comes any more.
    pub(super) fn is_over(&self) -> bool {
        self.over.get().is_some()
    }

    /// The error for a thread that waits for a page, if none comes any more.
    pub(super) fn check_goes_on(&self) -> Result<(), MigrationError> {
        match self.over.get() {
            None => Ok(()),
            Some(why) => Err(MigrationError::Internal((*why).to_owned())),
        }
    }

    pub(super) fn take_failure(&self) -> Option<MigrationError> {
        lock(&self.failure).take()
    }

    /// The size of memory in pages.
    pub(super) fn page_count(&self) -> u64 {
        self.machine.ram().pages()
    }

    /// Whether bytes that came before the switch-over stay in place, also of missing pages. Then
    /// the source may confirm such pages.
    pub(super) fn keeps_bytes(&self) -> bool {
        self.machine.receives_in_place()
    }

    /// Requests `page` from the source without waiting, on the urgent channel `prefer` or the next
    /// that is open. If none is open, or before SwitchOver, the page stays requested: see
    /// [`Self::repeat_requests`].
    pub(super) fn request(&self, page: RamPage, prefer: usize) {
        // The caller has claimed the page. If this thread misses the begin, `begin_requests` finds
        // the claim.
        fence(Ordering::SeqCst);
        if !self.answered.load(Ordering::SeqCst) {
            return;
        }
        let all = self.urgent.len();
        let _ = (0..all).any(|next| self.urgent[(prefer + next) % all].request(page));
    }

    /// SwitchOver has come, so the source answers requests. Sends those of VMM threads that did not
    /// wait for that.
    pub(super) fn begin_requests(&self) {
        self.answered.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.repeat_requests();
    }

    /// The source has handed the VM over.
    pub(super) fn hand_over(&self) {
        self.handed_over.store(true, Ordering::SeqCst);
    }

    /// Waits until the source has handed the VM over. Returns false if `stop` returned true first.
    pub(super) fn wait_for_go(&self, stop: &dyn Fn() -> bool) -> bool {
        while !self.handed_over.load(Ordering::SeqCst) {
            if stop() {
                return false;
            }
            std::thread::park_timeout(SLEEP_LIMIT);
        }
        true
    }

    /// Requests again every page that was requested and has not come. The source answers each of
    /// its unsent pages once. Only channels that have taken all earlier requests get these: so a
    /// source that wants them again and again, and reads none, has them once. If there is no such
    /// channel now, [`Self::repeat_if_due`] repeats them later.
    pub(super) fn repeat_requests(&self) {
        let free = self.urgent.iter().filter(|channel| channel.is_free());
        let free: Vec<&UrgentChannel> = free.collect();
        self.repeat_due.store(free.is_empty(), Ordering::Relaxed);
        if free.is_empty() || !self.answered.load(Ordering::SeqCst) {
            return;
        }
        let mut from = 0;
        while let Some(page) = self.pages.states.next_outstanding(from) {
            let _ =
                (0..free.len()).any(|next| free[(page.index() + next) % free.len()].request(page));
            from = page.index() + 1;
        }
        self.pump();
    }

    /// Repeats the requests if that is due since no channel took them.
    pub(super) fn repeat_if_due(&self) {
        if self.repeat_due.load(Ordering::Relaxed) {
            self.repeat_requests();
        }
    }

    /// Does a step of the machine for pages of a VM that may run here and nowhere else. While the
    /// host lacks memory for it, tries again until no page comes any more, or for
    /// [`SHORTAGE_LIMIT`].
    pub(super) fn persist(
        &self,
        step: impl Fn() -> Result<(), MachineError>,
    ) -> Result<(), MigrationError> {
        let mut since = None;
        loop {
            match step() {
                Err(MachineError::Os { what, source })
                    if source.raw_os_error() == Some(libc::ENOMEM)
                        && since.is_none_or(|at: Instant| at.elapsed() < SHORTAGE_LIMIT)
                        && !self.is_over() =>
                {
                    since.get_or_insert_with(|| {
                        tracing::warn!(%source, "{what}: trying again");
                        Instant::now()
                    });
                    std::thread::sleep(SLEEP_LIMIT);
                }
                done => return Ok(done?),
            }
        }
    }

    /// Makes pages visible to vCPUs. Their bytes are in place and verified.
    pub(super) fn arrived(&self, first: RamPage, pages: u64) -> Result<(), MigrationError> {
        self.persist(|| self.machine.install(first, pages))?;
        self.made_present(first, pages);
        Ok(())
    }

    /// Marks installed pages as present, and wakes their waiters.
    pub(super) fn made_present(&self, first: RamPage, pages: u64) {
        if self.pages.arrive(first, pages) {
            self.letters.post(Letter::AllHere);
        }
        self.close_stalls(first, pages);
        self.sleepers.arrived(first.0..first.0 + pages);
    }

    /// Closes the stalls on pages that are present now. A stall on a huge page lasts until its last
    /// piece is present.
    fn close_stalls(&self, first: RamPage, pages: u64) {
        if self.pages.unit == 1 {
            return self.stalls.close(first, pages);
        }
        // Of two threads that bring the last pieces, one must find both bits clear.
        fence(Ordering::SeqCst);
        let end = (first.0 + pages) as usize;
        let mut at = first.index();
        while at < end && self.stalls.any_open() {
            let whole = self.pages.mapped_with(RamPage(at as u64));
            at = whole.end;
            if !self.pages.is_any_missing(whole.clone()) {
                self.stalls
                    .close(RamPage(whole.start as u64), whole.len() as u64);
            }
        }
    }

    /// Maps every present page of `range` (RAM indices).
    pub(super) fn install_present(
        &self,
        range: std::ops::Range<u64>,
    ) -> Result<(), MigrationError> {
        let missing = self.pages.states.missing();
        let end = range.end as usize;
        let mut at = range.start as usize;
        while let Some(start) = missing.next_clear(at).filter(|start| *start < end) {
            at = missing.next_set(start).unwrap_or(end).min(end);
            let pages = (at - start) as u64;
            self.persist(|| self.machine.install(RamPage(start as u64), pages))?;
        }
        Ok(())
    }

    /// Makes a page present whose bytes are here already, as an urgent channel says.
    fn confirm_urgent(&self, message: &UrgentMessage) -> Result<(), MigrationError> {
        if !self.keeps_bytes() {
            return Err(ProtocolError::CannotConfirm.into());
        }
        // Before the bytes are read: a page that is present has other writers.
        self.pages.begin_placing(message.page, 1)?;
        // SAFETY: the page is missing, and this thread has its `placing` bit. So no thread writes
        // it. `alias` gives 4096 mapped bytes, which live as long as the machine.
        let bytes = unsafe {
            let start = self.machine.ram().unchecked().alias(message.page, 1);
            &*start.cast_const().cast::<[u8; PAGE_BYTES]>()
        };
        if let Err(error) = message.verify_page(bytes) {
            self.pages.end_placing(message.page, 1);
            return Err(error.into());
        }
        self.confirmed_pages.fetch_add(1, Ordering::Relaxed);
        self.urgent_pages.fetch_add(1, Ordering::Relaxed);
        self.persist(|| self.machine.install(message.page, 1))?;
        self.stalls.marks.placed(message.page, monotonic_ns());
        self.made_present(message.page, 1);
        Ok(())
    }

    /// Places one page that arrived on an urgent channel.
    pub(super) fn place_urgent(
        &self,
        message: &UrgentMessage,
        bytes: Option<&[u8; PAGE_BYTES]>,
    ) -> Result<(), MigrationError> {
        const ZERO: [u8; PAGE_BYTES] = [0; PAGE_BYTES];
        if message.kind == UrgentKind::Confirmed {
            return self.confirm_urgent(message);
        }
        if let Some(bytes) = bytes {
            message.verify_page(bytes)?;
        }
        self.pages.begin_placing(message.page, 1)?;
        // This comes before the missing bit is cleared (release). A thread that finds no page
        // missing (acquire) also finds the count.
        self.urgent_pages.fetch_add(1, Ordering::Relaxed);
        let bytes = bytes.unwrap_or(&ZERO);
        if self.machine.receives_in_place() {
            // SAFETY: the page is missing, so neither vCPUs nor the VMM's own accesses reach it.
            // This thread alone places it, since it has the page's `placing` bit. `alias` gives
            // 4096 mapped bytes, which do not overlap a private buffer.
            unsafe {
                let to = self.machine.ram().unchecked().alias(message.page, 1);
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, PAGE_BYTES);
            }
            self.persist(|| self.machine.install(message.page, 1))?;
        } else {
            self.persist(|| self.machine.install_copy(message.page, bytes))?;
        }
        self.stalls.marks.placed(message.page, monotonic_ns());
        self.made_present(message.page, 1);
        Ok(())
    }

    /// Sends queued requests and reads the replies that have arrived, unless other threads do.
    /// Returns the number of pages.
    pub(super) fn pump(&self) -> usize {
        self.urgent.iter().map(|channel| channel.pump(self)).sum()
    }

    /// Sleeps on the thread that owns `slot` until `page` or a reply may have arrived: see
    /// [`Sleepers::sleep`].
    pub(super) fn sleep(&self, slot: Option<usize>, page: RamPage, ready: impl Fn() -> bool) {
        self.sleepers
            .sleep(slot, page, ready, |bell| self.poll(bell, true));
    }

    /// Sleeps until `fd` is readable, or [`SLEEP_LIMIT`] is over. With `replies` it also polls the
    /// urgent channels.
    pub(super) fn poll(&self, fd: BorrowedFd<'_>, replies: bool) {
        let watched = if replies { &self.urgent[..] } else { &[] };
        let connections: Vec<_> = watched
            .iter()
            .filter_map(UrgentChannel::connection)
            .collect();
        let mut fds = Vec::with_capacity(1 + connections.len());
        fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        fds.extend(
            connections
                .iter()
                .map(|connection| PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)),
        );
        sleep_on(&mut fds, SLEEP_LIMIT);
    }

    /// Requests a page that no vCPU waits for. Reads replies until the page arrives, for at most
    /// [`FETCH_LIMIT`].
    pub(super) fn fetch(&self, page: RamPage) {
        if self.pages.states.claim(page) == Claim::Mine {
            self.request(page, 0);
        }
        let spinner = Spinner::new(FETCH_LIMIT);
        while self.pages.states.is_missing(page) && spinner.spin() {
            self.pump();
        }
    }

    /// Begins to make huge pages of the ranges of memory whose pages are all here.
    pub(super) fn collapse(&self) {
        self.collapser
            .get_or_init(|| Collapser::start(&self.machine));
    }
}
