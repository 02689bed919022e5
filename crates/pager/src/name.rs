//! The names of restores.

use std::fmt;
use std::str::FromStr;

/// The name of a restore: 1 to 64 letters, digits, `-`, `_` or `.`, and no `.` first.
///
/// It is part of the names of files.
///
/// ```
/// use pageferry_pager::Name;
///
/// assert!("vm-17".parse::<Name>().is_ok());
/// assert!("../vm".parse::<Name>().is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(String);

/// The refusal of a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is no name of a restore: expected 1 to 64 letters, digits, '-', '_' or '.', and no '.' \
     first"
)]
pub struct NameError(String);

impl Name {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if text.is_empty() || text.len() > 64 || text.starts_with('.') || !text.chars().all(plain) {
            // A long text would fill a log.
            let shown = text.chars().take(80).collect::<String>();
            return Err(NameError(shown.escape_debug().to_string()));
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain_names_of_files() {
        for good in ["a", "vm-1", "A_b.c", &"x".repeat(64)] {
            assert_eq!(good.parse::<Name>().unwrap().as_str(), good);
        }
        for bad in [
            "",
            ".",
            "..",
            ".a",
            "a/b",
            "a b",
            "ä",
            "a\0",
            "a\n",
            &"x".repeat(65),
        ] {
            assert!(bad.parse::<Name>().is_err(), "{bad:?}");
        }
    }
}
