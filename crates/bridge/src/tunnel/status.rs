//! What a tunnel does, for people and programs.

use super::end::StreamState;
use pageferry_migration::{Name, OpenError, TlsError};
use std::time::Duration;

/// The state of a session.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionState {
    /// The route.
    pub route: Name,
    /// The id of the session, the same at both ends. Empty at a near end that has not reached the
    /// far one yet.
    pub session: String,
    /// The other end.
    pub peer: Option<String>,
    /// The streams, in the order of opening.
    pub streams: Vec<StreamState>,
    /// The connections that work, of those that there should be.
    pub links: (u16, u16),
    /// The measured rate of the connections for bulk data, in bytes a second.
    pub rate: u64,
    /// The bytes that this end keeps until they are delivered, and those that wait for the VMM.
    pub kept: (u64, u64),
    /// The most that were kept, both together.
    pub most_kept: u64,
    /// The time without any connection, if there is none.
    pub lost_for: Option<Duration>,
    /// Why a connection was lost, or could not be opened, the last time.
    pub last_loss: Option<String>,
    /// How often all connections were lost.
    pub losses: u64,
    /// The longest time without any connection.
    pub longest_loss: Duration,
    /// Whether the VMM has sent all that it has for now, for a second at least, and waits. So the
    /// other one may run the VM, and a cut of the streams may let it run twice. At a near end only.
    pub in_doubt: bool,
    /// The time since the start.
    pub runs_for: Duration,
}

impl SessionState {
    /// The bytes that the VMMs of this end have written, and those that they were given.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        let sum = |of: fn(&StreamState) -> u64| self.streams.iter().map(of).sum();
        (sum(|stream| stream.sent), sum(|stream| stream.received))
    }
}

/// Something that happens to a session.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// A session has begun.
    Began,
    /// A VMM's stream was opened: its number.
    Opened(u32),
    /// A stream of the other VMM cannot be opened here: its number, and why. It ends.
    Unopened(u32, String),
    /// The far end was not reached yet: why. It is tried again.
    Unreached(String),
    /// The last connection is lost.
    Lost(String),
    /// There are connections again, after this time.
    Back(Duration),
    /// The streams are not cut, for all that this has happened: the session is
    /// [in doubt](SessionState::in_doubt).
    Held(Failure),
    /// All streams have ended.
    Ended,
    /// The session has failed.
    Failed(Failure),
    /// Somebody connected who is no tunnel.
    Stranger(String),
}

/// Hears what happens, on the threads to which it happens. It must not wait.
pub trait Observer: Send + Sync {
    /// Something has happened, to the session if there is one.
    fn event(&self, session: Option<&SessionState>, event: &Event);
}

/// Why an end of a tunnel cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// An address cannot be listened on.
    #[error(transparent)]
    Listen(#[from] OpenError),
    /// The certificates do not serve.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The host has no room for a thread or a descriptor.
    #[error("no room for a thread: {0}")]
    Host(#[from] std::io::Error),
}

/// The reason for the end of a session whose streams had not ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The other end cannot be reached, and never could.
    #[error("{0}")]
    Unreachable(String),
    /// The other end could not prove who it is, or this side could not.
    #[error("{0}")]
    Untrusted(String),
    /// The two ends do not know each other, or do not fit.
    #[error("{0}")]
    Refused(String),
    /// The connections were lost for too long.
    #[error("the connections were lost for {} s: {why}", after.as_secs())]
    GaveUp {
        /// For how long.
        after: Duration,
        /// The last reason.
        why: String,
    },
    /// The other end says why it ended.
    #[error("the other end of the tunnel: {0}")]
    Told(String),
    /// The other end does not keep to the protocol.
    #[error("the other end of the tunnel sends what no tunnel sends: {0}")]
    Protocol(String),
    /// A VMM cannot be reached.
    #[error("{0}")]
    NoVmm(String),
    /// This side was asked to end.
    #[error("cancelled: the streams were cut")]
    Cancelled,
    /// The host refused something.
    #[error("{0}")]
    Host(String),
}
