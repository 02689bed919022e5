//! Error frames: a code for programs, a sentence for people.

use core::fmt;

use super::{MAX_ERROR_BYTES, WireError};

/// Why a side gave up; the number is the wire's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum ErrorCode {
    /// The other side broke the protocol.
    Protocol = 1,
    /// The destination cannot take such a VM (engine, state format, memory layout).
    SetupRefused = 2,
    /// Memory or another resource of this side is exhausted.
    Resources = 3,
    /// The machine failed: a vCPU's state could not be saved or loaded, or a vCPU broke.
    Machine = 4,
    /// A program's own mistake.
    Internal = 5,
    /// The destination started the guest, did not hear `RunningAck`, and has discarded the VM,
    /// whose vCPUs stand still: it never counts there.
    Discarded = 6,
    /// The destination took another source. It did nothing with this one: trying again may succeed.
    Busy = 7,
}

impl ErrorCode {
    /// Every code, in the order of their numbers.
    pub const ALL: [Self; 7] = [
        Self::Protocol,
        Self::SetupRefused,
        Self::Resources,
        Self::Machine,
        Self::Internal,
        Self::Discarded,
        Self::Busy,
    ];

    pub(super) fn from_number(number: u64) -> Result<Self, WireError> {
        Self::ALL
            .into_iter()
            .find(|&known| known as u64 == number)
            .ok_or(WireError::BadField {
                what: "Error",
                field: "code",
                value: number,
            })
    }
}

/// What a side says when it gives up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorMessage {
    code: ErrorCode,
    message: String,
}

impl ErrorMessage {
    /// A message that fits an Error frame: characters that could command a terminal are escaped,
    /// and what exceeds [`MAX_ERROR_BYTES`] is cut at a character's boundary.
    #[must_use]
    pub fn new(code: ErrorCode, message: &str) -> Self {
        let mut kept = String::new();
        for c in message.chars() {
            let mut piece = String::new();
            if is_harmless(c) {
                piece.push(c);
            } else {
                piece.extend(c.escape_unicode());
            }
            if kept.len() + piece.len() > MAX_ERROR_BYTES {
                break;
            }
            kept.push_str(&piece);
        }
        Self {
            code,
            message: kept,
        }
    }

    /// The code.
    #[must_use]
    pub const fn code(&self) -> ErrorCode {
        self.code
    }

    /// The sentence, without control characters. It is the peer's word: show it as such.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    pub(super) fn decode_payload(code: u64, payload: &[u8]) -> Result<Self, WireError> {
        let code = ErrorCode::from_number(code)?;
        let bad = |value| WireError::BadField {
            what: "Error",
            field: "message",
            value,
        };
        let message = core::str::from_utf8(payload)
            .map_err(|error| bad(payload[error.valid_up_to()].into()))?;
        match message.chars().find(|&c| !is_harmless(c)) {
            Some(c) => Err(bad(c.into())),
            None => Ok(Self {
                code,
                message: message.to_owned(),
            }),
        }
    }
}

impl fmt::Display for ErrorMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Whether a character neither commands a terminal nor changes the order in which others are shown
/// (Unicode's controls, line and paragraph separators, directional marks and overrides).
fn is_harmless(c: char) -> bool {
    !c.is_control()
        && !matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}
