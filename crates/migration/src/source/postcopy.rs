#![expect(unsafe_code, reason = "sends the pages of a stopped VM without a copy")]
//! Post-copy: the guest runs at the destination, and the source sends its missing pages.
//!
//! Two threads share only [`UnsentPages`]. The urgent thread spins for requests before it sleeps,
//! since a wake-up takes ten times as long. It answers each request by one vectored write. The
//! calling thread pushes the other pages.

use super::pages::{StoppedSender, is_zero};
use super::unsent::UnsentPages;
use super::{Source, SourceConfig};
use crate::clock::monotonic_ns;
use crate::error::MigrationError;
use crate::link::{REASON_LIMIT, UrgentLink, never};
use crate::phase::Phase;
use crate::sync::{AtomicU64, Ordering};
use crate::wire::{DrainCounts, Frame, UrgentKind, urgent_reply_page, urgent_reply_zero};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_machine::GuestRam;
use pageferry_userfault::PageBitmap;
use std::io::IoSlice;
use std::time::{Duration, Instant};

/// The number of frames between two progress reports.
const REPORT_EVERY: u64 = 16;
/// The interval at which a delayed push counts the unsent pages.
const QUIET_POLL: Duration = Duration::from_millis(20);

impl Source<'_> {
    /// Sends every missing page and waits for the confirmation of all.
    pub(super) fn postcopy(
        &mut self,
        urgent: &UrgentLink,
        missing: PageBitmap,
    ) -> Result<(), MigrationError> {
        self.link.send(&Frame::RunningAck)?;
        self.enter(Phase::Postcopy);
        let ram = std::sync::Arc::clone(self.vm.machine.ram());
        let unsent = UnsentPages::new(missing);
        let urgent_bytes = AtomicU64::new(0);
        let finished = std::thread::scope(|scope| {
            let answers = std::thread::Builder::new()
                .name("pf-urgent".into())
                .spawn_scoped(scope, || answer(urgent, &ram, &unsent, &urgent_bytes))
                .map_err(|e| MigrationError::os("cannot start the urgent thread", e))?;
            let drained = self.push_and_drain(&ram, &unsent, &|| answers.is_finished());
            // Ends the urgent thread in every wait.
            urgent.shutdown();
            let answered = answers
                .join()
                .map_err(|_| MigrationError::Internal("the urgent thread panicked".into()))?;
            match (drained, answered) {
                (Ok(()), _) => Ok(()),
                // The urgent connection failed first and caused the end of the stream.
                (Err(_), Err(error)) if !error.is_lost() => Err(error),
                (Err(error), _) => Err(error),
            }
        });
        self.report.page_bytes += urgent_bytes.load(Ordering::Relaxed);
        finished
    }

    fn push_and_drain(
        &mut self,
        ram: &GuestRam,
        unsent: &UnsentPages,
        urgent_ended: &dyn Fn() -> bool,
    ) -> Result<(), MigrationError> {
        let total = self.report.missing_at_start;
        // SAFETY: (1) `migrate` resumes the guest only before `Running` arrives, or after post-copy
        // has failed and its threads have ended. So it does not while there are senders. (2)
        // The VMM's own writes are refused (`frozen`). Migration does not write the source's memory.
        let mut sender = unsafe { StoppedSender::new(ram) };
        if !self.config.push_background {
            wait_for_quiet(unsent, urgent_ended);
        }
        let began_ns = monotonic_ns();
        self.push(&mut sender, unsent, total, urgent_ended)?;
        let (background, zero) = (sender.data_pages(), sender.zero_pages());
        self.report.background_ns = monotonic_ns() - began_ns;
        self.report.background_bytes = background * PAGE_SIZE;
        self.report.page_bytes += background * PAGE_SIZE;
        let counts = DrainCounts {
            urgent: total - background - zero,
            background,
            zero,
        };
        self.report.pages.urgent = counts.urgent;
        self.report.pages.background = background;
        self.report.pages.zero += zero;

        self.enter(Phase::Completion);
        self.link.send(&Frame::DrainEnd(counts))?;
        // The destination keeps the urgent connection open until it has confirmed. An earlier end
        // is a failure.
        let answer = match self.link.receive(self.config.answer_limit, urgent_ended) {
            Err(MigrationError::Cancelled) => self.receive_before_urgent_ended(),
            answer => answer,
        };
        match answer {
            Ok(Frame::DrainAck(taken)) if taken == counts => {}
            Ok(Frame::DrainAck(taken)) => {
                return Err(MigrationError::Peer(format!(
                    "it confirmed {taken} where {counts} were sent"
                )));
            }
            Ok(other) => return Err(self.link.unexpected("DrainAck", &other)),
            Err(error) => return Err(error),
        }
        // The destination has confirmed every page. A lost Complete changes nothing.
        let _ = self.link.send(&Frame::Complete);
        Ok(())
    }

    /// Receives the frame that the destination sent on the stream before its urgent connection
    /// ended. A destination that gives up sends its reason and then closes both. This side may see
    /// the close first.
    fn receive_before_urgent_ended(&mut self) -> Result<Frame, MigrationError> {
        match self.link.receive(REASON_LIMIT, never()) {
            Ok(frame) => Ok(frame),
            Err(
                reason @ (MigrationError::PeerGaveUp { .. }
                | MigrationError::PeerCancelled
                | MigrationError::LinkLost(_)),
            ) => Err(reason),
            Err(_) => Err(MigrationError::LinkLost(
                "the urgent connection ended in post-copy".into(),
            )),
        }
    }

    /// Pushes pages until none is unsent.
    fn push(
        &mut self,
        sender: &mut StoppedSender<'_>,
        unsent: &UnsentPages,
        total: u64,
        urgent_ended: &dyn Fn() -> bool,
    ) -> Result<(), MigrationError> {
        let mut cursor = 0;
        let mut wrapped = false;
        let mut frames = 0;
        loop {
            match unsent.claim_next(cursor) {
                Some(page) => {
                    wrapped = false;
                    sender.add(&mut self.link, page)?;
                    cursor = page.index() + 1;
                }
                // Unsent pages may be left before the cursor. None is left after a whole turn
                // without a find.
                None if wrapped => break,
                None => {
                    sender.send(&mut self.link)?;
                    wrapped = true;
                    cursor = 0;
                    continue;
                }
            }
            if sender.is_full() {
                sender.send(&mut self.link)?;
                frames += 1;
                if frames % REPORT_EVERY == 0 {
                    self.observer
                        .progress(Phase::Postcopy, total - unsent.count(), total);
                    if urgent_ended() {
                        let frame = self.receive_before_urgent_ended()?;
                        return Err(self.link.unexpected("nothing", &frame));
                    }
                }
                if let Some(hint) = unsent.take_hint() {
                    cursor = hint;
                }
            }
        }
        self.observer.progress(Phase::Postcopy, total, total);
        Ok(())
    }
}

