//! A change of a migration's settings, as a request carries it.

use pageferry_migration::{Change, Settings};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};
use std::time::Duration;

/// The settings to change. An absent key leaves a setting as it is, and null ends a limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ChangeOptions {
    /// The end of pre-copy, as [`pageferry_migration::Switch`] writes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) switch: Option<String>,
    /// See [`Settings::max_blackout`], in milliseconds.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub(crate) max_blackout_ms: Option<Option<u64>>,
    /// See [`Settings::max_bandwidth`], in bytes a second.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub(crate) max_bandwidth: Option<Option<u64>>,
    /// See [`Settings::max_postcopy_bandwidth`], in bytes a second.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub(crate) max_postcopy_bandwidth: Option<Option<u64>>,
}

/// A key that is there, be it null.
fn given<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Option<u64>>, D::Error> {
    Option::deserialize(value).map(Some)
}

impl ChangeOptions {
    /// The change that the request asks for.
    ///
    /// # Errors
    /// The text that names no end of pre-copy.
    pub(crate) fn change(&self) -> Result<Change, String> {
        let switch = self.switch.as_ref().map(|text| text.parse());
        Ok(Change {
            switch: switch.transpose().map_err(|e| format!("{e}"))?,
            max_blackout: self.max_blackout_ms.map(|ms| ms.map(Duration::from_millis)),
            max_bandwidth: self.max_bandwidth,
            max_postcopy_bandwidth: self.max_postcopy_bandwidth,
        })
    }
}

/// Settings as on the control socket.
pub(crate) fn json_of(settings: &Settings) -> Value {
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    json!({
        "switch": settings.switch.to_string(),
        "max_blackout_ms": settings.max_blackout.map(ms),
        "max_bandwidth": settings.max_bandwidth,
        "max_postcopy_bandwidth": settings.max_postcopy_bandwidth,
    })
}
