//! The VM that a migration moves.

use crate::devices::DeviceStates;
use crate::error::MigrationError;
use crate::wire::{Kind, MAX_NAME_BYTES, Setup};
use pageferry_machine::{Device, Machine, Vcpus};
use std::sync::Arc;

/// A VM with its vCPUs. It may be paused.
#[derive(Clone, Copy)]
pub struct RunningVm<'a> {
    /// The machine.
    pub machine: &'a Arc<dyn Machine>,
    /// Its vCPUs.
    pub vcpus: &'a dyn Vcpus,
    /// The devices whose states travel. Both ends have the same ones, by name. A destination pauses
    /// them before the VM comes, and a source that has handed the VM over leaves them paused. A VM
    /// that arrives paused has paused vCPUs only: its devices work, as after any switch-over.
    pub devices: &'a [Arc<dyn Device>],
}

/// Returns the names of the machine's kind.
///
/// # Errors
/// [`MigrationError::Internal`] for a name that cannot travel.
pub(crate) fn kind_of(machine: &dyn Machine) -> Result<Kind, MigrationError> {
    let kind = machine.kind();
    let name = |what: &str, name: &str| {
        name.parse().map_err(|_| {
            MigrationError::Internal(format!(
                "the machine's {what} has the name '{}', expected 1 to {MAX_NAME_BYTES} printable \
                 ASCII characters without spaces",
                name.escape_default()
            ))
        })
    };
    Ok(Kind {
        engine: name("engine", kind.engine)?,
        isa: name("instruction set", kind.isa)?,
        state_format: name("vCPU state format", kind.state_format)?,
    })
}

/// Checks that a machine is the one that a VM needs. Returns its devices, which wait for their
/// states.
///
/// # Errors
/// [`MigrationError::Mismatch`] with the first difference.
pub(crate) fn fits<'a>(
    setup: &Setup,
    vm: &RunningVm<'a>,
) -> Result<DeviceStates<'a>, MigrationError> {
    let layout = vm.machine.ram().layout();
    let same_regions = setup.regions.len() == layout.regions().len()
        && setup
            .regions
            .iter()
            .zip(layout.regions())
            .all(|(theirs, ours)| {
                (theirs.slot, theirs.gfn, theirs.pages) == (ours.slot, ours.gfn, ours.pages)
            });
    let mismatch = if let Some(mismatch) = mismatch_of(&setup.kind, &kind_of(&**vm.machine)?) {
        mismatch
    } else if setup.vcpus as usize != vm.vcpus.count() {
        format!(
            "it has {} vCPUs, this machine has {}",
            setup.vcpus,
            vm.vcpus.count()
        )
    } else if setup.memory_bytes != layout.bytes() {
        format!(
            "it has {} bytes of memory, this machine has {}",
            setup.memory_bytes,
            layout.bytes()
        )
    } else if !same_regions {
        "its memory regions differ from those of this machine".into()
    } else {
        match DeviceStates::due(vm.devices, &setup.devices) {
            Ok(states) => return Ok(states),
            Err(mismatch) => mismatch,
        }
    };
    Err(MigrationError::Mismatch(format!(
        "the offered VM does not fit: {mismatch}"
    )))
}

/// The first name in which the offered VM and this machine differ.
fn mismatch_of(theirs: &Kind, ours: &Kind) -> Option<String> {
    [
        ("engine", &theirs.engine, &ours.engine),
        ("instruction set", &theirs.isa, &ours.isa),
        (
            "format of vCPU states",
            &theirs.state_format,
            &ours.state_format,
        ),
    ]
    .into_iter()
    .find(|(_, theirs, ours)| theirs != ours)
    .map(|(what, theirs, ours)| format!("its {what} is {theirs}, this machine's is {ours}"))
}
