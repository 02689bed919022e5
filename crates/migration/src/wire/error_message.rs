//! Error frames: a code for programs and a sentence for people.

use core::fmt;

use super::{MAX_ERROR_BYTES, WireError};

/// The reason why a side gave up. The numbers are those on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum ErrorCode {
    /// The other side broke the protocol.
    Protocol = 1,
    /// The destination cannot build such a VM (engine, state format, memory layout).
    SetupRefused = 2,
    /// Memory or another resource of this side is exhausted.
    Resources = 3,
    /// The machine failed: a vCPU failed, or its state could not be saved or loaded.
    Machine = 4,
    /// A bug of the program.
    Internal = 5,
    /// The destination started the guest, received no `RunningAck`, and has discarded the VM. Its
    /// vCPUs are paused, and it never counts there.
    Discarded = 6,
    /// The destination took another source, and did nothing with this one. A retry may succeed.
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

/// The message of a side that gives up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorMessage {
    code: ErrorCode,
    message: String,
}

impl ErrorMessage {
    /// Returns a message that fits an Error frame. Characters that could control a terminal are
    /// escaped. The text is cut at a character boundary within [`MAX_ERROR_BYTES`].
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

    /// Returns the code.
    #[must_use]
    pub const fn code(&self) -> ErrorCode {
        self.code
    }

    /// Returns the sentence, without control characters. It may come from the peer: show it as
    /// foreign text.
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

/// Whether a character neither controls a terminal nor changes the display order of others. Harmful
/// ones are Unicode's controls, line and paragraph separators, directional marks and overrides.
fn is_harmless(c: char) -> bool {
    !c.is_control()
        && !matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}
