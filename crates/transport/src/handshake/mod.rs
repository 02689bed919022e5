//! The handshake: opens the channels of a session.
//!
//! **Guarantee.** A channel is open at both sides only if both know the secret of the session, and
//! agree on version, capabilities and the place of the channel. No connection of a stranger becomes
//! a channel, not even with bytes of an earlier connection. No stranger keeps a source out: it may
//! send garbage, stop half way or send nothing at all.
//!
//! **Mechanism.** The source dials (`dial`), with TLS or without. Six messages follow:
//!
//! | step | sender | message | meaning |
//! |---|---|---|---|
//! | 1 | source | [`Hello`](crate::wire::Hello) | version, session and channel |
//! | 2 | destination | [`HelloReply`](crate::wire::HelloReply) | a nonce, or a refusal |
//! | 3 | source | [`Credentials`](crate::wire::Credentials) | a proof over steps 1 and 2 |
//! | 4 | source | `path_check` | bytes that need large packets |
//! | 5 | destination | [`Welcome`](crate::wire::Welcome) | its own proof, or a refusal |
//! | 6 | destination | `path_check` | as in step 4 |
//!
//! Neither side counts a channel as open before the large packets of the other have come. So a VM
//! is not handed over to a path that carries short messages only.
//!
//! The channel that opens a session carries the secret in step 3. Without TLS, an observer on the
//! path reads it there. So plain TCP is for loopback addresses unless the user allows more
//! ([`PlainPolicy`]). The destination's [`Acceptor`] serves all pending connections in one thread.
//! Their number is bounded, and so is the time of each. `crowd` chooses who makes room. A
//! [`Router`] decides what becomes of them.
//!
//! **Neighbours.** [`wire`](crate::wire) has the messages, [`channel`](crate::channel) the sockets
//! and TLS. This module must not know what is sent afterwards.

mod acceptor;
mod admission;
mod arrival;
mod crowd;
mod dial;
mod error;
mod pending;
mod protection;
mod secret;

pub use acceptor::Acceptor;
pub use admission::Admission;
pub use arrival::{Agreed, Arrival, Expected, Router};
pub use crowd::place_to_take;
pub use dial::{Opened, dial, open_on};
pub use error::{HandshakeError, Stranger, StrangerError};
pub use protection::{PlainPolicy, Protection};
pub use secret::{Identity, Secret, random_bytes};

/// The longest time from a connection to its complete preamble, at the destination.
pub const HELLO_LIMIT: std::time::Duration = std::time::Duration::from_secs(5);
