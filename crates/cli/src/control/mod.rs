//! The control socket of a VM.
//!
//! **Guarantee.** Only the user who started the VM can reach it (a unix socket of mode 0600, from
//! its first moment on). Whatever a client sends or leaves unsent, the VM is unharmed: lines are
//! bounded, nonsense is answered with an error object, a client that vanishes or does not read is
//! dropped.
//!
//! **Mechanism.** One JSON object a line in both directions ([`protocol`]). A thread a connection
//! ([`server`]), which hands each request to the VM's [`server::Service`]; several requests may
//! follow each other on one connection. [`client`] is the other side.

pub(crate) mod client;
mod line;
pub(crate) mod protocol;
pub(crate) mod server;

/// The longest request, in bytes, its newline not counted.
pub(crate) const MAX_REQUEST_BYTES: usize = 64 << 10;
/// The longest answer, in bytes: room for the samples of a report.
pub(crate) const MAX_ANSWER_BYTES: usize = 16 << 20;
