//! Sockets: the thin shell that moves the wire format's bytes.
//!
//! **Guarantee.** Every wait ends: by bytes, by the operation's limit, by the caller's `stop`, by
//! [`Connection::shutdown`] from another thread, or by the peer's end. A peer that ends between two
//! messages ([`ChannelError::Closed`]), in the middle of one ([`WireError::Truncated`]) and by a
//! reset ([`ChannelError::Lost`]) are told apart. No signal is raised by a dead peer.
//!
//! **Mechanism.** Non-blocking calls and `poll`, TCP (always without Nagle's delay) or unix sockets
//! behind one [`Connection`]. How a reader waits is its caller's choice ([`WaitPolicy`]): a
//! sleeping wake-up across cores costs ten times a spinning one. Guest memory is sent from and
//! received into where it lies ([`RawSlice`]).
//!
//! **Neighbours.** [`handshake`](crate::handshake) opens the two connections of a migration. It
//! must not know frames, pages or machines.
//!
//! [`WireError::Truncated`]: crate::wire::WireError::Truncated

mod connect;
mod connection;
mod error;
mod listener;
mod raw;
mod spinner;
mod wait;

pub use connection::Connection;
pub use error::{ChannelError, OpenError};
pub use listener::Listener;
pub use raw::RawSlice;
pub use spinner::Spinner;
pub use wait::{Wait, WaitPolicy};
