//! A channel that reaches the destination, and the one who decides about it.

use std::time::Duration;

use super::{Secret, Stranger};
use crate::channel::{ChannelError, Connection, OpenError, Origin, Wait};
use crate::wire::{Capabilities, ChannelKey, Hello, SessionId, Status, WELCOME_BYTES, path_check};

/// The result of the negotiation between the two sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    /// The protocol version.
    pub version: u16,
    /// The capabilities that both sides use.
    pub capabilities: Capabilities,
    /// The session.
    pub session: SessionId,
    /// The place of the channel in the session.
    pub key: ChannelKey,
}

/// The secret that a source must prove to know.
#[derive(Debug, Clone)]
pub enum Expected {
    /// A new one, which the source sends: the channel opens its session.
    New,
    /// That of the session.
    Known(Secret),
}

/// Decides about channels, in the thread of the [`Acceptor`](super::Acceptor). While a method runs,
/// no other connection is served. So no method may wait for the peer.
pub trait Router: Send + Sync {
    /// Returns the secret that the source of `hello` must know. `opens` is true for the first
    /// control channel of a session.
    ///
    /// Anyone may send a [`Hello`]. So this must not change any state.
    ///
    /// # Errors
    /// The status of a refusal.
    fn route(&self, hello: &Hello, opens: bool) -> Result<Expected, Status>;

    /// Takes a channel whose source knows the secret. Calls [`Arrival::welcome`] once its own state
    /// includes the channel, so that the source never hears of a channel that does not count.
    ///
    /// The state may have changed since [`route`](Self::route). So this decides again.
    ///
    /// # Errors
    /// The status of a refusal, made by [`Arrival::refused`].
    fn accepted(&self, arrival: Arrival) -> Result<(), Box<(Arrival, Status)>>;

    /// Reports a connection that did not become a channel.
    fn stranger(&self, stranger: Stranger);

    /// Reports that no connection can be accepted at the moment: the process or the host has no
    /// descriptors or no memory left. It is called once until a connection is accepted again.
    fn cannot_accept(&self, error: &OpenError);
}

/// A channel whose source knows the secret. The source waits for the destination's last word.
#[derive(Debug)]
pub struct Arrival {
    pub(super) connection: Connection,
    pub(super) agreed: Agreed,
    pub(super) secret: Secret,
    pub(super) welcome: [u8; WELCOME_BYTES],
}

impl Arrival {
    /// The result of the negotiation: session, channel and capabilities.
    #[must_use]
    pub const fn agreed(&self) -> &Agreed {
        &self.agreed
    }

    /// The secret of the session.
    #[must_use]
    pub const fn secret(&self) -> &Secret {
        &self.secret
    }

    /// The address of the source, for people.
    #[must_use]
    pub fn peer(&self) -> &str {
        self.connection.peer()
    }

    /// The host of the source, for shares of places.
    #[must_use]
    pub const fn origin(&self) -> Origin {
        self.connection.origin()
    }

    /// Tells the source that the channel is open, and returns the connection. Does not wait.
    ///
    /// # Errors
    /// [`ChannelError`] if the source is gone. The channel is lost then.
    pub fn welcome(mut self) -> Result<Connection, ChannelError> {
        self.connection.version = self.agreed.version;
        // The socket's buffer is empty, so both messages fit: the kernel lets it grow to twenty
        // packets. The first is in a small packet of its own.
        for (bytes, what) in [(&self.welcome[..], "Welcome"), (path_check(), "PathCheck")] {
            let at_once = Wait::block(what).within(Duration::ZERO);
            self.connection.write_all(bytes, &at_once)?;
        }
        Ok(self.connection)
    }

    /// Returns the error with which [`Router::accepted`] refuses the channel.
    #[must_use]
    pub fn refused(self, status: Status) -> Box<(Self, Status)> {
        Box::new((self, status))
    }
}
