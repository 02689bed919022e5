//! What does an ECALL of a RISC-V guest mean?
//!
//! **Guarantee.** A call with any registers gets an answer, and none panics. Operands are checked
//! before the [`Platform`] acts, so a refused call has no effect. A call that meets a missing page
//! of guest memory has no effect, and may be repeated.
//!
//! **Mechanism.** [`serve`] is a function of the registers. It calls the [`Platform`] for what
//! needs other harts, the clock, the console or memory. It returns what the calling hart does next.
//!
//! Source of all numbers and rules: RISC-V Supervisor Binary Interface Specification, version 2.0.
//!
//! | extension | module |
//! |---|---|
//! | base, TIME, IPI, RFENCE, SRST | `serve` |
//! | HSM (hart state management) | `hsm` |
//! | DBCN (debug console) | `console` |
//!
//! The legacy calls of SBI 0.1 (extensions 0 to 8) are not served: TIME, IPI, RFENCE, SRST and DBCN
//! have replaced them. A kernel that prints by the legacy console only boots in silence.
//!
//! **Neighbours.** Below: nothing. Above: `machine`, whose harts call it. This crate must not know
//! how a hart runs, nor where memory is.

#![no_std]

mod console;
mod hsm;
mod mask;
mod platform;
mod serve;

pub use hsm::HartStatus;
pub use mask::HartMask;
pub use platform::{Bare, Fence, Memory, Platform, StartError};
pub use serve::{Call, Next, Reset, ResetKind, serve};

/// The errors that calls return in `a0` (SBI 2.0, table 1).
pub mod error {
    /// The call succeeded.
    pub const SUCCESS: i64 = 0;
    /// It failed for no other reason of this list.
    pub const FAILED: i64 = -1;
    /// There is no such extension or function.
    pub const NOT_SUPPORTED: i64 = -2;
    /// An operand has no meaning.
    pub const INVALID_PARAM: i64 = -3;
    /// An address is not valid.
    pub const INVALID_ADDRESS: i64 = -5;
    /// The hart is started already.
    pub const ALREADY_AVAILABLE: i64 = -6;
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
