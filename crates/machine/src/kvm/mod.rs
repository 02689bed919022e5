//! The KVM engine: the kernel runs the guest.
//!
//! **Guarantee.** What [`Machine`](crate::Machine) and [`Vcpu`](crate::Vcpu) promise, on `/dev/kvm` of an
//! x86-64 host: no kick is lost, no dirty page is lost, a saved vCPU goes on elsewhere as if nothing had
//! happened, and a vCPU that touches a missing page never sees anything but that page's bytes.
//!
//! **Mechanism.** One memory slot a RAM region over the guest's mapping of [`GuestRam`](crate::GuestRam), in a slot table
//! that the kernel's slots always agree with and that addresses are translated by.
//! Faults on missing pages come through userfaultfd on that mapping, or as *poison exits*. Each file of
//! `x86` has one concept: `kick`, `signal`, `dirty`, `exits`, `userfault`, `poison`, `state`, ..
//!
//! **Neighbours.** Above: [`create`](crate::create) and [`select`](crate::select). Below: `/dev/kvm`,
//! `pageferry_userfault`. Only x86-64 has an implementation; elsewhere [`probe_vm`] says so.

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
