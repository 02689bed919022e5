//! A VM on disk: the states of its vCPUs and devices, beside a file with its memory.
//!
//! **Guarantee.** The states and the memory are of one moment: nothing runs or writes between them.
//! A file that was cut, damaged or made for another machine changes nothing here.
//!
//! **Mechanism.** The file is 8 bytes of magic and the frames with which a source hands over its VM
//! (docs/wire-format.md): Setup, the states of vCPUs and devices, SwitchOver. Each has its
//! checksum. Memory lies in a file of its own, the pages of RAM in order, so that a page server
//! can bring it later.

use crate::destination::Offer;
use crate::devices;
use crate::error::MigrationError;
use crate::file::{damaged, next};
use crate::protocol_error::ProtocolError;
use crate::source::offer;
use crate::vm::{RunningVm, fits};
use crate::wire::{
    self, Frame, HEADER_BYTES, MAX_DEVICE_STATES_BYTES, MAX_DEVICES, MAX_VCPU_STATE_BYTES,
    MAX_VCPUS, Setup, SwitchOver,
};
use pageferry_machine::{Frozen, VcpuState};
use std::time::Duration;

/// Seven letters, and the version of the format.
const MAGIC: &[u8; 8] = b"PFSAVED\x02";
/// The longest wait for vCPUs to leave the guest.
const PAUSE_LIMIT: Duration = Duration::from_secs(10);

/// The most bytes of a VM's states: those of all vCPUs and devices, each with its header.
pub const MAX_SAVED_BYTES: u64 = (1 << 20)
    + MAX_DEVICE_STATES_BYTES as u64
    + HEADER_BYTES as u64 * MAX_DEVICES as u64
    + MAX_VCPUS as u64 * (HEADER_BYTES + MAX_VCPU_STATE_BYTES) as u64;

/// A VM that stands still: its vCPUs, its devices, and its memory. Dropping it lets the VM run on
/// as before.
pub struct Stopped<'a> {
    vm: RunningVm<'a>,
    was_running: bool,
    devices_paused: bool,
    frozen: Option<Frozen<'a>>,
}

impl<'a> Stopped<'a> {
    /// Stops a VM.
    ///
    /// # Errors
    /// When a vCPU or a device does not stop. The VM then runs on.
    pub fn new(vm: RunningVm<'a>) -> Result<Self, MigrationError> {
        // A pause that fails stands until the VM is resumed.
        let mut stopped = Self {
            vm,
            was_running: true,
            devices_paused: false,
            frozen: None,
        };
        stopped.was_running = vm.vcpus.pause(PAUSE_LIMIT)?.was_running;
        stopped.devices_paused = true;
        devices::pause(vm.devices)?;
        stopped.frozen = Some(vm.machine.ram().freeze()?);
        Ok(stopped)
    }

    /// The states of vCPUs and devices, and `guest`, the caller's description of the VM.
    ///
    /// # Errors
    /// When a state cannot be saved.
    pub fn save(&self, guest: &[u8]) -> Result<SavedVm, MigrationError> {
        Ok(SavedVm {
            // A file has no channels, and a Setup has one of each kind at least.
            setup: offer(&self.vm, guest, [1, 1])?,
            vcpus: self.vm.vcpus.save()?,
            devices: devices::save(self.vm.devices)?,
            paused: !self.was_running,
        })
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.frozen = None;
        if self.devices_paused {
            devices::resume(self.vm.devices);
        }
        if self.was_running {
            self.vm.vcpus.resume();
        }
    }
}

/// The states of a VM without its memory.
pub struct SavedVm {
    setup: Setup,
    vcpus: Vec<VcpuState>,
    devices: Vec<wire::DeviceState>,
    paused: bool,
}

impl SavedVm {
    /// The VM that these states are for.
    #[must_use]
    pub fn offer(&self) -> Offer {
        Offer::of(&self.setup)
    }

    /// Whether the VM was paused by its owner.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// The bytes of a file.
    ///
    /// # Errors
    /// When a state is longer than any machine may have.
    pub fn encode(&self) -> Result<Vec<u8>, MigrationError> {
        let mut bytes = MAGIC.to_vec();
        let mut part = Vec::new();
        let mut add = |frame: &Frame| -> Result<(), MigrationError> {
            frame.encode(&mut part)?;
            bytes.extend_from_slice(&part);
            Ok(())
        };
        add(&Frame::Setup(self.setup.clone()))?;
        for (vcpu, state) in (0..).zip(&self.vcpus) {
            let state = state.0.clone();
            add(&Frame::VcpuState(wire::VcpuState { vcpu, state }))?;
        }
        for device in &self.devices {
            add(&Frame::DeviceState(device.clone()))?;
        }
        add(&Frame::SwitchOver(SwitchOver {
            missing_pages: 0,
            vcpus: self.vcpus.len() as u32,
            devices: self.devices.len() as u32,
            stopped_at_ns: 0,
            paused: self.paused,
        }))?;
        Ok(bytes)
    }

    /// Reads the bytes of a file.
    ///
    /// # Errors
    /// [`MigrationError::Mismatch`] for bytes that are no saved VM, [`MigrationError::Wire`] and
    /// [`MigrationError::Protocol`] for damaged ones.
    pub fn decode(bytes: &[u8]) -> Result<Self, MigrationError> {
        let mut rest = bytes.strip_prefix(MAGIC).ok_or_else(|| {
            damaged(WHAT, match bytes.starts_with(&MAGIC[..7]) {
                true => "another version of Pageferry saved it: restore it by that, and save it anew",
                false => "it does not begin as one",
            })
        })?;
        let Frame::Setup(setup) = next(&mut rest, 0)? else {
            return Err(damaged(WHAT, "it has no description of the machine"));
        };
        let pages = setup.memory_pages();
        let (mut vcpus, mut devices) = (Vec::new(), Vec::new());
        let end = loop {
            match next(&mut rest, pages)? {
                Frame::VcpuState(state) if state.vcpu as usize == vcpus.len() => {
                    vcpus.push(VcpuState(state.state));
                }
                Frame::DeviceState(device) => devices.push(device),
                Frame::SwitchOver(end) => break end,
                _ => return Err(damaged(WHAT, "its parts are not in order")),
            }
        };
        let counts = (end.vcpus as usize, end.devices as usize);
        if counts != (vcpus.len(), devices.len()) || !rest.is_empty() {
            return Err(damaged(WHAT, "its length is wrong"));
        }
        Ok(Self {
            setup,
            vcpus,
            devices,
            paused: end.paused,
        })
    }

    /// Gives a new machine these states. Its vCPUs must never have run. Nothing runs yet, and no
    /// page of memory is touched.
    ///
    /// # Errors
    /// When the machine is another one, or refuses a state. It must not run then.
    pub fn load(&self, vm: &RunningVm<'_>) -> Result<(), MigrationError> {
        let mut due = fits(&self.setup, vm)?;
        for device in &self.devices {
            due.take(device.clone())?;
        }
        if self.vcpus.len() != vm.vcpus.count() {
            let (announced, found) = (self.vcpus.len() as u32, self.vcpus.len());
            let vcpus = vm.vcpus.count();
            return Err(ProtocolError::VcpuStates {
                announced,
                found,
                vcpus,
            }
            .into());
        }
        devices::pause(vm.devices)?;
        let decoded = due.decode(self.devices.len() as u32)?;
        vm.vcpus.restore(&self.vcpus)?;
        for apply in decoded {
            apply();
        }
        devices::resume(vm.devices);
        Ok(())
    }
}

const WHAT: &str = "this is no saved VM";
