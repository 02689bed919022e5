//! Checksums over frames whose payload arrives in pieces.

use core::fmt;

use super::{FrameHeader, HEADER_BYTES, WireError, Xxh3, check};

/// The checksum of one frame, fed piece by piece: first the header's bytes before its checksum,
/// then the payload.
///
/// It counts the fed bytes: a payload of the wrong length can be neither sealed nor verified.
#[derive(Clone)]
pub struct FrameHasher {
    state: Xxh3,
    what: &'static str,
    found: u64,
    payload_len: u64,
    fed: u64,
}

impl FrameHasher {
    /// Returns a hasher for the frame of this header. It has been fed the header.
    #[must_use]
    pub fn new(header: &FrameHeader) -> Self {
        let mut state = Xxh3::new();
        state.update(&header.to_bytes()[..HEADER_BYTES - 8]);
        Self {
            state,
            what: header.frame_type.name(),
            found: header.checksum,
            payload_len: header.payload_len.into(),
            fed: 0,
        }
    }

    /// Feeds the next bytes of the payload.
    pub fn update(&mut self, payload: &[u8]) {
        self.state.update(payload);
        self.fed += payload.len() as u64;
    }

    /// Feeds bytes that both sides have, and that do not travel.
    pub fn update_unsent(&mut self, bytes: &[u8]) {
        self.state.update(bytes);
    }

    /// Returns the number of payload bytes left to feed.
    #[must_use]
    pub const fn remaining(&self) -> u64 {
        self.payload_len.saturating_sub(self.fed)
    }

    /// Writes the checksum into the encoded header at the start of `head`.
    ///
    /// # Panics
    /// If the fed payload does not have the length that the header announces, or `head` is shorter
    /// than a header. Both are bugs of the sender.
    pub fn seal(self, head: &mut [u8]) {
        assert_eq!(
            self.fed, self.payload_len,
            "a frame is sealed with the payload it announces"
        );
        let digest = self.state.digest();
        head[HEADER_BYTES - 8..HEADER_BYTES].copy_from_slice(&digest.to_le_bytes());
    }

    /// Compares the checksum of the fed bytes with that of the header.
    ///
    /// # Errors
    /// [`WireError::WrongLength`] if the fed payload does not have the announced length,
    /// [`WireError::Checksum`] if the bytes are damaged.
    pub fn verify(self) -> Result<(), WireError> {
        if self.fed != self.payload_len {
            return Err(WireError::WrongLength {
                what: self.what,
                len: self.fed,
                expected: self.payload_len,
            });
        }
        check(self.what, self.found, self.state.digest())
    }
}

impl fmt::Debug for FrameHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameHasher")
            .field("what", &self.what)
            .field("payload_len", &self.payload_len)
            .field("fed", &self.fed)
            .finish_non_exhaustive()
    }
}
