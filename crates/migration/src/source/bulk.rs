#![expect(unsafe_code, reason = "sends the pages of a stopped VM without a copy")]
//! The thread of one bulk channel: it sends frames of unsent pages, and takes their receipts.
//!
//! A frame is in the ledger before its first byte is sent. So when the channel is lost, the pages
//! of all frames without a receipt are known.

use super::pages::PageFrame;
use super::shared::{Mode, Shared};
use crate::bell::Bell;
use crate::channel::{Connection, Wait};
use crate::error::MigrationError;
use crate::protocol_error::ProtocolError;
use crate::sync::Ordering;
use crate::wire::{Frame, FrameHeader, HEADER_BYTES, PAGE_BYTES, Role, Side};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// The frames without payload that one receive takes.
const FRAMES: usize = 64;

/// A bulk channel at the source.
pub(super) struct Bulk<'a> {
    pub(super) shared: &'a Shared<'a>,
    pub(super) connection: &'a Connection,
    /// Rings when the mode has changed, or pages are unsent again.
    pub(super) bell: &'a Bell,
    /// The index in the ledger.
    pub(super) index: usize,
}

/// What comes back on the channel.
struct Incoming {
    buffer: [u8; FRAMES * HEADER_BYTES],
    filled: usize,
    heard: Instant,
    error: Option<MigrationError>,
}

impl Bulk<'_> {
    /// Sends frames until the channel is lost.
    pub(super) fn run(&self) -> MigrationError {
        let incoming = RefCell::new(Incoming {
            buffer: [0; FRAMES * HEADER_BYTES],
            filled: 0,
            heard: Instant::now(),
            error: None,
        });
        crate::latency::prefer_short_slices();
        let sent = self.send_frames(&incoming);
        let error = incoming.into_inner().error;
        error.or(sent.err()).unwrap_or(MigrationError::Cancelled)
    }

    fn send_frames(&self, incoming: &RefCell<Incoming>) -> Result<(), MigrationError> {
        let mut frame = PageFrame::new(self.shared.ram);
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
                return Err(MigrationError::Timeout("anything on a bulk channel"));
            }
            let limited = self.shared.limiter.wait(self.shared.mode());
            if limited.is_none() && self.fill(&mut frame)? {
                self.send(&mut frame, &wait)?;
                said = Instant::now();
                continue;
            }
            if said.elapsed() >= self.shared.limits.interval() {
                self.connection.write_all(&alive, &wait)?;
                said = Instant::now();
            }
            self.sleep(limited)?;
        }
    }

    /// Fills the frame. Returns whether there is anything to send.
    fn fill(&self, frame: &mut PageFrame<'_>) -> Result<bool, MigrationError> {
        let shared = self.shared;
        let mode = shared.mode();
        if !matches!(mode, Mode::Copy | Mode::Push) {
            return Ok(false);
        }
        // From the cursor to the end, and once more from the beginning.
        let mut cursor = shared.cursor();
        loop {
            let next = if mode == Mode::Copy {
                frame.copy(&shared.ledger, cursor)?
            } else {
                // SAFETY: (1) in this mode the guest has stopped, and is not resumed while the
                // threads of channels live. (2) The VMM's own writes are refused (`Frozen`).
                unsafe { frame.borrow(&shared.ledger, cursor)? }
            };
            shared.set_cursor(next.unwrap_or(0));
            if !frame.list().is_empty() {
                if shared.mode() == mode {
                    return Ok(true);
                }
                frame.give_back(&shared.ledger);
                return Ok(false);
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
        let runs = list.runs().iter();
        self.shared.ledger.sent(
            self.index,
            runs.map(|run| run.first.index()..run.end() as usize),
        );
        let bytes = data * PAGE_BYTES as u64;
        self.shared.limiter.charge(self.shared.mode(), bytes);
        frame.send(self.connection, wait)?;
        let figures = &self.shared.figures;
        figures.data.fetch_add(data, Ordering::Relaxed);
        figures.zero.fetch_add(zero, Ordering::Relaxed);
        figures.page_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn is_silent(&self, incoming: &RefCell<Incoming>) -> bool {
        incoming.borrow().heard.elapsed() > self.shared.patience.get()
    }

    /// Takes the receipts that have arrived. An error stays in `incoming`.
    fn take(&self, incoming: &RefCell<Incoming>) -> Result<(), ()> {
        let incoming = &mut *incoming.borrow_mut();
        incoming.take(self).map_err(|error| {
            incoming.error.get_or_insert(error);
        })
    }

    /// Sleeps until something has come back, the bell rings, or it is time to say something. Then
    /// the limit of the rate is over, too.
    fn sleep(&self, limited: Option<Duration>) -> Result<(), MigrationError> {
        self.bell.hush();
        let shared = self.shared;
        // What was unsent before the bell was hushed is seen here.
        let sending = matches!(shared.mode(), Mode::Copy | Mode::Push);
        if limited.is_none() && sending && shared.ledger.unsent_count() > 0 {
            return Ok(());
        }
        let mut fds = [
            PollFd::new(self.connection, PollFlags::IN),
            PollFd::new(self.bell, PollFlags::IN),
        ];
        let interval = shared.limits.interval();
        let nap = limited.map_or(interval, |wait| wait.min(interval));
        let nap = Timespec::try_from(nap).expect("a short time");
        match poll(&mut fds, Some(&nap)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(MigrationError::os("cannot wait for receipts", e)),
        }
    }
}

impl Incoming {
    fn take(&mut self, bulk: &Bulk<'_>) -> Result<(), MigrationError> {
        loop {
            let room = &mut self.buffer[self.filled..];
            let Some(got) = bulk.connection.recv_pending(room, "receipt")? else {
                return Ok(());
            };
            self.heard = Instant::now();
            self.filled += got;
            let mut at = 0;
            while let Some(head) = self.buffer[at..self.filled].first_chunk::<HEADER_BYTES>() {
                at += HEADER_BYTES;
                let header = FrameHeader::decode(head, Side::Destination, Role::Bulk)?;
                match Frame::decode(&header, &[], bulk.shared.ram.pages())? {
                    Frame::Receipt { frames } => {
                        let ledger = &bulk.shared.ledger;
                        let taken = ledger.receipt(bulk.index, frames);
                        if taken.map_err(ProtocolError::from)?.pages > 0 {
                            bulk.shared.check_acknowledged();
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
