//! Snapshots of another Pageferry, which shares files over mutual TLS.
//!
//! **Guarantee.** Bytes are checked before anyone sees them, lengths before memory is allocated.
//! A server gives nothing to a peer without a certificate of its CA, and nothing outside of what it
//! shares. A client notices when the file at the server is another one than at the start.
//!
//! **Mechanism.** [`wire`] has the frames: `docs/snapshot-protocol.md` has them byte by byte.
//! [`talk`] is the client's side and [`answer`] the server's, both over any stream. A connection is
//! a channel of `transport`, and carries one request at a time. [`PeerStore`] opens up to
//! [`MAX_CONNECTIONS`] of them a file, and [`Server`] has a thread for each.
//!
//! **Neighbours.** Below: the crate `transport` opens connections and has room for them.
//! [`FileSource`](crate::FileSource) reads what the server shares.

mod address;
#[doc(hidden)]
pub mod answer;
mod client;
mod error;
mod server;
mod shares;
mod store;
#[doc(hidden)]
pub mod talk;
#[doc(hidden)]
pub mod wire;

pub use client::MAX_CONNECTIONS;
pub use error::PeerError;
pub use server::{Limits, ServeError, Server};
pub use shares::{ShareError, Shares};
pub use store::PeerStore;
pub use wire::Code;
