//! TLS below the channels.
//!
//! **Guarantee.** A connection with TLS carries no byte before both ends have shown a certificate
//! of the configured CA. TLS 1.3 is the only version, and no session is resumed. Each failure has a
//! sentence that says what is wrong and what would be right, at both ends.
//!
//! **Mechanism.** [`TlsFiles`] names the files and [`TlsConfig`] is what they hold. A [`Session`]
//! is the state of one connection: rustls and the encrypted bytes that rustls has not taken yet.
//! Each of its steps moves bytes without waiting. So its lock is never held across a wait.
//!
//! **Neighbours.** [`Connection`](super::Connection) calls the steps and waits between them.

mod config;
mod contents;
mod error;
mod session;
mod verifier;

pub use config::{TLS_VERSION, TlsConfig, TlsFiles};
pub use error::TlsError;
pub(super) use session::{STEP_BYTES, Sent, Session};