/// Returns when the guest has requested no page for a while, or no page is unsent.
fn wait_for_quiet(unsent: &UnsentPages, urgent_ended: &dyn Fn() -> bool) {
    let mut left = unsent.count();
    let mut changed = Instant::now();
    while left > 0 && changed.elapsed() < SourceConfig::QUIET && !urgent_ended() {
        std::thread::sleep(QUIET_POLL);
        let now_left = unsent.count();
        if now_left != left {
            (left, changed) = (now_left, Instant::now());
        }
    }
}

/// Answers requests until the connection ends or the peer sends End.
fn answer(
    link: &UrgentLink,
    ram: &GuestRam,
    unsent: &UnsentPages,
    bytes: &AtomicU64,
) -> Result<(), MigrationError> {
    crate::latency::prefer_short_slices();
    // SAFETY: as in `push_and_drain`.
    let pages = unsafe { StoppedSender::new(ram) };
    let mut requests = link.requests(ram.pages());
    loop {
        let request = requests.next()?;
        match request.kind {
            UrgentKind::Request if unsent.claim_urgent(request.page) => {
                bytes.fetch_add(send_page(link, &pages, request.page)?, Ordering::Relaxed);
            }
            // The page was sent already, on either connection.
            UrgentKind::Request => {}
            _ => return Ok(()),
        }
    }
}

/// Sends one page on the urgent connection. Returns the number of page bytes sent.
fn send_page(
    link: &UrgentLink,
    pages: &StoppedSender<'_>,
    page: RamPage,
) -> Result<u64, MigrationError> {
    let bytes = pages.page(page);
    if is_zero(bytes) {
        link.send(&[IoSlice::new(&urgent_reply_zero(page))])?;
        return Ok(0);
    }
    let head = urgent_reply_page(page, bytes);
    link.send(&[IoSlice::new(&head), IoSlice::new(bytes)])?;
    Ok(PAGE_SIZE)
}
