//! The urgent channels at the destination: requests go out, and pages come in.
//!
//! **Guarantee.** A thread that needs a page never waits for another thread to send its request. A
//! request that reaches no channel is not lost: the page stays requested, and the supervisor
//! repeats the outstanding requests when a channel is open.
//!
//! **Mechanism.** Threads put pages into a channel's queue, without waiting, and then try to become
//! its *holder*. The holder sends all queued requests as one record. It reads the replies and
//! places them. A thread that finds another holder leaves its request to it: the holder looks at
//! the queue again after it has let go ([`UrgentChannel::pump`]). The place of a channel outlives
//! its connections.

use super::core::Core;
use super::shared::Letter;
use crate::clock::monotonic_ns;
use crate::error::MigrationError;
use crate::limits::Silence;
use crate::outbox::Outbox;
use crate::protocol_error::ProtocolError;
use crate::session::{ChannelId, Generation};
use crate::sync::{AtomicBool, AtomicU64, Ordering};
use crate::wire::{PAGE_BYTES, Side, URGENT_BYTES, UrgentKind, UrgentMessage};
use pageferry_addr::RamPage;
use pageferry_transport::channel::Connection;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// The size of the buffer, in replies with their pages.
const REPLIES: usize = 8;
/// The reads of one call.
const READS: usize = 64;
/// The most bytes of requests that the source leaves unread, beside those in the socket's buffers:
/// 65 536 requests.
const MAX_UNREAD: usize = 65_536 * URGENT_BYTES;
/// A receipt follows after this number of pages, or when there is nothing else to do.
const RECEIPT_EVERY: u64 = 32;

/// The place of one urgent channel.
pub(super) struct UrgentChannel {
    requests: Sender<RamPage>,
    /// Counts requests that the holder may not have seen.
    queued: AtomicU64,
    open: AtomicBool,
    /// Whether the connection has not taken all requests.
    clogged: AtomicBool,
    /// The open connection, for threads that sleep until a reply comes.
    connection: Mutex<Option<Arc<Connection>>>,
    holder: Mutex<Holder>,
}

struct Holder {
    requests: Receiver<RamPage>,
    open: Option<Open>,
    /// The last channel that was open here, and the number of its replies that were placed.
    last: Option<(ChannelId, u64)>,
}

