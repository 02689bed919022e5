//! The state that the threads of the source share.

use crate::clock::monotonic_ns;
use crate::error::MigrationError;
use crate::ledger::Ledger;
use crate::limits::Patience;
use crate::session::source::Event;
use crate::session::{ChannelId, Generation};
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use pageferry_machine::{GuestRam, Machine};

use super::SourceConfig;
use super::commands::Command;
use super::gate::UrgentGate;
use super::governor::Governor;
use super::hashes::SentHashes;
use super::limiter::Limiter;
use super::prefetch::Prefetch;
use super::recovery::Worked;
use pageferry_addr::RamPage;
use pageferry_transport::Mailbox;
use pageferry_transport::channel::Connection;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The most requested pages that wait for the bulk channels.
const MAX_IN_ORDER: usize = 65_536;

/// A letter to the supervisor.
pub(super) enum Letter {
    /// The operator wants something.
    Command(Command),
    /// The control channel of a generation is open.
    Opened(Generation, Connection),
    /// A channel is open.
    ChannelOpened(Generation, ChannelId, Connection),
    /// The control channel of a generation could not be opened.
    Lost(Generation, MigrationError),
    /// A channel was lost, or could not be opened.
    ChannelLost(Generation, ChannelId, MigrationError),
    /// Something else has happened.
    Happened(Event),
}

/// The sending threads' work on unsent pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Mode {
    /// Nothing.
    Hold = 0,
    /// Copy and send them: the guest runs here.
    Copy = 1,
    /// Answer requests only. The guest has stopped for good.
    Answer = 2,
    /// Send them without a copy: the guest has stopped for good.
    Push = 3,
}

/// The mode, and how often it was set. Two reads that are equal have no change between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn(u64);

impl Turn {
    const MODES: u64 = 4;

    pub(super) fn mode(self) -> Mode {
        match self.0 % Self::MODES {
            1 => Mode::Copy,
            2 => Mode::Answer,
            3 => Mode::Push,
            _ => Mode::Hold,
        }
    }
}

/// The mode that the supervisor sets and the sending threads read.
///
/// A thread looks for unsent pages and finds out which are holes, before it claims them. Between
/// the two, a pass may end and the next may begin: the mode is the same, but the dirty log was
/// harvested, and what the thread knows of holes is out of date. So the thread compares turns.
#[derive(Debug)]
pub(super) struct Modes(AtomicU64);

impl Modes {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(Mode::Hold as u64))
    }

    pub(super) fn turn(&self) -> Turn {
        Turn(self.0.load(Ordering::SeqCst))
    }

    /// Only one thread calls this.
    pub(super) fn set(&self, mode: Mode) {
        let set = self.0.load(Ordering::SeqCst) / Turn::MODES;
        let next = (set + 1) * Turn::MODES + mode as u64;
        self.0.store(next, Ordering::SeqCst);
    }
}

/// The figures that sending threads add to.
#[derive(Debug, Default)]
pub(super) struct Figures {
    pub(super) urgent: AtomicU64,
    /// Requests for pages that were under way, or at the destination.
    pub(super) late: AtomicU64,
    pub(super) data: AtomicU64,
    pub(super) zero: AtomicU64,
    /// Pages that were confirmed, on any channel.
    pub(super) confirmed: AtomicU64,
    /// Pages that were sent with their bytes again after the guest had stopped.
    pub(super) resent: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The state that the supervisor shares with the threads of the channels.
pub(super) struct Shared<'a> {
    pub(super) machine: &'a dyn Machine,
    pub(super) ram: &'a GuestRam,
    pub(super) ledger: Ledger,
    pub(super) letters: &'a Mailbox<Letter>,
    pub(super) patience: Patience,
    pub(super) figures: Figures,
    pub(super) limiter: Limiter,
    /// The address that channels of this session reached.
    pub(super) worked: Worked,
    /// The least round trip seen, in nanoseconds.
    round_trip: AtomicU64,
    /// The newest generation. Threads that open channels of older ones end.
    pub(super) generation: AtomicU32,
    pub(super) ended: AtomicBool,
    modes: Modes,
    cursor: AtomicU64,
    /// The guesses, from requests, about the pages that vCPUs touch next
    /// ([`SourceConfig::prefetch`]).
    pub(super) prefetch: Option<Prefetch>,
    governor: Mutex<Governor>,
    /// Closed while urgent pages are being answered.
    pub(super) gate: UrgentGate,
    /// Requested pages that follow on the bulk channels ([`SourceConfig::preempt`]).
    pub(super) in_order: Option<Mutex<VecDeque<RamPage>>>,
    /// The hashes of the bytes that the destination has
    /// ([`Tracking::Hash`](super::Tracking::Hash)).
    hashes: Option<SentHashes>,
    /// Whether the destination takes confirmations. Once it has refused one, it gets no more.
    confirms: AtomicBool,
}

