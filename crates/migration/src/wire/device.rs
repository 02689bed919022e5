//! Devices: their names and versions in Setup, and their states at the switch-over.

use core::fmt;

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::error::{in_range, reserved_zero};
use super::{MAX_DEVICE_NAME_BYTES, MAX_DEVICE_STATE_BYTES, WireError};

/// The name of a device: 1 to [`MAX_DEVICE_NAME_BYTES`] printable ASCII characters without spaces.
/// It may come from the peer, and is safe to show.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceName(String);

impl DeviceName {
    /// Returns the name with these bytes, of a message `what`.
    ///
    /// # Errors
    /// [`WireError::OutOfRange`] for a wrong length, [`WireError::BadField`] for another character.
    pub(crate) fn new(what: &'static str, bytes: &[u8]) -> Result<Self, WireError> {
        let max = MAX_DEVICE_NAME_BYTES as u64;
        in_range(what, "name_len", bytes.len() as u64, 1, max)?;
        match bytes.iter().find(|byte| !byte.is_ascii_graphic()) {
            None => Ok(Self(bytes.iter().copied().map(char::from).collect())),
            Some(&byte) => Err(WireError::BadField {
                what,
                field: "name",
                value: byte.into(),
            }),
        }
    }

    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl core::str::FromStr for DeviceName {
    type Err = WireError;

    fn from_str(name: &str) -> Result<Self, WireError> {
        Self::new("device", name.as_bytes())
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A device whose state will travel, as [`Setup`](super::Setup) announces it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceEntry {
    /// Its name. This module does not compare names of different devices.
    pub name: DeviceName,
    /// The version of its state. The device defines its meaning.
    pub version: u32,
}

/// The state of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceState {
    /// The device's name.
    pub name: DeviceName,
    /// The version of the state.
    pub version: u32,
    /// The state, at most [`MAX_DEVICE_STATE_BYTES`] bytes. Opaque to this module.
    pub state: Vec<u8>,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct EntryLayout {
    version: U32,
    name: [u8; MAX_DEVICE_NAME_BYTES],
}

const _: () = assert!(size_of::<EntryLayout>() == 68);

impl DeviceEntry {
    pub(super) fn to_layout(&self) -> EntryLayout {
        let mut name = [0; MAX_DEVICE_NAME_BYTES];
        name[..self.name.0.len()].copy_from_slice(self.name.0.as_bytes());
        EntryLayout {
            version: self.version.into(),
            name,
        }
    }

    pub(super) fn from_layout(what: &'static str, layout: &EntryLayout) -> Result<Self, WireError> {
        let end = layout.name.iter().position(|&byte| byte == 0);
        let (name, rest) = layout.name.split_at(end.unwrap_or(MAX_DEVICE_NAME_BYTES));
        reserved_zero(what, "device.name", rest)?;
        Ok(Self {
            name: DeviceName::new(what, name)?,
            version: layout.version.get(),
        })
    }
}

impl DeviceState {
    /// Encodes the payload, and returns `arg` of the header.
    pub(super) fn encode_payload(
        &self,
        what: &'static str,
        out: &mut Vec<u8>,
    ) -> Result<u64, WireError> {
        check_length(what, self.state.len())?;
        out.extend_from_slice(self.name.0.as_bytes());
        out.extend_from_slice(&self.state);
        Ok(self.name.0.len() as u64)
    }

    /// Decodes the payload of a frame with this version and this length of the name in its header.
    pub(super) fn decode_payload(
        what: &'static str,
        version: u32,
        name_len: u64,
        payload: &[u8],
    ) -> Result<Self, WireError> {
        let max = payload.len().min(MAX_DEVICE_NAME_BYTES) as u64;
        in_range(what, "name_len", name_len, 1, max)?;
        let (name, state) = payload.split_at(name_len as usize);
        check_length(what, state.len())?;
        Ok(Self {
            name: DeviceName::new(what, name)?,
            version,
            state: state.to_vec(),
        })
    }
}

/// A short name leaves room in a payload for a state that is too long.
fn check_length(what: &'static str, len: usize) -> Result<(), WireError> {
    if len <= MAX_DEVICE_STATE_BYTES {
        return Ok(());
    }
    Err(WireError::TooLong {
        what,
        len: len as u64,
        max: MAX_DEVICE_STATE_BYTES as u64,
    })
}
