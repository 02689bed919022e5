//! Sockets: a thin layer that moves the wire format's bytes.
//!
//! **Guarantee.** Every wait ends: by bytes, by a silence as long as its limit, by the caller's
//! `stop`, by [`Connection::shutdown`] from another thread, or by the end of the connection. Errors
//! distinguish a close between two messages ([`ChannelError::Closed`]), a close within a message
//! ([`WireError::Truncated`]) and a reset ([`ChannelError::Lost`]). A dead peer raises no signal.
//!
//! **Mechanism.** Non-blocking calls and `poll`, TCP (always without Nagle's delay) or unix sockets
//! behind one [`Connection`], with TLS or without ([`TlsConfig`]). The caller chooses how a reader
//! waits ([`WaitPolicy`]): a wake-up across cores costs ten times as much as spinning. A plain
//! connection sends and receives guest memory without a copy ([`RawSlice`]).
//!
//! **Neighbours.** [`handshake`](crate::handshake) opens the channels of a migration. This module
//! must not know frames, pages or machines.
//!
//! [`WireError::Truncated`]: crate::wire::WireError::Truncated

mod adopt;
mod connect;
mod connection;
mod error;
mod listener;
mod names;
mod origin;
mod race;
mod raw;
mod secure;
mod send;
mod spinner;
mod stream;
mod tls;
mod wait;

pub use connect::is_local;
pub use connection::Connection;
pub use error::{AdoptError, ChannelError, OpenError};
pub use listener::Listener;
pub(crate) use names::is_elsewhere;
pub use names::resolve;
pub use origin::Origin;
pub use raw::RawSlice;
pub use spinner::Spinner;
pub use stream::Stream;
#[cfg(feature = "tls")]
pub use tls::{Pem, TlsFiles, TlsPem};
pub use tls::{TLS_VERSION, Tls, TlsConfig, TlsError};
pub use wait::{Wait, WaitPolicy};
