//! How do two hosts prove who they are?
//!
//! **Guarantee.** A connection carries no byte before both ends have shown a certificate of the
//! configured CA. TLS 1.3 is the only version, and no session is resumed. Each failure has a
//! sentence that says what is wrong and what would be right, at both ends.
//!
//! **Mechanism.** [`Tls`] says where the certificates are, and [`TlsConfig`] is what they hold. It
//! makes the state of rustls for one connection. [`TlsError`] has the reasons of rustls in this
//! project's words. Without the feature `tls` only that error and the readers of foreign bytes
//! are left.
//!
//! **Neighbours.** [`channel`](crate::channel) moves the bytes of connections. This module must not
//! know sockets, nor what the bytes mean.

#[cfg(feature = "tls")]
mod config;
#[cfg(feature = "tls")]
mod contents;
mod error;
mod file;
mod first_bytes;
#[cfg(feature = "tls")]
mod kinds;
#[cfg(feature = "tls")]
mod pem;
#[cfg(feature = "tls")]
mod reasons;
#[cfg(feature = "tls")]
mod verifier;

#[cfg(feature = "tls")]
pub use config::TlsConfig;
pub use error::TlsError;
pub use file::read_regular_file;
pub use first_bytes::FirstBytes;
#[cfg(feature = "tls")]
pub use pem::{Pem, Tls, TlsFiles, TlsPem};

/// The version of TLS on every connection that has it.
pub const TLS_VERSION: &str = "TLS 1.3";
