//! Bytes that only a path for large packets carries.
//!
//! Each side sends them once on every channel, behind its proof. They are more than the largest
//! packet of an Ethernet, so the kernel fills at least one packet. A path that drops large packets
//! without a word carries all short messages, and fails here.

use super::{PATH_CHECK_BYTES, WireError};

const WORDS: usize = PATH_CHECK_BYTES / 8;

static BYTES: [u8; PATH_CHECK_BYTES] = bytes();

/// Returns the bytes. No device on the path can compress them: a short packet would prove nothing.
#[must_use]
pub fn path_check() -> &'static [u8; PATH_CHECK_BYTES] {
    &BYTES
}

/// Checks bytes of the message, of which the first is byte `at`.
///
/// # Errors
/// [`WireError::BadField`] with the first byte that differs.
///
/// # Panics
/// If the bytes reach behind the end of the message.
pub fn verify_path_check(at: usize, bytes: &[u8]) -> Result<(), WireError> {
    let expected = &BYTES[at..at + bytes.len()];
    match bytes.iter().zip(expected).find(|(found, due)| found != due) {
        None => Ok(()),
        Some((found, _)) => Err(WireError::BadField {
            what: "PathCheck",
            field: "byte",
            value: u64::from(*found),
        }),
    }
}

/// The magic, and then the numbers of xorshift64 with the shifts 13, 7 and 17.
const fn bytes() -> [u8; PATH_CHECK_BYTES] {
    let mut bytes = [0; PATH_CHECK_BYTES];
    let mut number: u64 = u64::from_le_bytes(*b"PGFPATH\0");
    let mut word = 0;
    while word < WORDS {
        let mut byte = 0;
        while byte < 8 {
            bytes[word * 8 + byte] = (number >> (8 * byte)) as u8;
            byte += 1;
        }
        number ^= number << 13;
        number ^= number >> 7;
        number ^= number << 17;
        word += 1;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_are_those_of_the_document() {
        assert_eq!(&BYTES[..8], b"PGFPATH\0");
        let mut number = u64::from_le_bytes(*b"PGFPATH\0");
        for word in BYTES.chunks_exact(8) {
            assert_eq!(word, number.to_le_bytes());
            number ^= number << 13;
            number ^= number >> 7;
            number ^= number << 17;
        }
    }

    #[test]
    fn every_part_is_accepted_and_every_other_byte_is_refused() {
        for (at, len) in [(0, PATH_CHECK_BYTES), (0, 0), (5, 100), (16_383, 1)] {
            assert_eq!(verify_path_check(at, &BYTES[at..at + len]), Ok(()));
        }
        for at in [0, 7, 4096, PATH_CHECK_BYTES - 1] {
            let mut bytes = BYTES;
            bytes[at] ^= 0x80;
            let found = verify_path_check(0, &bytes);
            let value = u64::from(bytes[at]);
            assert!(
                matches!(found, Err(WireError::BadField { field: "byte", value: v, .. }) if v == value),
                "{found:?}"
            );
        }
    }
}
