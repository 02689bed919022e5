//! The choice of an engine, and the creation of its machines.

use crate::{Engine, EngineChoice, MachineError, MachineSpec, NewMachine};

/// Chooses the engine, and gives the reason as a sentence without its final stop.
///
/// # Errors
/// When the user chose KVM by name and a probe VM does not run here.
pub fn select(choice: EngineChoice) -> Result<(Engine, String), MachineError> {
    match choice {
        EngineChoice::Only(Engine::Soft) => Ok((Engine::Soft, "it was requested".into())),
        EngineChoice::Only(Engine::Kvm) => {
            crate::kvm::probe_vm()?;
            Ok((Engine::Kvm, "it was requested, and a probe VM runs".into()))
        }
        EngineChoice::Auto => match crate::kvm::probe_vm() {
            Ok(()) => Ok((Engine::Kvm, "a probe VM runs on /dev/kvm".into())),
            Err(why) => Ok((Engine::Soft, format!("KVM is not usable here: {why}"))),
        },
    }
}

/// Creates a machine of `engine` with zeroed RAM. Its vCPUs are not started.
///
/// # Errors
/// When the sizes are out of range or the host refuses.
pub fn create(engine: Engine, spec: MachineSpec) -> Result<NewMachine, MachineError> {
    match engine {
        Engine::Kvm => crate::kvm::create(spec),
        Engine::Soft => crate::soft::create(spec),
    }
}
