//! Calls, and what the calling hart does next.

use crate::{Fence, HartMask, Platform, console, error, hsm};

/// The version that this crate serves: 2.0.
const VERSION: u64 = 2 << 24;
/// The number of this implementation. The specification lists those of others, up to 12.
const IMPLEMENTATION: u64 = 0x5046;
const IMPLEMENTATION_VERSION: u64 = 1;

const BASE: u64 = 0x10;
const TIME: u64 = 0x5449_4d45;
const IPI: u64 = 0x73_5049;
const RFENCE: u64 = 0x5246_4e43;
const SRST: u64 = 0x5352_5354;

/// An ECALL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// `a7`.
    pub extension: u64,
    /// `a6`.
    pub function: u64,
    /// `a0` to `a5`.
    pub args: [u64; 6],
}

impl Call {
    /// The call of a hart with these `a0` to `a7`.
    #[must_use]
    pub const fn from_registers(a: [u64; 8]) -> Self {
        let [a0, a1, a2, a3, a4, a5, function, extension] = a;
        Self {
            extension,
            function,
            args: [a0, a1, a2, a3, a4, a5],
        }
    }
}

/// What the calling hart does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It goes on behind the ECALL, with these values in `a0` and `a1`.
    Return {
        /// `a0`: 0, or one of [`error`].
        error: i64,
        /// `a1`.
        value: u64,
    },
    /// It stops, until another hart starts it.
    Stop,
    /// It waits until an interrupt is pending that it has enabled.
    ///
    /// Without `resume` it then goes on behind the ECALL, with 0 in `a0` and `a1`. Else it begins
    /// at the address, as a hart that was started, with the second value in `a1`.
    Suspend {
        /// The address and the value.
        resume: Option<(u64, u64)>,
    },
    /// The guest wants no hart to run any further.
    Reset(Reset),
}

/// The end of a guest, as it asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reset {
    /// The action that is to follow.
    pub kind: ResetKind,
    /// Whether the guest calls it a failure of the system.
    pub failure: bool,
}

/// The action after the end of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetKind {
    /// Nothing.
    Shutdown,
    /// A new start.
    Reboot,
}

pub(crate) fn answer<E>(error: i64, value: u64) -> Result<Next, E> {
    Ok(Next::Return { error, value })
}

pub(crate) fn returned<E>(value: u64) -> Result<Next, E> {
    answer(error::SUCCESS, value)
}

pub(crate) fn refuse<E>(error: i64) -> Result<Next, E> {
    answer(error, 0)
}

/// Serves `call`.
///
/// # Errors
/// When a page of guest memory that the call needs is not here. The call had no effect: repeat it
/// when the page is there.
pub fn serve<P: Platform>(call: &Call, platform: &mut P) -> Result<Next, P::Again> {
    let [a0, a1, a2, a3, a4, _] = call.args;
    match (call.extension, call.function) {
        (BASE, 0) => returned(VERSION),
        (BASE, 1) => returned(IMPLEMENTATION),
        (BASE, 2) => returned(IMPLEMENTATION_VERSION),
        (BASE, 3) => returned(has_extension(a0).into()),
        // The ids of vendor, architecture and implementation: 0, which says nothing.
        (BASE, 4..=6) => returned(0),
        (TIME, 0) => {
            platform.set_timer(a0);
            returned(0)
        }
        (IPI, 0) => {
            let Some(harts) = HartMask::new(a0, a1, platform.harts()) else {
                return refuse(error::INVALID_PARAM);
            };
            platform.send_ipi(harts);
            returned(0)
        }
        (RFENCE, 0..=2) => {
            let Some(harts) = HartMask::new(a0, a1, platform.harts()) else {
                return refuse(error::INVALID_PARAM);
            };
            let fence = match call.function {
                0 => Fence::Code,
                function => Fence::Translations {
                    start: a2,
                    bytes: a3,
                    asid: (function == 2).then_some(a4),
                },
            };
            platform.fence(harts, fence);
            returned(0)
        }
        (SRST, 0) => reset(a0, a1),
        (hsm::EXTENSION, _) => hsm::serve(call, platform),
        (console::EXTENSION, _) => console::serve(call, platform),
        _ => refuse(error::NOT_SUPPORTED),
    }
}

const fn has_extension(extension: u64) -> bool {
    matches!(
        extension,
        BASE | TIME | IPI | RFENCE | SRST | hsm::EXTENSION | console::EXTENSION
    )
}

/// System reset (SBI 2.0, chapter 10). Type and reason have 32 bits.
fn reset<E>(kind: u64, reason: u64) -> Result<Next, E> {
    let kind = match kind & 0xffff_ffff {
        0 => ResetKind::Shutdown,
        1 | 2 => ResetKind::Reboot,
        0xf000_0000..=0xffff_ffff => return refuse(error::NOT_SUPPORTED),
        _ => return refuse(error::INVALID_PARAM),
    };
    let failure = match reason & 0xffff_ffff {
        0 => false,
        1 => true,
        0xe000_0000..=0xffff_ffff => return refuse(error::NOT_SUPPORTED),
        _ => return refuse(error::INVALID_PARAM),
    };
    Ok(Next::Reset(Reset { kind, failure }))
}
