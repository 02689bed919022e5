//! The preamble of a channel: pure functions between messages and bytes.
//!
//! **Guarantee.** For any bytes of a peer, a decoder returns a message with every field checked, or
//! a [`WireError`] with the offending values. It never panics, never reads past its input, and
//! allocates nothing. A decoded message equals the encoded one.
//!
//! **Mechanism.** Structs have a fixed little-endian layout (zerocopy). Reserved bytes must be
//! zero. Checksums are xxh3-64. In Pageferry's repository, docs/wire-format.md describes every byte
//! with its reason.
//!
//! **Neighbours.** [`handshake`](crate::handshake) sends and reads these messages. The rooms above
//! make formats of their own with the same errors and checksums. This module must not do I/O.

mod capabilities;
mod channel_key;
mod checksum;
mod error;
mod hello;
mod hello_reply;
mod path_check;
mod proof;
mod status;

pub use crate::tls::FirstBytes;
pub use capabilities::Capabilities;
pub use channel_key::{ChannelKey, Role, SessionId, Side};
pub use checksum::{Xxh3, check, xxh3_64, xxh3_64_seeded};
pub use error::{WireError, in_range, reserved_zero};
pub use hello::{Hello, check_magic};
pub use hello_reply::HelloReply;
pub use path_check::{path_check, verify_path_check};
pub use proof::{Credentials, Welcome};
pub use status::Status;

/// The newest protocol version this side speaks.
pub const VERSION: u16 = 7;
/// The oldest protocol version this side speaks.
pub const MIN_VERSION: u16 = 7;
/// The first eight bytes of every connection, in both directions.
pub const HELLO_MAGIC: [u8; 8] = *b"PGFERRY\0";

/// The length of a [`Hello`] and of a [`HelloReply`], in bytes.
pub const HELLO_BYTES: usize = 64;
/// The first four bytes of [`Credentials`].
pub const CREDENTIALS_MAGIC: [u8; 4] = *b"PGFC";
/// The first four bytes of a [`Welcome`].
pub const WELCOME_MAGIC: [u8; 4] = *b"PGFW";
/// The length of [`Credentials`], in bytes.
pub const CREDENTIALS_BYTES: usize = 80;
/// The length of a [`Welcome`], in bytes.
pub const WELCOME_BYTES: usize = 48;
/// The length of a `path_check`, in bytes: more than any packet of an Ethernet has.
pub const PATH_CHECK_BYTES: usize = 16 << 10;
/// The length of a session's secret, in bytes.
pub const SECRET_BYTES: usize = 32;
/// The length of a proof, in bytes.
pub const PROOF_BYTES: usize = 32;
/// The length of a page, in bytes. Only base pages are sent.
pub const PAGE_BYTES: usize = pageferry_addr::PAGE_SIZE as usize;
