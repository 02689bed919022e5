//! How a running virtual machine moves.
pub mod address;
pub mod channel;
pub mod handshake;
pub mod wire;