/// An open channel.
struct Open {
    id: ChannelId,
    generation: Generation,
    connection: Arc<Connection>,
    out: Outbox,
    buffer: Box<[u8]>,
    filled: usize,
    placed: u64,
    receipted: u64,
    silence: Silence,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl UrgentChannel {
    pub(super) fn new() -> Self {
        let (requests, queue) = channel();
        Self {
            requests,
            queued: AtomicU64::new(0),
            open: AtomicBool::new(false),
            clogged: AtomicBool::new(false),
            connection: Mutex::default(),
            holder: Mutex::new(Holder {
                requests: queue,
                open: None,
                last: None,
            }),
        }
    }

    /// Takes a new connection. The place must be empty.
    pub(super) fn open(&self, generation: Generation, id: ChannelId, connection: Arc<Connection>) {
        let mut holder = lock(&self.holder);
        *lock(&self.connection) = Some(Arc::clone(&connection));
        holder.last = Some((id, 0));
        holder.open = Some(Open {
            id,
            generation,
            connection,
            out: Outbox::new("urgent request"),
            buffer: vec![0; REPLIES * (URGENT_BYTES + PAGE_BYTES)].into(),
            filled: 0,
            placed: 0,
            receipted: 0,
            silence: Silence::new(),
        });
        self.clogged.store(false, Ordering::Release);
        self.open.store(true, Ordering::Release);
    }

    /// Whether the channel is open and has taken all requests so far. It may change at any time:
    /// this only keeps repeated requests from piling up.
    pub(super) fn is_free(&self) -> bool {
        self.open.load(Ordering::Acquire) && !self.clogged.load(Ordering::Acquire)
    }

    /// Closes the channel. No thread places its replies any more when this returns.
    pub(super) fn close(&self) {
        if let Some(connection) = lock(&self.connection).take() {
            connection.shutdown();
        }
        self.open.store(false, Ordering::Release);
        lock(&self.holder).open = None;
    }

    /// Closes the channel `id`, if it is the last one that was open here. Returns the number of
    /// replies that were placed.
    pub(super) fn end(&self, id: ChannelId) -> Option<u64> {
        let (last, placed) = lock(&self.holder).last?;
        if last != id {
            return None;
        }
        self.close();
        // A holder may have placed more until it was closed.
        Some(lock(&self.holder).last.map_or(placed, |(_, placed)| placed))
    }

    /// The connection, for a thread that sleeps until a reply comes.
    pub(super) fn connection(&self) -> Option<Arc<Connection>> {
        lock(&self.connection).clone()
    }

    /// Queues a request. Returns false if the channel is not open.
    pub(super) fn request(&self, page: RamPage) -> bool {
        if !self.open.load(Ordering::Acquire) || self.requests.send(page).is_err() {
            return false;
        }
        self.queued.fetch_add(1, Ordering::SeqCst);
        true
    }

    /// Sends queued requests, and places the replies that have arrived, unless another thread does.
    /// Returns the number of pages.
    pub(super) fn pump(&self, core: &Core) -> usize {
        let mut pages = 0;
        loop {
            let mut holder = match self.holder.try_lock() {
                Ok(holder) => holder,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return pages,
            };
            pages += self.pump_held(&mut holder, core);
            drop(holder);
            // A request that came while this thread was the holder.
            if self.queued.load(Ordering::SeqCst) == 0 {
                return pages;
            }
        }
    }

    fn pump_held(&self, holder: &mut Holder, core: &Core) -> usize {
        self.queued.swap(0, Ordering::SeqCst);
        let Some(open) = &mut holder.open else {
            // They stay requested, and are repeated when a channel is open.
            while holder.requests.try_recv().is_ok() {}
            return 0;
        };
        let mut now = None;
        while let Ok(page) = holder.requests.try_recv() {
            open.out.push(&UrgentMessage::request(page));
            let now = *now.get_or_insert_with(monotonic_ns);
            core.stalls.marks.sent(page, now);
        }
        let before = open.placed;
        let pumped = open.flush().and_then(|()| open.read(core));
        self.clogged.store(!open.out.is_empty(), Ordering::Release);
        let pumped = pumped.and_then(|()| open.check_unread());
        let pages = (open.placed - before) as usize;
        holder.last = Some((open.id, open.placed));
        if let Err(error) = pumped {
            self.lost(holder, core, error);
        }
        pages
    }

    /// The connection was lost, or the source broke the protocol on it.
    fn lost(&self, holder: &mut Holder, core: &Core, error: MigrationError) {
        let Some(open) = holder.open.take() else {
            return;
        };
        open.connection.shutdown();
        self.open.store(false, Ordering::Release);
        *lock(&self.connection) = None;
        if error.is_fatal_here() {
            return core.fail(error);
        }
        core.letters
            .post(Letter::ChannelLost(open.generation, open.id, error));
    }

    /// Says something if nothing was said for `interval`, and notices silence. The supervisor calls
    /// it.
    pub(super) fn keep_time(&self, core: &Core, interval: Duration, patience: Duration) {
        self.pump(core);
        let mut holder = lock(&self.holder);
        let Some(open) = &mut holder.open else {
            return;
        };
        open.receipt(1);
        if open.out.silence() >= interval && open.out.is_empty() {
            open.out.push(&UrgentMessage::alive());
        }
        let outcome = if open.silence.exceeds(patience) {
            Err(MigrationError::Timeout("anything on an urgent channel"))
        } else {
            open.flush()
        };
        if let Err(error) = outcome {
            self.lost(&mut holder, core, error);
        }
    }
}

impl Open {
    /// Queues a receipt if at least `pages` pages have none.
    fn receipt(&mut self, pages: u64) {
        if self.placed - self.receipted >= pages {
            self.receipted = self.placed;
            self.out.push(&UrgentMessage::receipt(self.placed));
        }
    }

    fn flush(&mut self) -> Result<(), MigrationError> {
        self.out.flush(&self.connection)
    }

    /// Fails if the source has left too many requests unread. It may send their pages on other
    /// channels all the while, so that more and more follow.
    fn check_unread(&self) -> Result<(), MigrationError> {
        if self.out.waiting() > MAX_UNREAD {
            return Err(ProtocolError::Unread.into());
        }
        Ok(())
    }

    /// Reads without waiting, and places each complete reply.
    fn read(&mut self, core: &Core) -> Result<(), MigrationError> {
        // The rest is left to the next call: the caller has other work.
        for _ in 0..READS {
            let room = &mut self.buffer[self.filled..];
            let Some(got) = self.connection.recv_pending(room, "urgent reply")? else {
                return Ok(());
            };
            self.silence = Silence::new();
            let read_ns = monotonic_ns();
            self.filled += got;
            let mut at = 0;
            while let Some(head) = self.buffer[at..self.filled].first_chunk::<URGENT_BYTES>() {
                let message = UrgentMessage::decode(head, Side::Source, core.page_count())?;
                let body = &self.buffer[at + URGENT_BYTES..self.filled];
                let bytes = match message.kind {
                    UrgentKind::Page => match body.first_chunk::<PAGE_BYTES>() {
                        Some(bytes) => Some(bytes),
                        None => break,
                    },
                    UrgentKind::Zero | UrgentKind::Confirmed => None,
                    UrgentKind::Alive => {
                        at += URGENT_BYTES;
                        continue;
                    }
                    other => {
                        return Err(ProtocolError::UrgentKind { kind: other as u8 }.into());
                    }
                };
                let marks = &core.stalls.marks;
                marks.read(message.page, read_ns, message.at_source);
                core.place_urgent(&message, bytes)?;
                self.placed += 1;
                at += URGENT_BYTES + bytes.map_or(0, |bytes| bytes.len());
            }
            self.buffer.copy_within(at..self.filled, 0);
            self.filled -= at;
            if self.placed - self.receipted >= RECEIPT_EVERY {
                self.receipt(1);
                self.flush()?;
            }
        }
        Ok(())
    }
}
