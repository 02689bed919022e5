//! How do two hosts meet?
//!
//! **Guarantee.** A connection carries no message before both ends have proved who they are. No
//! stranger keeps a peer out, whatever it sends and however often it connects. Every wait has an
//! end that its caller sets. Each failure has a sentence that says what is wrong and what would be
//! right, at both ends.
//!
//! **Mechanism.** An [`Address`](address::Address) names a peer. [`Connection`] moves bytes, with
//! TLS or without; [`tls`] has the certificates. `handshake` opens channels: one side dials, and
//! the other has an acceptor whose room is bounded. A [`Mailbox`] lets a thread wait for letters
//! and for descriptors, and a [`Quota`] bounds what peers make this side say. A [`Room`] has a
//! bounded number of clients, each with a thread.
//!
//! **Neighbours.** Below: `hostfs` makes the files of unix sockets. Above: `migration`, the tunnel
//! of `bridge`, and `remote`. This crate must not know what a channel carries.

pub mod address;
mod bell;
pub mod channel;
pub mod handshake;
mod mailbox;
mod nap;
mod quota;
mod room;
pub mod tls;
#[doc(hidden)]
pub mod wire;

pub use bell::Bell;
pub use channel::{
    AdoptError, ChannelError, Connection, Listener, OpenError, Spinner, Stream, Tls, TlsConfig,
    Wait,
};
pub use handshake::{HandshakeError, PlainPolicy, Protection, Stranger, StrangerError};
pub use mailbox::Mailbox;
pub use nap::sleep_on;
pub use quota::Quota;
pub use room::{Guest, MIN_IDLE, Room};
#[cfg(feature = "tls")]
pub use tls::{Pem, TlsFiles, TlsPem};
pub use tls::{TLS_VERSION, TlsError};

/// Runs the examples of the README.
#[cfg(all(doctest, feature = "tls"))]
#[doc = include_str!("../README.md")]
mod readme {}
