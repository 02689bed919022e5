#![expect(unsafe_code, reason = "sends the pages of a stopped VM without a copy")]
//! The thread of one bulk channel: it sends frames of unsent pages, and takes their receipts.
//!
//! A frame is in the ledger before its first byte is sent. So when the channel is lost, the pages
//! of all frames without a receipt are known.

use super::pages::{FRAME_PAGES, PageFrame};
use super::shared::{Mode, Shared};
use crate::clock::monotonic_ns;
use crate::error::MigrationError;
use crate::limits::{Limits, Silence};
use crate::protocol_error::ProtocolError;
use crate::sync::Ordering;
use crate::wire::{Frame, FrameHeader, HEADER_BYTES, PAGE_BYTES, Role, RunKind, Side};
use pageferry_addr::RamPage;
use pageferry_transport::channel::{Connection, Wait};
use pageferry_transport::{Bell, sleep_on};
use rustix::event::{PollFd, PollFlags};
use std::cell::RefCell;
use std::time::{Duration, Instant};
use tracing::debug;

/// The frames without payload that one receive takes.
const FRAMES: usize = 64;
/// The most frames without a receipt. A destination sends one for each frame.
const MAX_UNCONFIRMED: usize = 1024;
/// The same while frames confirm pages. Such frames take the peer's time, and the governor does not
/// count them: a vCPU that needs one of their pages waits for all before it.
const MAX_CONFIRMING: usize = 64;
/// The interval at which the push looks whether urgent pages are answered. Answers take less.
const GIVE_WAY: Duration = Duration::from_micros(50);

/// The reason for the loss of a channel whose peer is silent.
const SILENT: MigrationError = MigrationError::Timeout("anything on a bulk channel");

/// A bulk channel at the source.
pub(super) struct Bulk<'a> {
    pub(super) shared: &'a Shared<'a>,
    pub(super) connection: &'a Connection,
    /// Rings when the mode has changed, or pages are unsent again.
    pub(super) bell: &'a Bell,
    /// The index in the ledger.
    pub(super) index: usize,
}

/// The bytes that come back on the channel.
struct Incoming {
    buffer: [u8; FRAMES * HEADER_BYTES],
    filled: usize,
    silence: Silence,
    error: Option<MigrationError>,
    /// The frames with a receipt.
    frames: u64,
}

/// The next step of a bulk thread.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    /// It sends the frame.
    Send,
    /// It waits for a receipt.
    AwaitReceipt,
    /// It waits until urgent pages are answered.
    GiveWay,
    /// It waits so long, for the limit of the rate.
    Limited(Duration),
    /// It waits until there is something to send.
    Rest,
}

impl<'a> Bulk<'a> {
    /// Sends frames until the channel is lost.
    pub(super) fn run(&self) -> MigrationError {
        let incoming = RefCell::new(Incoming {
            buffer: [0; FRAMES * HEADER_BYTES],
            filled: 0,
            silence: Silence::new(),
            error: None,
            frames: 0,
        });
        self.shared.governor().lost(self.index);
        crate::latency::prefer_short_slices();
        let sent = self.send_frames(&incoming);
        // A silence interrupts a write.
        let silent = self.is_silent(&incoming).then_some(SILENT);
        self.shared.governor().lost(self.index);
        let error = incoming.into_inner().error;
        error
            .or(silent)
            .or(sent.err())
            .unwrap_or(MigrationError::Cancelled)
    }

    fn send_frames(&self, incoming: &RefCell<Incoming>) -> Result<(), MigrationError> {
        let mut frame = PageFrame::of(self.shared.machine);
        let mut ahead = Vec::with_capacity(FRAME_PAGES as usize);
        let mut said = Instant::now();
        let mut alive = Vec::new();
        Frame::Alive.encode(&mut alive)?;
        // Receipts are read while the peer takes no more. A peer that is silent too long is lost.
        let stop = || self.take(incoming).is_err() || self.is_silent(incoming);
        let wait = Wait::block("Pages frame").unless(&stop);
        loop {
            if self.take(incoming).is_err() {
                return Ok(());
            }
            if self.is_silent(incoming) {
                return Err(SILENT);
            }
            let next = self.fill(&mut frame, &mut ahead)?;
            if next == Next::Send {
                self.send(&mut frame, &wait)?;
                said = Instant::now();
                continue;
            }
            if said.elapsed() >= Limits::INTERVAL {
                self.connection.write_all(&alive, &wait)?;
                said = Instant::now();
            }
            self.sleep(next);
        }
    }

