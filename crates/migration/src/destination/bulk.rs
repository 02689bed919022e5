//! The reader of one bulk channel: it places the pages of each frame, and sends a receipt.

use super::place::{Inbound, Placer};
use crate::error::MigrationError;
use crate::limits::Patience;
use crate::sync::{AtomicBool, AtomicU64, Ordering};
use crate::wire::{Frame, FrameHeader, FrameType, HEADER_BYTES, Role, Side};
use pageferry_transport::channel::{Connection, Wait};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// The spin time of a reader, in microseconds. A sleeping reader would make the sender wait for
/// room.
const SPIN_MICROS: u32 = 100;

/// A bulk channel at the destination.
pub(super) struct Bulk {
    pub(super) connection: Connection,
    /// Held while a message is sent. The reader sends receipts, and the supervisor says `Alive`.
    said: Mutex<Instant>,
    /// The number of frames whose pages are in place.
    placed: AtomicU64,
    closed: AtomicBool,
}

impl Bulk {
    pub(super) fn new(connection: Connection) -> Self {
        Self {
            connection,
            said: Mutex::new(Instant::now()),
            placed: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        }
    }

    /// Makes the reader end soon.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.connection.shutdown();
    }

    /// The number of frames whose pages are in place. Final once the reader has ended.
    pub(super) fn placed(&self) -> u64 {
        self.placed.load(Ordering::Acquire)
    }

    /// Reads frames until the channel is lost.
    pub(super) fn run(&self, inbound: &Inbound<'_>, patience: &Patience) -> MigrationError {
        crate::latency::prefer_short_slices();
        match self.read_frames(inbound, patience) {
            Err(error) => error,
            Ok(never) => match never {},
        }
    }

    fn read_frames(
        &self,
        inbound: &Inbound<'_>,
        patience: &Patience,
    ) -> Result<std::convert::Infallible, MigrationError> {
        let mut placer = Placer::new(inbound, &self.connection);
        let mut head = [0; HEADER_BYTES];
        let stop = || self.closed.load(Ordering::Acquire);
        loop {
            let wait = Wait::block("frame")
                .within(patience.get())
                .spinning(SPIN_MICROS)
                .unless(&stop);
            self.connection.read_exact(&mut head, &wait)?;
            let header = FrameHeader::decode(&head, Side::Source, Role::Bulk)?;
            if header.frame_type != FrameType::Pages {
                match Frame::decode(&header, &[], inbound.core.page_count())? {
                    Frame::Alive => continue,
                    other => return Err(MigrationError::unexpected("Pages", &other)),
                }
            }
            placer.receive(&header, &wait.mid_message())?;
            let frames = self.placed.fetch_add(1, Ordering::AcqRel) + 1;
            let mut said = lock(&self.said);
            self.send(&Frame::Receipt { frames }, &mut said, &stop)?;
        }
    }

    fn send(
        &self,
        frame: &Frame,
        said: &mut Instant,
        stop: &dyn Fn() -> bool,
    ) -> Result<(), MigrationError> {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes)?;
        self.connection
            .write_all(&bytes, &Wait::block("receipt").unless(stop))?;
        *said = Instant::now();
        Ok(())
    }

    /// Says `Alive` if nothing was said for `interval`, and no receipt is on its way.
    pub(super) fn keep_alive(&self, interval: Duration) {
        let mut said = match self.said.try_lock() {
            Ok(said) => said,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let mut bytes = Vec::new();
        if said.elapsed() < interval || Frame::Alive.encode(&mut bytes).is_err() {
            return;
        }
        match self.connection.try_send(&bytes, "Alive") {
            // The reader notices a lost channel, and so does it one that would misread the rest.
            Err(_) => {}
            Ok(sent) if 0 < sent && sent < bytes.len() => self.close(),
            Ok(_) => *said = Instant::now(),
        }
        let _ = self.connection.flush_pending("Alive");
    }
}

fn lock(mutex: &Mutex<Instant>) -> MutexGuard<'_, Instant> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
