//! Fault delivery for a VM that a VMM has made itself.

use super::userfault::{EXIT_FLAG_USERFAULT, FaultPath};
use super::{events, trial};
use crate::{
    ArmOptions, Collapsed, Delivery, DeliveryInUse, FaultEvents, GuestRam, MachineError, RamRegion,
};
use pageferry_addr::{Gpa, Hva, RamPage};
use pageferry_userfault::PageBitmap;
use std::fmt;
use std::sync::Arc;

type SetUserfault = dyn Fn(&RamRegion, Option<Hva>) -> Result<(), MachineError> + Send + Sync;

/// Delivers faults on missing pages of a VM on KVM whose descriptor, memory slots and vCPU threads
/// belong to the VMM.
///
/// The VMM's slots show the guest's mapping of a [`GuestRam`]: its own mapping, which it names by
/// [`AdoptedRegion::mapped_at`](crate::AdoptedRegion::mapped_at), or that of
/// [`GuestRam::guest_hva`]. The methods do the part of [`Machine`](crate::Machine) that concerns
/// missing pages: a VMM's own machine calls the method of the same name.
///
/// | delivery | a vCPU that touches a missing page | needs |
/// |---|---|---|
/// | [`Delivery::Minor`], [`Delivery::Missing`] | sleeps inside `KVM_RUN` until its page is installed | nothing of the vCPU's loop |
/// | [`Delivery::Userfault`] | leaves with `KVM_EXIT_MEMORY_FAULT` | [`with_userfault`](Self::with_userfault), [`page_of_exit`](Self::page_of_exit) |
///
/// [`Delivery::Poison`] needs the vCPUs of this crate: they take its signals, and they carry out
/// the accesses that KVM cannot.
///
/// A VMM with [`Delivery::Userfault`] sets the bits of its slots, and handles the exits:
///
/// ```no_run
/// # use kvm_bindings::kvm_userspace_memory_region2;
/// # use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
/// # use pageferry_addr::{Gpa, RamPage};
/// # use pageferry_machine::kvm::KvmFaults;
/// # use pageferry_machine::{GuestRam, MachineError};
/// # use std::sync::Arc;
/// # type Failure = Box<dyn std::error::Error>;
/// # fn vmm(vm: VmFd, ram: Arc<GuestRam>, mut vcpu: VcpuFd, bring: fn(RamPage)) -> Result<(), Failure> {
/// const KVM_MEM_USERFAULT: u32 = 1 << 3;
///
/// let memory = Arc::clone(&ram);
/// let faults = KvmFaults::new(ram, 1).with_userfault(move |region, bits| {
///     let mut slot = kvm_userspace_memory_region2 {
///         slot: region.slot,
///         flags: if bits.is_some() { KVM_MEM_USERFAULT } else { 0 },
///         guest_phys_addr: region.gfn.gpa().0,
///         memory_size: region.pages * 4096,
///         userspace_addr: memory.guest_hva(region.first).0,
///         ..Default::default()
///     };
///     slot.pad2[0] = bits.map_or(0, |bits| bits.0); // `userfault_bitmap`
///     // SAFETY: the mappings and the bits stay as long as the slot has them.
///     let set = unsafe { vm.set_user_memory_region2(slot) };
///     let os = |e: kvm_ioctls::Error| std::io::Error::from_raw_os_error(e.errno());
///     set.map_err(|e| MachineError::os("KVM refuses a memory slot", os(e)))
/// });
/// loop {
///     match vcpu.run()? {
///         VcpuExit::MemoryFault { flags, gpa, .. } => {
///             let page = faults.page_of_exit(flags, Gpa(gpa));
///             // In a migration, `Resolver::memory_fault` brings it.
///             bring(page.ok_or("KVM cannot reach guest memory")?);
///         }
///         other => println!("{other:?}"),
///     }
/// }
/// # }
/// ```
pub struct KvmFaults {
    path: Arc<FaultPath>,
    vcpus: u32,
    set_userfault: Option<Box<SetUserfault>>,
}

impl fmt::Debug for KvmFaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KvmFaults({:?})", self.delivery())
    }
}

impl KvmFaults {
    /// For a VM with this memory and this number of vCPUs. The number matters only for the choice
    /// of the fastest delivery.
    #[must_use]
    pub fn new(ram: Arc<GuestRam>, vcpus: u32) -> Self {
        Self {
            path: Arc::new(FaultPath::new(ram)),
            vcpus,
            set_userfault: None,
        }
    }

