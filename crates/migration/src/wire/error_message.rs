//! Error frames: a code for programs and a sentence for people.

use core::fmt;

use super::{Text, WireError};

/// The reason why a side gave up. The numbers are those on the wire. Number 6 of earlier versions
/// is now the Discarded frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
#[non_exhaustive]
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
    /// The destination took another source, and did nothing with this one. A retry may succeed.
    Busy = 7,
    /// The other side said nothing for too long.
    Silence = 8,
    /// The VM was handed over, and has ended with the VMM that had it.
    VmGone = 9,
}

impl ErrorCode {
    /// Every code, in the order of their numbers.
    pub const ALL: [Self; 8] = [
        Self::Protocol,
        Self::SetupRefused,
        Self::Resources,
        Self::Machine,
        Self::Internal,
        Self::Busy,
        Self::Silence,
        Self::VmGone,
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
    message: Text,
}

impl ErrorMessage {
    /// Returns a message that fits an Error frame, with the text of [`Text::new`].
    #[must_use]
    pub fn new(code: ErrorCode, message: &str) -> Self {
        Self {
            code,
            message: Text::new(message),
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
        self.message.as_str()
    }

    pub(super) fn decode_payload(code: u64, payload: &[u8]) -> Result<Self, WireError> {
        Ok(Self {
            code: ErrorCode::from_number(code)?,
            message: Text::decode("Error", "message", payload)?,
        })
    }
}

impl fmt::Display for ErrorMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message())
    }
}
