//! Errors of decoding a peer's bytes.

use super::{FirstBytes, Role, Side};

/// Bytes that break the wire format. Each variant carries the offending values.
///
/// After such an error, the two sides of the connection are out of step. Later bytes cannot be
/// trusted, so the receiver must report the error and close.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The first bytes are not Pageferry's. The peer speaks another protocol.
    #[error("the peer does not speak Pageferry's protocol: it began with {first}{}", first.guess())]
    NotPageferry {
        /// The first bytes that it sent, at most eight.
        first: FirstBytes,
    },
    /// The two sides have no protocol version in common.
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
    /// The checksum of a message does not fit its bytes.
    #[error("{what}: checksum {found:#x}, but its bytes give {computed:#x}")]
    Checksum {
        /// The message.
        what: &'static str,
        /// The checksum that the message carries.
        found: u64,
        /// The checksum of the bytes that arrived.
        computed: u64,
    },
    /// A frame does not begin with the frame magic. The two sides are out of step.
    #[error("a frame begins with {found:#010x} where the frame magic was expected")]
    FrameMagic {
        /// The four bytes found, as a little-endian number.
        found: u32,
    },
    /// A frame has a type that this version does not define.
    #[error("unknown frame type {found}")]
    UnknownType {
        /// The type found.
        found: u16,
    },
    /// A frame came from the side that never sends its type.
    #[error("the {from} never sends a {frame} frame")]
    WrongDirection {
        /// The frame's type.
        frame: &'static str,
        /// The side it came from.
        from: Side,
    },
    /// A frame came on a channel that never carries its type.
    #[error("a {frame} frame never travels on a {on} channel")]
    WrongChannel {
        /// The frame's type.
        frame: &'static str,
        /// The role of the channel.
        on: Role,
    },
    /// A length exceeds its bound. Nothing was allocated for it.
    #[error("{what}: a length of {len} exceeds its bound of {max}")]
    TooLong {
        /// The message.
        what: &'static str,
        /// The length found, in the unit of the bound (bytes unless `what` says otherwise).
        len: u64,
        /// The bound.
        max: u64,
    },
    /// A length does not fit the message's other fields.
    #[error("{what}: {len} bytes where {expected} were expected")]
    WrongLength {
        /// The message.
        what: &'static str,
        /// The length found, in bytes.
        len: u64,
        /// The length that its fields require, in bytes.
        expected: u64,
    },
    /// The peer stopped in the middle of a message.
    #[error("{what}: the peer stopped after {got} of {needed} bytes")]
    Truncated {
        /// The message.
        what: &'static str,
        /// The number of bytes that it must have, at least.
        needed: u64,
        /// The number of bytes that arrived.
        got: u64,
    },
    /// A field holds a value that the format does not define, or reserved bytes are not zero.
    #[error("{what}: field `{field}` holds {value:#x}, which is not defined")]
    BadField {
        /// The message.
        what: &'static str,
        /// The field's name in docs/wire-format.md.
        field: &'static str,
        /// The value found (of a longer field, its first non-zero byte).
        value: u64,
    },
    /// A number is outside the range that other fields or the memory size allow.
    #[error("{what}: field `{field}` is {value}, outside {min} to {max}")]
    OutOfRange {
        /// The message.
        what: &'static str,
        /// The field's name in docs/wire-format.md.
        field: &'static str,
        /// The value found.
        value: u64,
        /// The smallest value allowed here.
        min: u64,
        /// The largest value allowed here.
        max: u64,
    },
}

/// Refuses reserved bytes that are not zero.
///
/// # Errors
/// [`WireError::BadField`].
pub fn reserved_zero(
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
///
/// # Errors
/// [`WireError::OutOfRange`].
pub fn in_range(
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
