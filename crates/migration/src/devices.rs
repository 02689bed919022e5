//! The devices of a VM in a migration.
//!
//! **Guarantee.** A destination refuses at set-up what its devices cannot take, so the guest does
//! not stop for it. It decodes the states of all devices before it applies any.
//!
//! **Mechanism.** The source announces its devices in Setup (`announce`). Both ends must have the
//! same ones, by name, and each device of the destination accepts the version of its counterpart
//! (`DeviceStates::due`). A device without a counterpart is refused too: it would start with the
//! wrong state. At the switch-over each device has one frame (`save`, `DeviceStates::take`).
//! `DeviceStates::decode` returns what applies them.
//!
//! **Neighbours.** `machine` has the trait. `switchover` of both ends calls this.

use crate::error::MigrationError;
use crate::protocol_error::ProtocolError;
use crate::wire::{
    self, DeviceEntry, MAX_DEVICE_STATE_BYTES, MAX_DEVICE_STATES_BYTES, MAX_NAME_BYTES, Name,
};
use pageferry_machine::{Apply, Device};
use std::collections::HashSet;
use std::sync::Arc;

/// The devices of a VM.
type Devices<'a> = &'a [Arc<dyn Device>];

fn refused(device: &dyn Device, why: impl Into<String>) -> MigrationError {
    MigrationError::Device {
        device: device.name().escape_default().to_string(),
        why: why.into(),
    }
}

/// Describes the devices for Setup.
pub(crate) fn announce(devices: Devices<'_>) -> Result<Vec<DeviceEntry>, MigrationError> {
    let mut names = HashSet::new();
    let entry = |device: &Arc<dyn Device>| {
        let name: Name = device.name().parse().map_err(|_| {
            let why = format!(
                "has a name that cannot travel: expected 1 to {MAX_NAME_BYTES} printable \
                 ASCII characters without spaces"
            );
            refused(&**device, why)
        })?;
        if !names.insert(name.clone()) {
            return Err(refused(&**device, "is there twice"));
        }
        let version = device.version();
        Ok(DeviceEntry { name, version })
    };
    devices.iter().map(entry).collect()
}

/// Pauses all devices. After an error some are paused.
pub(crate) fn pause(devices: Devices<'_>) -> Result<(), MigrationError> {
    devices.iter().try_for_each(|device| {
        let paused = device.pause();
        paused.map_err(|error| refused(&**device, format!("does not stop: {error}")))
    })
}

pub(crate) fn resume(devices: Devices<'_>) {
    devices.iter().for_each(|device| device.resume());
}

/// Saves the states of all devices, which are paused.
pub(crate) fn save(devices: Devices<'_>) -> Result<Vec<wire::DeviceState>, MigrationError> {
    let mut left = MAX_DEVICE_STATES_BYTES;
    let mut states = Vec::with_capacity(devices.len());
    for DeviceEntry { name, version } in announce(devices)? {
        let device = &devices[states.len()];
        let saved = device.save();
        let state = saved.map_err(|e| refused(&**device, format!("cannot be saved: {e}")))?;
        let bytes = state.len();
        if bytes > MAX_DEVICE_STATE_BYTES {
            let why =
                format!("has a state of {bytes} bytes, and {MAX_DEVICE_STATE_BYTES} are the most");
            return Err(refused(&**device, why));
        }
        left = left.checked_sub(name.as_str().len() + bytes).ok_or_else(|| {
            let why = format!(
                "has a state of {bytes} bytes, and the states of all devices together have more \
                 than {MAX_DEVICE_STATES_BYTES}"
            );
            refused(&**device, why)
        })?;
        states.push(wire::DeviceState {
            name,
            version,
            state,
        });
    }
    Ok(states)
}

/// The states of a destination's devices, as they come.
#[derive(Default)]
pub struct DeviceStates<'a>(Vec<Due<'a>>);

/// A device that waits for its state.
struct Due<'a> {
    device: &'a dyn Device,
    /// The version that the source has announced.
    version: u32,
    state: Option<Vec<u8>>,
}

impl<'a> DeviceStates<'a> {
    /// Finds the device of each announced state.
    ///
    /// # Errors
    /// The sentence that says which devices do not fit each other.
    pub fn due(devices: Devices<'a>, announced: &[DeviceEntry]) -> Result<Self, String> {
        let mut names = HashSet::new();
        if let Some(twice) = announced.iter().find(|entry| !names.insert(&entry.name)) {
            return Err(format!("it has device {} twice", twice.name));
        }
        for DeviceEntry { name, version } in announced {
            let mut ours = devices.iter().filter(|d| d.name() == name.as_str());
            let Some(device) = ours.next() else {
                return Err(format!(
                    "it has device {name} (version {version}), which this machine lacks"
                ));
            };
            if !device.accepts(*version) {
                let ours = device.version();
                return Err(format!(
                    "its device {name} has version {version}, and that of this machine has \
                     version {ours} and does not accept it"
                ));
            }
            if ours.next().is_some() {
                return Err(format!("this machine has device {name} twice"));
            }
        }
        let due = devices.iter().map(|device| {
            let of_it = |entry: &&DeviceEntry| entry.name.as_str() == device.name();
            let entry = announced.iter().find(of_it).ok_or_else(|| {
                let (name, version) = (device.name().escape_default(), device.version());
                format!("it lacks device {name} (version {version}), which this machine has")
            })?;
            Ok(Due {
                device: &**device,
                version: entry.version,
                state: None,
            })
        });
        due.collect::<Result<_, String>>().map(Self)
    }

    /// Keeps a state that has come.
    ///
    /// # Errors
    /// For a state that was not announced, of another version, or that came before.
    pub fn take(&mut self, state: wire::DeviceState) -> Result<(), ProtocolError> {
        let wire::DeviceState { name, version, .. } = &state;
        let due = self.0.iter_mut().find(|due| {
            due.device.name() == name.as_str() && due.version == *version && due.state.is_none()
        });
        let Some(due) = due else {
            return Err(ProtocolError::DeviceState {
                device: name.to_string(),
                version: *version,
            });
        };
        due.state = Some(state.state);
        Ok(())
    }

    /// Decodes all states, and applies none. `announced` is the number of SwitchOver.
    ///
    /// # Errors
    /// When a state is lacking, or a device refuses its state.
    pub fn decode(self, announced: u32) -> Result<Vec<Apply<'a>>, MigrationError> {
        let (devices, found) = (
            self.0.len(),
            self.0.iter().flat_map(|due| &due.state).count(),
        );
        if found != devices || announced as usize != devices {
            return Err(ProtocolError::DeviceStates {
                announced,
                found,
                devices,
            }
            .into());
        }
        let decode = |due: Due<'a>| {
            let state = due.state.unwrap_or_default();
            let decoded = due.device.decode(due.version, &state);
            decoded.map_err(|e| refused(due.device, format!("refuses its state: {e}")))
        };
        self.0.into_iter().map(decode).collect()
    }
}
