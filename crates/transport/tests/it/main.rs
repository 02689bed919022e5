//! All integration tests of the transport.

mod channel;
mod handshake;
mod preamble;
mod tls;
