//! The first bytes of a peer that speaks another protocol.

use core::fmt;

/// The first bytes of a peer, at most eight. They are shown as text if they are printable.
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

    /// Returns the peer's probable protocol as a suffix of a sentence, or an empty string.
    #[must_use]
    pub fn guess(&self) -> &'static str {
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
        } else if bytes.len() >= 3 && matches!(bytes[0], 0x15 | 0x16) && bytes[1] == 3 {
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
