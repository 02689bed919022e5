//! TLS below the channels.
//!
//! **Guarantee.** A connection with TLS carries no byte before both ends have shown a certificate
//! of the configured CA. TLS 1.3 is the only version, and no session is resumed. Each failure has a
//! sentence that says what is wrong and what would be right, at both ends.
//!
//! **Mechanism.** [`Tls`] says where the certificates are, and [`TlsConfig`] is what they hold. A
//! [`Session`] is the state of one connection: rustls and the encrypted bytes that rustls has not
//! taken yet. Each of its steps moves bytes without waiting. So its lock is never held across a
//! wait. Without the feature `tls` these three types have no value, and a call on them is no code.
//!
//! **Neighbours.** [`Connection`](super::Connection) calls the steps and waits between them.

#[cfg(not(feature = "tls"))]
mod absent;
#[cfg(feature = "tls")]
mod config;
#[cfg(feature = "tls")]
mod contents;
mod error;
#[cfg(feature = "tls")]
mod pem;
#[cfg(feature = "tls")]
mod reasons;
#[cfg(feature = "tls")]
mod session;
#[cfg(feature = "tls")]
mod verifier;

#[cfg(not(feature = "tls"))]
pub(super) use absent::Session;
#[cfg(not(feature = "tls"))]
pub use absent::{Tls, TlsConfig};
#[cfg(feature = "tls")]
pub use config::TlsConfig;
pub use error::TlsError;
#[cfg(feature = "tls")]
pub use pem::{Pem, Tls, TlsFiles, TlsPem};
#[cfg(feature = "tls")]
pub(super) use session::Session;

/// The version of TLS on every channel that has it.
pub const TLS_VERSION: &str = "TLS 1.3";

/// The most plaintext that one step moves, in bytes. It bounds the time for which the lock is held.
pub(super) const STEP_BYTES: usize = 128 << 10;

/// The result of a step that sends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    /// The encrypted bytes that the socket took.
    pub(super) moved: usize,
    /// Encrypted bytes are left, and the socket is full.
    pub(super) blocked: bool,
}
