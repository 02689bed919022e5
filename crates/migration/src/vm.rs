//! The VM that a migration moves.

use crate::error::MigrationError;
use crate::wire::{Kind, MAX_NAME_BYTES};
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
