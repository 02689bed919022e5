//! The debug console (SBI 2.0, chapter 12).

use crate::serve::{Next, answer, refuse, returned};
use crate::{Call, Memory, Platform, error};

pub(crate) const EXTENSION: u64 = 0x4442_434e;

pub(crate) fn serve<P: Platform>(call: &Call, platform: &mut P) -> Result<Next, P::Again> {
    let [bytes, low, high, ..] = call.args;
    let outcome: Memory<u64, P::Again> = match call.function {
        // Addresses have at most 64 bits here, so the high word is 0.
        0 | 1 if high != 0 || !platform.is_ram(low, bytes) => {
            return refuse(error::INVALID_PARAM);
        }
        0 | 1 if bytes == 0 => Ok(Some(0)),
        0 => platform.console_write(low, bytes),
        1 => platform.console_read(low, bytes),
        2 => Ok(platform.console_write_byte(bytes as u8).then_some(0)),
        _ => return answer(error::NOT_SUPPORTED, 0),
    };
    match outcome? {
        Some(done) => returned(done),
        None => refuse(error::FAILED),
    }
}
