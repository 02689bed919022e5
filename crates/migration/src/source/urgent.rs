#![expect(unsafe_code, reason = "sends the pages of a stopped VM without a copy")]
//! The thread of one urgent channel: it answers requests for single pages.
//!
//! It spins for the next request before it sleeps, since a wake-up takes ten times as long. It
//! answers all requests that have arrived together by one vectored write.

use super::gate::Due;
use super::pages::{is_zero, stopped_page};
use super::shared::{Mode, Shared};
use crate::error::MigrationError;
use crate::limits::{Limits, Silence};
use crate::protocol_error::ProtocolError;
use crate::sync::Ordering;
use crate::wire::{
    PAGE_BYTES, Side, URGENT_BYTES, UrgentKind, UrgentMessage, urgent_reply, urgent_reply_confirmed,
};
use pageferry_addr::RamPage;
use pageferry_transport::channel::{Connection, Spinner, Wait};
use pageferry_transport::{Bell, sleep_on};
use rustix::event::{PollFd, PollFlags};
use std::cell::RefCell;
use std::io::IoSlice;
use std::time::{Duration, Instant};

/// The spin time of the thread before it sleeps. While a guest faults, a request comes every few
/// dozen microseconds. A wake-up would delay each by 70 more.
pub const URGENT_SPIN: Duration = Duration::from_micros(100);

/// The most answers without a receipt. A destination sends a receipt for every 32, or when it has
/// nothing else to do.
const MAX_UNCONFIRMED: usize = 65_536;

/// The requests that one receive takes.
const REQUESTS: usize = 64;

/// The reason for the loss of a channel whose peer is silent.
const SILENT: MigrationError = MigrationError::Timeout("anything on an urgent channel");

/// An urgent channel at the source.
pub(super) struct Urgent<'a> {
    pub(super) shared: &'a Shared<'a>,
    pub(super) connection: &'a Connection,
    pub(super) bell: &'a Bell,
    /// The index in the ledger.
    pub(super) index: usize,
}

/// A page to answer, and when its request arrived.
struct Claimed<'a> {
    page: RamPage,
    arrived: Instant,
    /// Dropped when the answer is in the socket.
    _due: Due<'a>,
}

/// The bytes that come in on the channel.
struct Incoming<'a> {
    buffer: [u8; REQUESTS * URGENT_BYTES],
    filled: usize,
    /// Pages to answer, which the ledger has given to this thread.
    claimed: Vec<Claimed<'a>>,
    silence: Silence,
    error: Option<MigrationError>,
}

impl<'a> Urgent<'a> {
    /// Answers requests until the channel is lost.
    pub(super) fn run(&self) -> MigrationError {
        let incoming = RefCell::new(Incoming {
            buffer: [0; REQUESTS * URGENT_BYTES],
            filled: 0,
            claimed: Vec::with_capacity(REQUESTS),
            silence: Silence::new(),
            error: None,
        });
        crate::latency::prefer_short_slices();
        let answered = self.answer(&incoming);
        // A silence interrupts a write.
        let silent = self.is_silent(&incoming).then_some(SILENT);
        let mut incoming = incoming.into_inner();
        // Pages that were claimed and are in no message.
        for Claimed { page, .. } in incoming.claimed.drain(..) {
            self.shared.ledger.unclaim(page.index()..page.index() + 1);
        }
        incoming
            .error
            .or(silent)
            .or(answered.err())
            .unwrap_or(MigrationError::Cancelled)
    }

    fn answer(&self, incoming: &RefCell<Incoming<'a>>) -> Result<(), MigrationError> {
        let stop = || self.take(incoming).is_err() || self.is_silent(incoming);
        let wait = Wait::block("urgent reply").unless(&stop);
        let mut said = Instant::now();
        let mut spinner = Spinner::new(URGENT_SPIN);
        loop {
            if self.take(incoming).is_err() {
                return Ok(());
            }
            if self.is_silent(incoming) {
                return Err(SILENT);
            }
            let pages = std::mem::take(&mut incoming.borrow_mut().claimed);
            if !pages.is_empty() {
                self.reply(&pages, &wait)?;
                drop(pages);
                said = Instant::now();
                spinner = Spinner::new(URGENT_SPIN);
                continue;
            }
            if said.elapsed() >= Limits::INTERVAL {
                self.connection.write_all(&UrgentMessage::alive(), &wait)?;
                said = Instant::now();
            }
            if !spinner.spin() {
                self.sleep();
                spinner = Spinner::new(URGENT_SPIN);
            }
        }
    }

