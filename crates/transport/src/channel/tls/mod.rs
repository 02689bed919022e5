//! TLS below the channels.
//!
//! **Guarantee.** A connection with TLS carries no byte before both ends have shown a certificate
//! of the configured CA, as [`crate::tls`] says.
//!
//! **Mechanism.** A [`Session`] is the state of one connection: rustls and the encrypted bytes that
//! rustls has not taken yet. Each of its steps moves bytes without waiting. So its lock is never
//! held across a wait. Without the feature `tls`, [`Tls`], [`TlsConfig`] and [`Session`] have no
//! value, and a call on them is no code.
//!
//! **Neighbours.** [`Connection`](super::Connection) calls the steps and waits between them.
//! [`crate::tls`] has the certificates and the errors.

#[cfg(not(feature = "tls"))]
mod absent;
#[cfg(feature = "tls")]
mod session;

#[cfg(feature = "tls")]
pub use crate::tls::{Pem, Tls, TlsConfig, TlsFiles, TlsPem};
pub use crate::tls::{TLS_VERSION, TlsError};
#[cfg(not(feature = "tls"))]
pub(super) use absent::Session;
#[cfg(not(feature = "tls"))]
pub use absent::{Tls, TlsConfig};
#[cfg(feature = "tls")]
pub(super) use session::Session;

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
