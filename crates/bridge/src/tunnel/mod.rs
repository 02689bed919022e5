//! Carries migration streams between two hosts, over connections that may break.
//!
//! **Guarantee.** Each direction of each stream arrives as it was written, and so does its end: no
//! byte is lost, comes twice or out of order. A session outlives its connections for as long as
//! both processes live. Memory is bounded by the window.
//!
//! **Mechanism.** A VMM connects to the [`Near`] end on its host. The [`Far`] end connects to the
//! other VMM on its own. Streams are opened in the same order there. A session has one connection
//! for urgent data, and some for the rest. Bytes are numbered, and kept until the other VMM has
//! taken them. A lost connection is opened again, and what was under way on it is sent again.
//!
//! | file | contents |
//! |---|---|
//! | `end` | one end of a session, as functions without I/O |
//! | `flow` | one direction of a stream: what is kept, sent again and dropped |
//! | `recognise` | which bytes vCPUs wait for |
//! | `record` | the bytes on the connections |
//! | `session` | the thread that moves bytes between sockets |
//! | `link` | the sockets |
//! | `near`, `dial`, `far` | how sessions begin, and get their connections |
//! | `model` | a search of all states of two ends and a network that cuts and delays |
//!
//! While vCPUs wait for pages, the bulk of the data never fills the link's queue: the [governor] of
//! post-copy bounds what is under way. So an urgent page waits for about [`Config::queue`].
//!
//! **Neighbours.** `migration` has the handshake, the sockets, TLS and the governor.
//!
//! [governor]: pageferry_migration::Governor

mod dial;
#[doc(hidden)]
pub mod end;
mod far;
mod flow;
mod link;
#[cfg(test)]
mod model;
mod near;
mod recognise;
#[doc(hidden)]
pub mod record;
mod session;
mod status;

pub use end::{Limits, StreamState};
pub use far::Far;
pub use near::Near;
pub use recognise::Kind;
pub use status::{Event, Failure, Observer, SessionState, StartError};

use pageferry_hostfs::Owner;
use pageferry_migration::{Name, Tls, TlsError};
use pageferry_transport::Mailbox;
use pageferry_transport::address::Address;
use pageferry_transport::handshake::{PlainPolicy, Protection};
use session::{Board, Letter};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// A named way from a VMM to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The name, the same at both ends.
    pub name: Name,
    /// At a near end, where VMMs connect. At a far end, where the VMM listens.
    pub address: Address,
}

/// The choices for an end of a tunnel.
#[derive(Clone, Debug)]
pub struct Config {
    /// The window, and which streams are urgent.
    pub limits: Limits,
    /// The connections for data that nobody waits for, 1 to [`MAX_CHANNELS`]. A near end chooses.
    pub channels: u16,
    /// The time for which such data may keep the link busy. An urgent page waits about as long.
    pub queue: Duration,
    /// The limits of silence.
    pub patience: pageferry_migration::Limits,
    /// The certificates for TLS. `None`: without TLS.
    pub tls: Option<Tls>,
    /// Where connections without TLS may lead.
    pub plain: PlainPolicy,
    /// Owner and mode of unix sockets at which VMMs connect.
    pub owner: Owner,
}

/// The most connections for data that nobody waits for.
pub const MAX_CHANNELS: u16 = 16;

impl Config {
    /// The default window: 64 MiB.
    pub const WINDOW: u64 = 64 << 20;
    /// The default of [`Self::queue`]. A VMM brings data in bursts, which our own migration does
    /// not. So a tunnel needs a longer queue to keep the link busy.
    pub const QUEUE: Duration = Duration::from_micros(250);
    /// The least window: 1 MiB.
    pub const LEAST_WINDOW: u64 = 1 << 20;

    fn protection(&self) -> Result<Protection, TlsError> {
        Ok(match &self.tls {
            Some(tls) => Protection::Tls(tls.load()?),
            None => Protection::Plain(self.plain),
        })
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            limits: Limits {
                window: Self::WINDOW,
                urgent: None,
            },
            channels: 1,
            queue: Self::QUEUE,
            patience: pageferry_migration::Limits::default(),
            tls: None,
            plain: PlainPolicy::default(),
            owner: Owner::default(),
        }
    }
}

/// Letters to the thread of a session.
type Letters = Arc<Mailbox<Letter>>;

/// The threads of an end.
#[derive(Default)]
struct Threads(Mutex<Vec<JoinHandle<()>>>);

impl Threads {
    fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(work)?;
        let mut threads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }

    /// Waits for their ends. They have been asked to end.
    fn join(&self) {
        let threads = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // Its panic message was printed already.
            let _ = thread.join();
        }
    }
}

fn new_board(route: Name, session: String) -> Board {
    Arc::new(Mutex::new(SessionState {
        route,
        session,
        peer: None,
        streams: Vec::new(),
        links: (0, 0),
        rate: 0,
        kept: (0, 0),
        most_kept: 0,
        lost_for: None,
        last_loss: None,
        losses: 0,
        longest_loss: Duration::ZERO,
        in_doubt: false,
        runs_for: Duration::ZERO,
    }))
}

fn read(board: &Board) -> SessionState {
    board.lock().unwrap_or_else(PoisonError::into_inner).clone()
}