    /// Sends claimed pages.
    fn reply(&self, pages: &[Claimed<'_>], wait: &Wait<'_>) -> Result<(), MigrationError> {
        let mut heads = Vec::with_capacity(pages.len());
        let mut bodies = Vec::with_capacity(pages.len());
        for Claimed { page, arrived, .. } in pages {
            // SAFETY: (1) `take` claims pages only once the guest has stopped. The session ends the
            // threads of channels before it resumes the guest. (2) The VMM's own writes are refused.
            let bytes = unsafe { stopped_page(self.shared.ram, *page) };
            let zero = is_zero(bytes);
            let took = Some(arrived.elapsed());
            let confirmed = !zero && self.is_confirmed(*page, bytes);
            let body = (!zero && !confirmed).then_some(bytes);
            heads.push(match confirmed {
                true => urgent_reply_confirmed(*page, bytes, took),
                false => urgent_reply(*page, body, took),
            });
            bodies.push(body);
            // Each reply is a message: it is in the ledger before its first byte is sent.
            let index = page.index();
            let len = body.map_or(0, |bytes| bytes.len() as u64);
            self.shared
                .ledger
                .sent(self.index, std::iter::once(index..index + 1), len);
        }
        let mut slices = Vec::with_capacity(2 * pages.len());
        for (head, body) in heads.iter().zip(&bodies) {
            slices.push(IoSlice::new(head));
            slices.extend(body.map(|bytes| IoSlice::new(bytes)));
        }
        self.connection.write_all_vectored(&slices, wait)?;
        let data = bodies.iter().flatten().count() as u64;
        let bytes = data * PAGE_BYTES as u64;
        self.shared.limiter.charge_urgent(bytes);
        let figures = &self.shared.figures;
        figures
            .urgent
            .fetch_add(pages.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Whether the destination has these bytes of the page, which are not all zero.
    fn is_confirmed(&self, page: RamPage, bytes: &[u8; PAGE_BYTES]) -> bool {
        let Some(hashes) = self.shared.hashes() else {
            return false;
        };
        let confirmed = hashes.is(page, hashes.of(bytes));
        let figures = &self.shared.figures;
        if confirmed {
            figures.confirmed.fetch_add(1, Ordering::Relaxed);
        } else if hashes.was_sent(page) {
            figures.resent.fetch_add(1, Ordering::Relaxed);
        }
        confirmed
    }

    fn is_silent(&self, incoming: &RefCell<Incoming<'a>>) -> bool {
        let patience = self.shared.patience.get();
        incoming.borrow().silence.exceeds(patience)
    }

    /// Takes the messages that have arrived, and claims the requested pages. An error stays in
    /// `incoming`.
    fn take(&self, incoming: &RefCell<Incoming<'a>>) -> Result<(), ()> {
        let incoming = &mut *incoming.borrow_mut();
        incoming.take(self).map_err(|error| {
            incoming.error.get_or_insert(error);
        })
    }

    fn sleep(&self) {
        let mut fds = [
            PollFd::new(self.connection, PollFlags::IN),
            PollFd::new(self.bell, PollFlags::IN),
        ];
        sleep_on(&mut fds, Limits::INTERVAL);
        self.bell.hush();
    }
}

impl<'a> Incoming<'a> {
    fn take(&mut self, urgent: &Urgent<'a>) -> Result<(), MigrationError> {
        let shared = urgent.shared;
        // A destination confirms every few pages. One that does not gets no more.
        if shared.ledger.without_receipt(urgent.index) > MAX_UNCONFIRMED {
            return Err(ProtocolError::Unconfirmed.into());
        }
        // One write has a limited number of pieces. The next takes the rest.
        while self.claimed.len() < REQUESTS / 2 {
            let room = &mut self.buffer[self.filled..];
            let got = urgent.connection.recv_pending(room, "urgent request")?;
            let Some(got) = got else {
                return Ok(());
            };
            self.silence = Silence::new();
            self.filled += got;
            let mut at = 0;
            while let Some(bytes) = self.buffer[at..self.filled].first_chunk::<URGENT_BYTES>() {
                at += URGENT_BYTES;
                let message = UrgentMessage::decode(bytes, Side::Destination, shared.ram.pages())?;
                self.handle(urgent, &message)?;
            }
            self.buffer.copy_within(at..self.filled, 0);
            self.filled -= at;
        }
        Ok(())
    }

    fn handle(
        &mut self,
        urgent: &Urgent<'a>,
        message: &UrgentMessage,
    ) -> Result<(), MigrationError> {
        let shared = urgent.shared;
        let page = message.page;
        match message.kind {
            UrgentKind::Request if !matches!(shared.mode(), Mode::Answer | Mode::Push) => {
                Err(ProtocolError::EarlyRequest { page }.into())
            }
            UrgentKind::Request => {
                if shared.put_in_order(page) {
                    // A bulk channel sends it, and takes no other order.
                    return Ok(());
                }
                if let Some(prefetch) = &shared.prefetch {
                    prefetch.requested(page);
                }
                if shared.ledger.claim(page) {
                    self.claimed.push(Claimed {
                        page,
                        arrived: self.silence.since(),
                        _due: shared.gate.to_answer(),
                    });
                } else {
                    // The page was sent already, on any channel.
                    shared.figures.late.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            }
            UrgentKind::Receipt => {
                let taken = shared.ledger.receipt(urgent.index, message.placed);
                if taken.map_err(ProtocolError::from)?.pages > 0 {
                    shared.check_acknowledged();
                }
                Ok(())
            }
            UrgentKind::Alive => Ok(()),
            other => Err(ProtocolError::UrgentKind { kind: other as u8 }.into()),
        }
    }
}
