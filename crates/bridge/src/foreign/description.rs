//! The description of another VMM's VM in an offer.

use super::VmmError;
use serde::{Deserialize, Serialize};

/// The VMM's version, and the VM's configuration in the VMM's own words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Description {
    pub(crate) version: String,
    pub(crate) config: String,
}

impl Description {
    /// # Errors
    /// When the configuration is no text.
    pub(crate) fn new(version: &str, config: Vec<u8>) -> Result<Self, VmmError> {
        let config = String::from_utf8(config);
        Ok(Self {
            version: version.into(),
            config: config.map_err(|e| VmmError::Config(e.to_string()))?,
        })
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>, VmmError> {
        serde_json::to_vec(self).map_err(|e| VmmError::Config(e.to_string()))
    }

    /// Reads an offer.
    ///
    /// # Errors
    /// When the bytes are no description.
    pub(crate) fn parse(offer: &[u8]) -> Result<Self, VmmError> {
        serde_json::from_slice(offer).map_err(|e| VmmError::Offer(e.to_string()))
    }
}

/// The first two numbers of a version, such as 1 and 16 of `v1.16.1`.
pub(crate) fn major_minor(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.trim_start_matches('v').split('.');
    let mut next = || numbers.next()?.parse().ok();
    Some((next()?, next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_comes_back_and_its_text_is_not_changed() {
        let config = br#"{"a": "\u00e4 \" \\", "b":[1, 2]}"#;
        let of = Description::new("v54.0.0", config.to_vec()).unwrap();
        assert_eq!(Description::parse(&of.encode().unwrap()).unwrap(), of);
        assert!(Description::new("1", vec![0xff]).is_err());
        for wrong in [&b""[..], b"{}", b"[1]", b"{\"version\":1,\"config\":\"\"}"] {
            assert!(Description::parse(wrong).is_err());
        }
    }

    #[test]
    fn versions_are_told_apart_by_two_numbers() {
        assert_eq!(major_minor("1.16.1"), Some((1, 16)));
        assert_eq!(major_minor("1.17.0-dev"), Some((1, 17)));
        assert_eq!(major_minor("v54.0.0"), Some((54, 0)));
        for wrong in ["", "v", "54", "a.b", "-1.2"] {
            assert_eq!(major_minor(wrong), None, "{wrong}");
        }
    }
}
