//! The KVM engine: the kernel runs the guest.
//!
//! **Guarantee.** It keeps the promises of [`Machine`](crate::Machine) and [`Vcpu`](crate::Vcpu) on
//! `/dev/kvm` of an x86-64 host. It loses no kick and no dirty page. A saved vCPU goes on elsewhere
//! as if nothing had happened. A vCPU that touches a missing page sees that page's bytes and
//! nothing else.
//!
//! **Mechanism.** Each RAM region has one memory slot over the guest's mapping of
//! [`GuestRam`](crate::GuestRam). A slot table always agrees with the kernel's slots, and
//! translates addresses. Faults on missing pages come through userfaultfd on that mapping, or as
//! *poison exits*. Each file of `x86` has one concept: `kick`, `signal`, `dirty`, `exits`,
//! `userfault`, `poison`, `state`, ..
//!
//! **Neighbours.** Above: [`create`](crate::create) and [`select`](crate::select). Below:
//! `/dev/kvm`, `pageferry_userfault`. Only x86-64 has an implementation. Elsewhere [`probe_vm`]
//! says so.

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub use x86::{Irqchip, KvmSlot, MemoryPlug, create, create_pluggable, create_with, probe_vm};

#[cfg(not(target_arch = "x86_64"))]
mod absent {
    use crate::{MachineError, MachineSpec, NewMachine};

    fn absent() -> MachineError {
        MachineError::EngineUnavailable(
            "the KVM engine is implemented for x86-64 hosts only: use the soft engine".into(),
        )
    }

    /// Whether a VM really runs on this host's KVM: never on this architecture.
    ///
    /// # Errors
    /// Always.
    pub fn probe_vm() -> Result<(), MachineError> {
        Err(absent())
    }

    /// A machine of this engine: never on this architecture.
    ///
    /// # Errors
    /// Always.
    pub fn create(_: MachineSpec) -> Result<NewMachine, MachineError> {
        Err(absent())
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub use absent::{create, probe_vm};
