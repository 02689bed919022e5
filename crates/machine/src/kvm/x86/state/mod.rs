//! The whole state of a vCPU as bytes, and back.
//!
//! `codec` is pure: bytes to [`Parts`] and back, every bound checked. `transfer` moves [`Parts`]
//! between the kernel and this process. The bytes come from another process, so the codec trusts
//! nothing in them. KVM checks every value that it gets, and refuses well-formed but impossible
//! ones.

mod codec;
mod transfer;

pub(super) use codec::{Parts, SharedPage, Special};
pub(super) use transfer::{Late, check, load, store};
