//! Text from a peer that may be shown on a terminal.

use core::fmt;

use super::{MAX_ERROR_BYTES, WireError};

/// A sentence for people: UTF-8, at most [`MAX_ERROR_BYTES`] bytes, without characters that control
/// a terminal. It may come from the peer: show it as foreign text.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Text(String);

impl Text {
    /// Returns a text that fits a frame. Characters that could control a terminal are escaped. The
    /// text is cut at a character boundary within [`MAX_ERROR_BYTES`].
    #[must_use]
    pub fn new(text: &str) -> Self {
        let mut kept = String::new();
        for c in text.chars() {
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
        Self(kept)
    }

    /// Returns the text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Decodes the text of a message. The caller has checked its length.
    pub(super) fn decode(
        what: &'static str,
        field: &'static str,
        payload: &[u8],
    ) -> Result<Self, WireError> {
        let bad = |value| WireError::BadField { what, field, value };
        let text = core::str::from_utf8(payload)
            .map_err(|error| bad(payload[error.valid_up_to()].into()))?;
        match text.chars().find(|&c| !is_harmless(c)) {
            Some(c) => Err(bad(c.into())),
            None => Ok(Self(text.to_owned())),
        }
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether a character neither controls a terminal nor changes the display order of others. Harmful
/// ones are Unicode's controls, line and paragraph separators, directional marks and overrides.
fn is_harmless(c: char) -> bool {
    !c.is_control()
        && !matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}
