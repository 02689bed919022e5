//! Frames of the wire format in a file. Each has its checksum.

use crate::error::MigrationError;
use crate::wire::{Frame, FrameHeader, HEADER_BYTES, Role, Side};

/// The bytes are not what they should be: `what` says which, and `why` the fault.
pub(crate) fn damaged(what: &str, why: &str) -> MigrationError {
    MigrationError::Mismatch(format!("{what}: {why}"))
}

/// Takes the next frame off the bytes.
pub(crate) fn next(rest: &mut &[u8], pages: u64) -> Result<Frame, MigrationError> {
    let short = || damaged("a frame cannot be read", "it is cut off");
    let (header, behind) = rest.split_first_chunk::<HEADER_BYTES>().ok_or_else(short)?;
    let header = FrameHeader::decode(header, Side::Source, Role::Control)?;
    let (payload, behind) = behind
        .split_at_checked(header.payload_len as usize)
        .ok_or_else(short)?;
    *rest = behind;
    Ok(Frame::decode(&header, payload, pages)?)
}
