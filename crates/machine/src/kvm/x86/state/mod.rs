//! The whole state of a vCPU as bytes, and back.
//!
//! `codec` is pure: bytes to [`Parts`] and back, every bound checked. `transfer` moves [`Parts`]
//! between the kernel and us. The bytes come from another process: the codec trusts nothing in
//! them, and what is well-formed but impossible is refused by KVM, which checks every value it is
//! given.

mod codec;
mod transfer;

pub(super) use codec::{Parts, Special};
pub(super) use transfer::{load, store};
