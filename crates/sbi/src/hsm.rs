//! Hart state management (SBI 2.0, chapter 9).

use crate::serve::{Next, answer, refuse, returned};
use crate::{Call, Platform, error};

pub(crate) const EXTENSION: u64 = 0x48_534d;

/// A retentive suspend of this platform: the hart keeps its state, as in a WFI.
const SUSPEND_RETENTIVE: u64 = 0;
/// A suspend of this platform that loses the hart's state: it resumes at an address.
const SUSPEND_NON_RETENTIVE: u64 = 0x8000_0000;

/// The state of a hart. The numbers are SBI's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum HartStatus {
    /// It executes instructions.
    Started = 0,
    /// It does not, until it is started.
    Stopped = 1,
    /// Another hart has started it, and it has executed nothing yet.
    StartPending = 2,
    /// It waits for an interrupt.
    Suspended = 4,
    /// An interrupt has ended its wait, and it has executed nothing since.
    ResumePending = 6,
}

pub(crate) fn serve<P: Platform>(call: &Call, platform: &mut P) -> Result<Next, P::Again> {
    let [a0, a1, a2, ..] = call.args;
    let existing = |hart: u64| {
        u32::try_from(hart)
            .ok()
            .filter(|hart| *hart < platform.harts())
    };
    match call.function {
        0 => {
            let Some(hart) = existing(a0) else {
                return refuse(error::INVALID_PARAM);
            };
            match platform.start(hart, a1, a2) {
                Ok(()) => returned(0),
                Err(why) => refuse(why.code()),
            }
        }
        1 => Ok(Next::Stop),
        2 => match existing(a0) {
            Some(hart) => returned(platform.status(hart) as u64),
            None => refuse(error::INVALID_PARAM),
        },
        // The type has 32 bits (SBI 2.0, section 9.4).
        3 => match a0 & 0xffff_ffff {
            SUSPEND_RETENTIVE => Ok(Next::Suspend { resume: None }),
            SUSPEND_NON_RETENTIVE if a1 & 3 != 0 || !platform.is_ram(a1, 4) => {
                refuse(error::INVALID_ADDRESS)
            }
            SUSPEND_NON_RETENTIVE => Ok(Next::Suspend {
                resume: Some((a1, a2)),
            }),
            0x1000_0000..=0x7fff_ffff | 0x9000_0000..=0xffff_ffff => refuse(error::NOT_SUPPORTED),
            _ => refuse(error::INVALID_PARAM),
        },
        _ => answer(error::NOT_SUPPORTED, 0),
    }
}
