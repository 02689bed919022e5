//! The KVM engine: the kernel runs the guest.
//!
//! **Guarantee.** The engine keeps the promises of [`Machine`](crate::Machine) and
//! [`Vcpu`](crate::Vcpu) on `/dev/kvm` of an x86-64 host. It loses no kick and no dirty page. A
//! saved vCPU continues elsewhere without a visible difference. A vCPU that touches a missing page
//! sees that page's bytes and nothing else.
//!
//! **Mechanism.** Each RAM region has one memory slot over the guest's mapping of
//! [`GuestRam`](crate::GuestRam). A slot table always agrees with the kernel's slots, and
//! translates addresses. Faults on missing pages come through userfaultfd on that mapping, or as
//! *poison exits*. Each file of `x86` has one concept; `x86/mod.rs` lists them.
//!
//! **Neighbours.** Above: [`create`](crate::create) and [`select`](crate::select). Below:
//! `/dev/kvm`, `pageferry_userfault`. Only x86-64 has an implementation. On other hosts
//! [`probe_vm`] returns an error that says so.

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub use x86::{
    DirtyTracking, Irqchip, KvmFaults, KvmOptions, KvmSlot, MemoryPlug, check_cpuid,
    check_forced_poison, cpuid_of, create, create_on, create_pluggable, create_with,
    delivery_trials, dirty_ring_entries, probe_kernels, probe_vm,
};

#[cfg(not(target_arch = "x86_64"))]
mod absent {
    use crate::{CpuModel, Cpuid, MachineError, MachineSpec, NewMachine};

    fn absent() -> MachineError {
        MachineError::EngineUnavailable(
            "the KVM engine is implemented for x86-64 hosts only: use the soft engine".into(),
        )
    }

    /// Tests whether this host's KVM runs a VM: never on this architecture.
    ///
    /// # Errors
    /// Always.
    pub fn probe_vm() -> Result<(), MachineError> {
        Err(absent())
    }

    /// Tests whether this host's KVM runs kernels: never on this architecture.
    ///
    /// # Errors
    /// Always.
    pub fn probe_kernels() -> Result<(), MachineError> {
        Err(absent())
    }

    /// The CPUID of a PC on this host: never on this architecture.
    ///
    /// # Errors
    /// Always.
    pub fn cpuid_of(_: &CpuModel, _: u32) -> Result<Cpuid, MachineError> {
        Err(absent())
    }

    /// Tests whether a PC with this CPUID can run on this host: never on this architecture.
    ///
    /// # Errors
    /// Always.
    pub fn check_cpuid(_: &Cpuid, _: u32) -> Result<(), MachineError> {
        Err(absent())
    }

    /// Tests whether a PC with this CPUID can be received by poison: never on this architecture.
    ///
    /// # Errors
    /// Always.
    pub fn check_forced_poison(_: &Cpuid) -> Result<(), MachineError> {
        Err(absent())
    }

    /// The kinds of dirty log.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum DirtyTracking {}

    impl DirtyTracking {
        /// RAM in bytes from which a VM has rings: none on this architecture.
        pub const RINGS_FROM: u64 = u64::MAX;
    }

    /// The most entries of a vCPU's dirty ring: there are none on this architecture.
    #[must_use]
    pub fn dirty_ring_entries() -> Option<u32> {
        None
    }

    /// The trials of the deliveries: none on this architecture.
    pub fn delivery_trials() -> [&'static crate::DeliveryTrial; 0] {
        []
    }

    /// Creates a machine of this engine: never on this architecture.
    ///
    /// # Errors
    /// Always.
    pub fn create(_: MachineSpec) -> Result<NewMachine, MachineError> {
        Err(absent())
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub use absent::{
    DirtyTracking, check_cpuid, check_forced_poison, cpuid_of, create, delivery_trials,
    dirty_ring_entries, probe_kernels, probe_vm,
};
