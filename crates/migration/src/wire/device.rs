//! Devices: their names and versions in Setup, and their states at the switch-over.

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::in_range;
use super::name::NameLayout;
use super::{MAX_DEVICE_STATE_BYTES, MAX_NAME_BYTES, Name, WireError};

/// A device whose state will travel, as [`Setup`](super::Setup) announces it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceEntry {
    /// Its name. This module does not compare names of different devices.
    pub name: Name,
    /// The version of its state. The device defines its meaning.
    pub version: u32,
}

/// The state of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceState {
    /// The device's name.
    pub name: Name,
    /// The version of the state.
    pub version: u32,
    /// The state, at most [`MAX_DEVICE_STATE_BYTES`] bytes. Opaque to this module.
    pub state: Vec<u8>,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct EntryLayout {
    version: U32,
    name: NameLayout,
}

const _: () = assert!(size_of::<EntryLayout>() == 68);

impl DeviceEntry {
    pub(super) fn to_layout(&self) -> EntryLayout {
        EntryLayout {
            version: self.version.into(),
            name: self.name.to_layout(),
        }
    }

    pub(super) fn from_layout(what: &'static str, layout: &EntryLayout) -> Result<Self, WireError> {
        Ok(Self {
            name: Name::from_layout(what, "device.name", &layout.name)?,
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
        out.extend_from_slice(self.name.as_str().as_bytes());
        out.extend_from_slice(&self.state);
        Ok(self.name.as_str().len() as u64)
    }

    /// Decodes the payload of a frame with this version and this length of the name in its header.
    pub(super) fn decode_payload(
        what: &'static str,
        version: u32,
        name_len: u64,
        payload: &[u8],
    ) -> Result<Self, WireError> {
        let max = payload.len().min(MAX_NAME_BYTES) as u64;
        in_range(what, "name_len", name_len, 1, max)?;
        let (name, state) = payload.split_at(name_len as usize);
        check_length(what, state.len())?;
        Ok(Self {
            name: Name::new(what, "name", name)?,
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