impl<'a> Shared<'a> {
    pub(super) fn new(
        machine: &'a dyn Machine,
        ledger: Ledger,
        letters: &'a Mailbox<Letter>,
        config: &'a SourceConfig,
        vcpus: usize,
        hashes: Option<SentHashes>,
    ) -> Self {
        Self {
            machine,
            ram: machine.ram(),
            ledger,
            letters,
            patience: Patience::new(config.limits.silence),
            figures: Figures::default(),
            limiter: Limiter::new(),
            worked: Worked::default(),
            round_trip: AtomicU64::new(u64::MAX),
            generation: AtomicU32::new(1),
            ended: AtomicBool::new(false),
            modes: Modes::new(),
            cursor: AtomicU64::new(0),
            prefetch: (config.preempt && config.prefetch).then(|| Prefetch::new(vcpus)),
            governor: Mutex::new(Governor::new(
                config
                    .queue
                    .clamp(SourceConfig::MIN_QUEUE, SourceConfig::MAX_QUEUE),
                usize::from(config.bulk_channels),
            )),
            gate: UrgentGate::new(),
            in_order: (!config.preempt).then(Mutex::default),
            hashes,
            confirms: AtomicBool::new(false),
        }
    }

    /// Whether pages are confirmed from now on. Without hashes none is.
    pub(super) fn set_confirms(&self, confirms: bool) {
        self.confirms.store(confirms, Ordering::Release);
    }

    /// The hashes of what was sent, while pages are compared with them.
    pub(super) fn hashes(&self) -> Option<&SentHashes> {
        let hashes = self.hashes.as_ref();
        hashes.filter(|_| self.confirms.load(Ordering::Acquire))
    }

    /// The governor of the bulk channels. It bounds the push, and knows all frames.
    pub(super) fn governor(&self) -> MutexGuard<'_, Governor> {
        lock(&self.governor)
    }

    pub(super) fn mode(&self) -> Mode {
        self.turn().mode()
    }

    /// The mode with its number.
    pub(super) fn turn(&self) -> Turn {
        self.modes.turn()
    }

    /// Changes the mode. A thread that has claimed pages looks at the turn again, and gives them
    /// back if it has changed. So once this has returned and nothing is in flight, nothing is sent
    /// in the old mode. While the mode is [`Mode::Hold`], no thread claims a page. The supervisor
    /// rings the bells of the sending threads afterwards.
    pub(super) fn set_mode(&self, mode: Mode) {
        if mode == Mode::Push {
            self.governor().begin(monotonic_ns());
        }
        self.cursor.store(0, Ordering::Relaxed);
        self.ledger.set_closed(mode == Mode::Hold);
        self.modes.set(mode);
    }

    /// Takes a measured round trip into account.
    pub(super) fn note_round_trip(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.round_trip.fetch_min(ns, Ordering::Relaxed);
    }

    /// The least round trip to a thread of the destination and back. Zero before the first.
    pub(super) fn round_trip(&self) -> Duration {
        match self.round_trip.load(Ordering::Relaxed) {
            u64::MAX => Duration::ZERO,
            ns => Duration::from_nanos(ns),
        }
    }

    /// Where the next frame begins to look for unsent pages.
    pub(super) fn cursor(&self) -> usize {
        self.cursor.load(Ordering::Relaxed) as usize
    }

    /// Threads that store at once only make one of them look at pages that are not unsent.
    pub(super) fn set_cursor(&self, next: usize) {
        self.cursor.store(next as u64, Ordering::Relaxed);
    }

    /// Queues a requested page for the bulk channels. Returns false if the page has to be answered.
    pub(super) fn put_in_order(&self, page: RamPage) -> bool {
        let Some(pages) = self.in_order.as_ref().filter(|_| self.mode() == Mode::Push) else {
            return false;
        };
        let mut pages = lock(pages);
        // The push sends what is not in the queue too.
        if pages.len() < MAX_IN_ORDER && self.ledger.unsent().test(page) {
            pages.push_back(page);
        }
        true
    }

    /// Takes the page that was requested first, of those that follow on the bulk channels.
    pub(super) fn next_in_order(&self) -> Option<RamPage> {
        lock(self.in_order.as_ref()?).pop_front()
    }

    /// Whether channels of `generation` are still wanted.
    pub(super) fn is_current(&self, generation: Generation) -> bool {
        self.generation.load(Ordering::Acquire) == generation && !self.ended.load(Ordering::Acquire)
    }

    /// The index of a channel in the ledger.
    pub(super) fn ledger_index(id: ChannelId, bulk_channels: u16) -> usize {
        match id.role {
            crate::wire::Role::Urgent => usize::from(bulk_channels) + usize::from(id.index),
            _ => usize::from(id.index),
        }
    }

    /// Tells the supervisor when no page is without a receipt.
    pub(super) fn check_acknowledged(&self) {
        if self.ledger.unacknowledged() == 0 {
            self.letters.post(Letter::Happened(Event::AllAcknowledged));
        }
    }
}
