//! The choice of an engine, and the creation of its machines.

use crate::{Engine, EngineChoice, MachineError, MachineSpec, NewMachine};

/// The error for an engine that this build lacks.
#[cfg(not(all(feature = "kvm", feature = "soft")))]
fn not_built(engine: Engine) -> MachineError {
    MachineError::EngineUnavailable(format!(
        "this build has no {engine} engine: build pageferry-machine with the feature `{engine}`"
    ))
}

/// Tests whether this host and this build run a VM of the KVM engine.
fn probe_kvm() -> Result<(), MachineError> {
    #[cfg(feature = "kvm")]
    return crate::kvm::probe_vm();
    #[cfg(not(feature = "kvm"))]
    Err(not_built(Engine::Kvm))
}

/// Tests whether this build has the soft engine.
#[cfg_attr(
    feature = "soft",
    expect(
        clippy::unnecessary_wraps,
        reason = "an engine of this build runs on any host"
    )
)]
fn probe_soft() -> Result<(), MachineError> {
    #[cfg(feature = "soft")]
    return Ok(());
    #[cfg(not(feature = "soft"))]
    Err(not_built(Engine::Soft))
}

/// Chooses the engine, and gives the reason as a sentence without its final stop.
///
/// # Errors
/// When the user chose KVM by name and a probe VM does not run here. When this build lacks the
/// engine.
pub fn select(choice: EngineChoice) -> Result<(Engine, String), MachineError> {
    match choice {
        EngineChoice::Only(Engine::Soft) => {
            probe_soft()?;
            Ok((Engine::Soft, "it was requested".into()))
        }
        EngineChoice::Only(Engine::Kvm) => {
            probe_kvm()?;
            Ok((Engine::Kvm, "it was requested, and a probe VM runs".into()))
        }
        EngineChoice::Auto => match probe_kvm() {
            Ok(()) => Ok((Engine::Kvm, "a probe VM runs on /dev/kvm".into())),
            Err(why) => {
                probe_soft()?;
                Ok((Engine::Soft, format!("KVM is not usable here: {why}")))
            }
        },
    }
}

/// Creates a machine of `engine` with zeroed RAM. Its vCPUs are not started.
///
/// # Errors
/// When the sizes are out of range or the host refuses. When this build lacks the engine.
pub fn create(engine: Engine, spec: MachineSpec) -> Result<NewMachine, MachineError> {
    match engine {
        #[cfg(feature = "kvm")]
        Engine::Kvm => crate::kvm::create(spec),
        #[cfg(feature = "soft")]
        Engine::Soft => crate::soft::create(spec),
        #[cfg(not(all(feature = "kvm", feature = "soft")))]
        absent => Err(not_built(absent)),
    }
}

/// Creates a machine with the interrupt controllers and timers of a PC, on which an x86-64 kernel
/// runs ([`crate::Linux::load_pc`]). Its vCPUs have this CPUID ([`crate::kvm::cpuid_of`]), or all
/// that this host supports.
///
/// # Errors
/// As [`create`], when the host lacks a feature of `cpuid`, and on a host that is no x86-64.
#[cfg(feature = "pc")]
pub fn create_pc(
    spec: MachineSpec,
    cpuid: Option<&crate::Cpuid>,
) -> Result<NewMachine, MachineError> {
    #[cfg(target_arch = "x86_64")]
    {
        let options = crate::kvm::KvmOptions {
            irqchip: crate::kvm::Irqchip::Kernel,
            cpuid,
            ..Default::default()
        };
        crate::kvm::create_with(spec, options)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = cpuid;
        crate::kvm::create(spec)
    }
}
