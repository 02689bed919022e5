//! The control socket of a VM.
//!
//! **Guarantee.** Only the user who started the VM can reach it: the unix socket has mode 0600 from
//! its first moment on. No client can harm the VM, by anything that it sends or does not send.
//! Lines are bounded. An invalid request is answered with an error object. A client that vanishes
//! or does not read is dropped.
//!
//! **Mechanism.** One JSON object per line in both directions ([`protocol`]). One thread per
//! connection ([`server`]) passes each request to the VM's [`server::Service`]. A connection may
//! carry several requests in turn. After a `console` request it carries text and keys instead
//! ([`attached`]). [`client`] is the other side.

mod attached;
pub(crate) mod change;
pub(crate) mod client;
mod line;
pub(crate) mod options;
pub(crate) mod protocol;
pub(crate) mod server;

/// The maximum length of a request in bytes, without its newline.
pub(crate) const MAX_REQUEST_BYTES: usize = 64 << 10;
/// The maximum number of clients attached to the console at once. Fewer than all clients, so that
/// other requests find room.
pub(crate) const MAX_ATTACHED: usize = 4;
/// The maximum length of an answer in bytes, with room for the samples of a report.
pub(crate) const MAX_ANSWER_BYTES: usize = 16 << 20;