    /// Fills the frame, if it may be sent now.
    fn fill(
        &self,
        frame: &mut PageFrame<'a>,
        ahead: &mut Vec<RamPage>,
    ) -> Result<Next, MigrationError> {
        let shared = self.shared;
        let turn = shared.turn();
        let mode = turn.mode();
        let hashes = shared.hashes();
        frame.compare_with(hashes);
        let most = match mode {
            Mode::Push if hashes.is_some() => MAX_CONFIRMING,
            _ => MAX_UNCONFIRMED,
        };
        if shared.ledger.without_receipt(self.index) >= most {
            return Ok(Next::AwaitReceipt);
        }
        if let Some(wait) = shared.limiter.wait(mode) {
            return Ok(Next::Limited(wait));
        }
        let filled = match mode {
            Mode::Copy => self.search(|cursor| {
                let next = frame.copy(&shared.ledger, cursor)?;
                Ok((next, frame.list().is_empty()))
            })?,
            Mode::Push if shared.in_order.is_some() => {
                ahead.extend(shared.next_in_order());
                // SAFETY: see `push`.
                unsafe { self.push(frame, ahead, FRAME_PAGES)? }
            }
            Mode::Push => {
                if shared.gate.is_closed() {
                    return Ok(Next::GiveWay);
                }
                let mut governor = shared.governor();
                governor.asked(shared.gate.asked());
                let room = governor.room(self.index);
                drop(governor);
                // Zero pages need no room: they take the peer's time, not the link's.
                let most = room.map_or(0, |room| (room / PAGE_BYTES as u64) as u32);
                let unsent = shared.ledger.unsent();
                let pages = shared.ram.pages();
                let is_unsent = |page| unsent.test(page);
                if let Some(prefetch) = shared.prefetch.as_ref().filter(|_| ahead.is_empty()) {
                    prefetch.take(FRAME_PAGES as usize, pages, is_unsent, ahead);
                }
                // SAFETY: see `push`.
                let filled = unsafe { self.push(frame, ahead, most)? };
                if !filled && room.is_none() {
                    return Ok(Next::AwaitReceipt);
                }
                filled
            }
            Mode::Hold | Mode::Answer => false,
        };
        if shared.turn() != turn {
            // A page that was claimed behind the end of its pass may change before the pause. So it
            // counts as unchanged no more.
            frame.give_back_unchanged(&shared.ledger);
            if filled {
                frame.give_back(&shared.ledger);
            }
            return Ok(Next::Rest);
        }
        if frame.release_unchanged(&shared.ledger) > 0 {
            shared.check_acknowledged();
        }
        Ok(if filled { Next::Send } else { Next::Rest })
    }

    /// Fills the frame of a guest that has stopped: with `pages`, which it takes out, or else from
    /// the cursor on.
    ///
    /// # Safety
    /// The mode was [`Mode::Push`] when the caller looked: (1) the guest has stopped, and is not
    /// resumed while the threads of channels live. (2) The VMM's own writes are refused (`Frozen`).
    unsafe fn push(
        &self,
        frame: &mut PageFrame<'_>,
        pages: &mut Vec<RamPage>,
        most: u32,
    ) -> Result<bool, MigrationError> {
        let ledger = &self.shared.ledger;
        if !pages.is_empty() {
            // SAFETY: the caller's contract.
            let done = unsafe { frame.borrow_pages(ledger, pages, most)? };
            pages.drain(..done);
            if !frame.list().is_empty() {
                return Ok(true);
            }
        }
        self.search(|cursor| {
            // SAFETY: the caller's contract.
            let next = unsafe { frame.borrow(ledger, cursor, most)? };
            Ok((next, frame.list().is_empty()))
        })
    }

    /// Calls `fill` with the cursor, and once more from the beginning. It returns the next cursor,
    /// and whether the frame is empty. Returns whether there is anything to send.
    fn search(
        &self,
        mut fill: impl FnMut(usize) -> Result<(Option<usize>, bool), MigrationError>,
    ) -> Result<bool, MigrationError> {
        let shared = self.shared;
        let mut cursor = shared.cursor();
        loop {
            let (next, empty) = fill(cursor)?;
            shared.set_cursor(next.unwrap_or(0));
            if !empty {
                return Ok(true);
            }
            if cursor == 0 || shared.ledger.unsent_count() == 0 {
                return Ok(false);
            }
            cursor = 0;
        }
    }

