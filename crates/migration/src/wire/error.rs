//! What can be wrong with bytes that came from a peer.

use core::fmt;

use super::frame_type::{FrameType, Side};

/// Bytes that break the wire format. Each variant carries the offending values.
///
/// A connection that gave one of these is out of step for good: nothing after the error can be
/// trusted, so the only sound answer is to report it and close.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The first bytes are not Pageferry's: the peer speaks another protocol.
    #[error("the peer does not speak Pageferry's protocol: it began with {first}{}", first.guess())]
    NotPageferry {
        /// The bytes it sent first, at most eight.
        first: FirstBytes,
    },
    /// No protocol version is understood by both sides.
    #[error(
        "the peer speaks Pageferry protocol versions {minimum} to {version}; this side speaks {} to {}",
        super::MIN_VERSION,
        super::VERSION
    )]
    Version {
        /// The newest version the peer speaks.
        version: u16,
        /// The oldest version the peer speaks.
        minimum: u16,
    },
    /// The bytes of a message were changed on the way, or were never a message.
    #[error("{what}: checksum {found:#x} where its bytes give {computed:#x}")]
    Checksum {
        /// The message it was found in.
        what: &'static str,
        /// The checksum the message carries.
        found: u64,
        /// The checksum of the bytes that arrived.
        computed: u64,
    },
    /// A frame does not begin with the frame magic: the two sides are out of step.
    #[error("a frame begins with {found:#010x} where the frame magic was expected")]
    FrameMagic {
        /// The four bytes found, as a little-endian number.
        found: u32,
    },
    /// A frame of a type this version does not define.
    #[error("unknown frame type {found}")]
    UnknownType {
        /// The type found.
        found: u16,
    },
    /// A known frame from the side that never sends it.
    #[error("a {frame} frame is never sent by the {from}")]
    WrongDirection {
        /// The frame's type.
        frame: FrameType,
        /// The side it came from.
        from: Side,
    },
    /// A length above its bound. Nothing was allocated for it.
    #[error("{what}: a length of {len} exceeds its bound of {max}")]
    TooLong {
        /// The message it was found in.
        what: &'static str,
        /// The length found, in the unit of the bound (bytes unless `what` says otherwise).
        len: u64,
        /// The bound.
        max: u64,
    },
    /// A length that does not fit the message's other fields.
    #[error("{what}: {len} bytes where {expected} were expected")]
    WrongLength {
        /// The message it was found in.
        what: &'static str,
        /// The length found, in bytes.
        len: u64,
        /// The length its fields ask for, in bytes.
        expected: u64,
    },
    /// The peer stopped in the middle of a message.
    #[error("{what}: the peer stopped after {got} of {needed} bytes")]
    Truncated {
        /// The message that was cut.
        what: &'static str,
        /// How many bytes it should have, at least.
        needed: u64,
        /// How many arrived.
        got: u64,
    },
    /// A field holds a value the format does not define; reserved bytes that are not zero too.
    #[error("{what}: field `{field}` holds {value:#x}, which is not defined")]
    BadField {
        /// The message it was found in.
        what: &'static str,
        /// The field's name in the document of the wire format.
        field: &'static str,
        /// The value found (of a longer field, its first non-zero byte).
        value: u64,
    },
    /// A number outside the range that other fields or the memory's size leave for it.
    #[error("{what}: field `{field}` is {value}, outside {min} to {max}")]
    OutOfRange {
        /// The message it was found in.
        what: &'static str,
        /// The field's name in the document of the wire format.
        field: &'static str,
        /// The value found.
        value: u64,
        /// The smallest value allowed here.
        min: u64,
        /// The largest value allowed here.
        max: u64,
    },
}

/// Up to eight bytes that a peer sent first, shown as text where they are text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FirstBytes {
    bytes: [u8; 8],
    len: u8,
}

impl FirstBytes {
    /// Keeps at most the first eight of `bytes`.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Self {
        let mut kept = [0; 8];
        let len = bytes.len().min(8);
        kept[..len].copy_from_slice(&bytes[..len]);
        Self {
            bytes: kept,
            len: len as u8,
        }
    }

    /// The bytes kept.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// What the peer probably is, ready to follow a sentence; empty if nothing comes to mind.
    fn guess(&self) -> &'static str {
        const HTTP: [&[u8]; 8] = [
            b"GET ",
            b"POST ",
            b"PUT ",
            b"HEAD ",
            b"HTTP",
            b"OPTIONS ",
            b"DELETE ",
            b"CONNECT ",
        ];
        let bytes = self.as_slice();
        if HTTP.iter().any(|word| bytes.starts_with(word)) || bytes == b"PRI * HT" {
            " (HTTP?)"
        } else if bytes.starts_with(b"SSH-") {
            " (SSH?)"
        } else if bytes.len() >= 3 && bytes[0] == 0x16 && bytes[1] == 3 {
            " (TLS?)"
        } else {
            ""
        }
    }
}

impl fmt::Display for FirstBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.as_slice();
        let text = |byte: &u8| byte.is_ascii_graphic() || matches!(byte, b' ' | b'\r' | b'\n');
        if !bytes.is_empty() && bytes.iter().all(text) {
            return write!(f, "\"{}\"", bytes.escape_ascii());
        }
        f.write_str("bytes")?;
        bytes.iter().try_for_each(|byte| write!(f, " {byte:02x}"))
    }
}

/// Refuses reserved bytes that are not zero.
pub(crate) fn reserved_zero(
    what: &'static str,
    field: &'static str,
    bytes: &[u8],
) -> Result<(), WireError> {
    match bytes.iter().find(|&&byte| byte != 0) {
        None => Ok(()),
        Some(&byte) => Err(WireError::BadField {
            what,
            field,
            value: byte.into(),
        }),
    }
}

/// Refuses a number outside `min..=max`.
pub(crate) fn in_range(
    what: &'static str,
    field: &'static str,
    value: u64,
    min: u64,
    max: u64,
) -> Result<(), WireError> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(WireError::OutOfRange {
        what,
        field,
        value,
        min,
        max,
    })
}