    /// Adds [`Delivery::Userfault`], where KVM has it.
    ///
    /// `set` gives the slot over a region the address of the bits of its missing pages, by
    /// `KVM_SET_USER_MEMORY_REGION2` with the flag `KVM_MEM_USERFAULT`. With `None`, it takes flag
    /// and address away. The bits stay at their address until then.
    #[must_use]
    pub fn with_userfault(
        self,
        set: impl Fn(&RamRegion, Option<Hva>) -> Result<(), MachineError> + Send + Sync + 'static,
    ) -> Self {
        Self {
            set_userfault: Some(Box::new(set)),
            ..self
        }
    }

    fn set(&self, region: &RamRegion, bits: Option<Hva>) -> Result<(), MachineError> {
        let none = MachineError::NoDelivery(Delivery::Userfault);
        self.set_userfault.as_ref().ok_or(none)?(region, bits)
    }

    /// See [`Machine::deliveries`](crate::Machine::deliveries). The first call may run a small VM.
    #[must_use]
    pub fn deliveries(&self) -> Vec<Delivery> {
        let mut usable = trial::deliveries_on(self.path.ram.backing());
        usable.retain(|delivery| match delivery {
            Delivery::Poison => false,
            Delivery::Userfault => self.set_userfault.is_some(),
            _ => true,
        });
        usable
    }

    /// See [`Machine::delivery`](crate::Machine::delivery).
    #[must_use]
    pub fn delivery(&self) -> Option<DeliveryInUse> {
        self.path.armed().map(|armed| armed.in_use())
    }

    /// See [`Machine::arm_userfault`](crate::Machine::arm_userfault). No vCPU of the VM may have
    /// run before: it would find pages of the past.
    ///
    /// # Errors
    /// As there.
    pub fn arm_userfault(
        &self,
        missing: &Arc<PageBitmap>,
        options: &ArmOptions,
    ) -> Result<Vec<Box<dyn FaultEvents>>, MachineError> {
        let usable = || self.deliveries();
        let in_use = trial::delivery_for(self.vcpus, &self.path.ram, options, usable)?;
        if options.delivery == Some(Delivery::Poison) {
            return Err(MachineError::NoDelivery(Delivery::Poison));
        }
        events::arm(&self.path, missing, in_use, options, &|region, bits| {
            self.set(region, bits)
        })
    }

    /// The missing page of a `KVM_EXIT_MEMORY_FAULT` with these flags and this address. `None` if
    /// the exit has another reason. The vCPU's thread brings the page, and enters the guest again.
    #[must_use]
    pub fn page_of_exit(&self, flags: u64, gpa: Gpa) -> Option<RamPage> {
        let armed = self.path.armed().is_some() && flags & EXIT_FLAG_USERFAULT != 0;
        let layout = self.path.ram.layout();
        armed.then(|| layout.page_of(gpa.gfn())).flatten()
    }

    /// See [`Machine::receives_in_place`](crate::Machine::receives_in_place).
    #[must_use]
    pub fn receives_in_place(&self) -> bool {
        self.path.receives_in_place()
    }

    /// See [`Machine::install`](crate::Machine::install).
    ///
    /// # Errors
    /// As there.
    pub fn install(&self, first: RamPage, pages: u64) -> Result<(), MachineError> {
        self.path.install(first, pages)
    }

    /// See [`Machine::install_copy`](crate::Machine::install_copy).
    ///
    /// # Errors
    /// As there.
    pub fn install_copy(&self, page: RamPage, bytes: &[u8]) -> Result<(), MachineError> {
        self.path.install_copy(page, bytes)
    }

    /// See [`Machine::begin_postcopy`](crate::Machine::begin_postcopy).
    ///
    /// # Errors
    /// As there.
    pub fn begin_postcopy(&self) -> Result<(), MachineError> {
        self.path.begin_postcopy()
    }

    /// See [`Machine::disarm_userfault`](crate::Machine::disarm_userfault).
    ///
    /// # Errors
    /// As there.
    pub fn disarm_userfault(&self) -> Result<(), MachineError> {
        self.path.disarm(&|region, bits| self.set(region, bits))
    }

    /// See [`Machine::collapse`](crate::Machine::collapse).
    ///
    /// # Panics
    /// As there.
    #[must_use]
    pub fn collapse(&self, first: RamPage) -> Collapsed {
        self.path.collapse(first)
    }

    /// See [`Machine::host_large_bytes`](crate::Machine::host_large_bytes).
    ///
    /// # Errors
    /// As there.
    pub fn host_large_bytes(&self) -> Result<u64, MachineError> {
        self.path.host_large_bytes()
    }

    /// See [`Machine::abandon`](crate::Machine::abandon).
    pub fn abandon(&self) {
        self.path.abandon();
    }
}
