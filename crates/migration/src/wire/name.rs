//! Short names: those of devices, and those of kinds of machines.

use core::fmt;

use super::{MAX_NAME_BYTES, WireError};
use super::{in_range, reserved_zero};

/// A name: 1 to [`MAX_NAME_BYTES`] printable ASCII characters without spaces. It may come from the
/// peer, and is safe to show.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(String);

/// A name in a fixed layout, with zeros behind it.
pub(super) type NameLayout = [u8; MAX_NAME_BYTES];

impl Name {
    /// Returns the name with these bytes, which are `field` of a message `what`.
    ///
    /// # Errors
    /// [`WireError::OutOfRange`] for a wrong length, [`WireError::BadField`] for another character.
    pub(super) fn new(
        what: &'static str,
        field: &'static str,
        bytes: &[u8],
    ) -> Result<Self, WireError> {
        let max = MAX_NAME_BYTES as u64;
        in_range(what, "name_len", bytes.len() as u64, 1, max)?;
        match bytes.iter().find(|byte| !byte.is_ascii_graphic()) {
            None => Ok(Self(bytes.iter().copied().map(char::from).collect())),
            Some(&byte) => Err(WireError::BadField {
                what,
                field,
                value: byte.into(),
            }),
        }
    }

    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(super) fn to_layout(&self) -> NameLayout {
        let mut layout = [0; MAX_NAME_BYTES];
        layout[..self.0.len()].copy_from_slice(self.0.as_bytes());
        layout
    }

    /// Decodes `field` of a message `what`.
    pub(super) fn from_layout(
        what: &'static str,
        field: &'static str,
        layout: &NameLayout,
    ) -> Result<Self, WireError> {
        let end = layout.iter().position(|&byte| byte == 0);
        let (name, rest) = layout.split_at(end.unwrap_or(MAX_NAME_BYTES));
        reserved_zero(what, field, rest)?;
        Self::new(what, field, name)
    }
}

impl core::str::FromStr for Name {
    type Err = WireError;

    fn from_str(name: &str) -> Result<Self, WireError> {
        Self::new("name", "name", name.as_bytes())
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