    fn send(&self, frame: &mut PageFrame<'_>, wait: &Wait<'_>) -> Result<(), MigrationError> {
        let list = frame.list();
        let (data, zero) = (u64::from(list.data_pages()), list.zero_pages());
        let confirmed = u64::from(list.confirmed_pages());
        let bytes = data * PAGE_BYTES as u64;
        self.compare(frame);
        let runs = list.runs().iter();
        self.shared.ledger.sent(
            self.index,
            runs.map(|run| run.first.index()..run.end() as usize),
            bytes,
        );
        self.shared.limiter.charge(self.shared.mode(), bytes);
        let mut governor = self.shared.governor();
        governor.sent(monotonic_ns(), self.index, bytes);
        drop(governor);
        frame.send(self.connection, wait)?;
        let figures = &self.shared.figures;
        figures.data.fetch_add(data, Ordering::Relaxed);
        figures.zero.fetch_add(zero, Ordering::Relaxed);
        figures.confirmed.fetch_add(confirmed, Ordering::Relaxed);
        Ok(())
    }

    /// Notes what the frame brings, or which of its pages have changed since they were sent.
    fn compare(&self, frame: &PageFrame<'_>) {
        // Those that the frame was filled by: they may have been taken out of use since.
        let Some(hashes) = frame.hashes() else {
            return;
        };
        if frame.is_copied() {
            return frame.note_sent(hashes);
        }
        let data = frame.list().runs().iter();
        let data = data.filter(|run| run.kind == RunKind::Data);
        let pages = data.flat_map(|run| (run.first.0..run.end()).map(RamPage));
        let again = pages.filter(|page| hashes.was_sent(*page)).count() as u64;
        let resent = &self.shared.figures.resent;
        resent.fetch_add(again, Ordering::Relaxed);
    }

    fn is_silent(&self, incoming: &RefCell<Incoming>) -> bool {
        let patience = self.shared.patience.get();
        incoming.borrow().silence.exceeds(patience)
    }

    /// Takes the receipts that have arrived. An error stays in `incoming`.
    fn take(&self, incoming: &RefCell<Incoming>) -> Result<(), ()> {
        let incoming = &mut *incoming.borrow_mut();
        incoming.take(self).map_err(|error| {
            incoming.error.get_or_insert(error);
        })
    }

    /// Sleeps until something has come back, the bell rings, or it is time to say something.
    fn sleep(&self, next: Next) {
        self.bell.hush();
        let shared = self.shared;
        let nap = match next {
            Next::GiveWay => GIVE_WAY,
            Next::Limited(wait) => wait.min(Limits::INTERVAL),
            // Pages that were unsent before the bell was hushed are seen here.
            Next::Rest
                if matches!(shared.mode(), Mode::Copy | Mode::Push)
                    && shared.ledger.unsent_count() > 0 =>
            {
                return;
            }
            _ => Limits::INTERVAL,
        };
        let mut fds = [
            PollFd::new(self.connection, PollFlags::IN),
            PollFd::new(self.bell, PollFlags::IN),
        ];
        sleep_on(&mut fds, nap);
    }
}

impl Incoming {
    fn take(&mut self, bulk: &Bulk<'_>) -> Result<(), MigrationError> {
        loop {
            let room = &mut self.buffer[self.filled..];
            let Some(got) = bulk.connection.recv_pending(room, "receipt")? else {
                return Ok(());
            };
            self.silence = Silence::new();
            let now = monotonic_ns();
            self.filled += got;
            let mut at = 0;
            while let Some(head) = self.buffer[at..self.filled].first_chunk::<HEADER_BYTES>() {
                at += HEADER_BYTES;
                let header = FrameHeader::decode(head, Side::Destination, Role::Bulk)?;
                match Frame::decode(&header, &[], bulk.shared.ram.pages())? {
                    Frame::Receipt { frames } => {
                        let ledger = &bulk.shared.ledger;
                        let before = std::mem::replace(&mut self.frames, frames);
                        let taken = ledger.receipt(bulk.index, frames);
                        if taken.map_err(ProtocolError::from)?.pages > 0 {
                            bulk.shared.check_acknowledged();
                        }
                        let mut governor = bulk.shared.governor();
                        if governor.receipts(now, bulk.index, frames - before) {
                            debug!(%governor, "the push was measured");
                        }
                    }
                    Frame::Alive => {}
                    other => return Err(MigrationError::unexpected("a receipt", &other)),
                }
            }
            self.buffer.copy_within(at..self.filled, 0);
            self.filled -= at;
        }
    }
}
