//! Machines of this engine: [`Machine`] on a VM of `vm`.

use super::chips::{self, Chips};
use super::plug::MemoryPlug;
use super::shared::VmShared;
use super::state::Parts;
use super::vm::{self, KvmOptions, NewVm};
use super::{stats, sys, trial};
use crate::{
    ArmOptions, Collapsed, Delivery, DeliveryInUse, Device, Engine, FaultEvents, GuestRam,
    Interrupt, Machine, MachineError, MachineKind, MachineSpec, NewMachine, VcpuState,
};
use pageferry_addr::{Gpa, RamPage};
use pageferry_userfault::PageBitmap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// The VM without its vCPUs.
struct KvmMachine(Arc<VmShared>);

/// Machines with interrupt controllers. Their vCPUs' states have more than those of others.
const PC: MachineKind<'static> = MachineKind::new("kvm", "x86_64", "kvm-pc-x86_64/2");

/// Creates a VM without interrupt controllers; see [`crate::create`].
///
/// # Errors
/// When a size is out of range, or KVM cannot be used or refuses.
pub fn create(spec: MachineSpec) -> Result<NewMachine, MachineError> {
    create_with(spec, KvmOptions::default())
}

/// [`create`], with a choice of parts.
///
/// # Errors
/// As [`create`], and when KVM lacks a part.
pub fn create_with(spec: MachineSpec, options: KvmOptions<'_>) -> Result<NewMachine, MachineError> {
    create_pluggable(spec, options).map(|(machine, _)| machine)
}

/// [`create_with`], plus a handle that plugs memory beyond RAM into the machine.
///
/// # Errors
/// As [`create_with`].
pub fn create_pluggable(
    spec: MachineSpec,
    options: KvmOptions<'_>,
) -> Result<(NewMachine, MemoryPlug), MachineError> {
    vm::create(spec, options).map(machine)
}

/// [`create_pluggable`], with memory that the caller has made or adopted.
///
/// The host maps huge pages of 2 MiB to the guest where guest address, place in the memfd, and the
/// sum of the regions before agree modulo 2 MiB.
///
/// # Errors
/// As [`create_with`]. [`MachineError::Adopt`] if the VMM has mapped the memory for its guest
/// itself ([`AdoptedRegion::mapped_at`](crate::AdoptedRegion::mapped_at)):
/// [`KvmFaults`](super::faults::KvmFaults) serves such memory. [`MachineError::Layout`] if a region
/// reaches into the 20 MiB below 4 GiB. Interrupt controllers and KVM's own pages are there.
pub fn create_on(
    vcpus: u32,
    ram: GuestRam,
    options: KvmOptions<'_>,
) -> Result<(NewMachine, MemoryPlug), MachineError> {
    vm::create_on(vcpus, ram, options).map(machine)
}

fn machine(new: NewVm) -> (NewMachine, MemoryPlug) {
    let plug = MemoryPlug::new(Arc::clone(&new.vm));
    let machine = NewMachine {
        machine: Arc::new(KvmMachine(new.vm)),
        vcpus: new.vcpus,
    };
    (machine, plug)
}

impl Machine for KvmMachine {
    fn kind(&self) -> MachineKind<'_> {
        if self.0.caps.lapic {
            return PC;
        }
        Engine::Kvm.kind()
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        if self.0.caps.lapic {
            return vec![Arc::new(Chips(Arc::clone(&self.0)))];
        }
        Vec::new()
    }

    fn interrupt(&self, line: u32) -> Result<Arc<dyn Interrupt>, MachineError> {
        chips::line(&self.0, line)
    }

    fn doorbell(&self, gpa: Gpa, event: BorrowedFd<'_>) -> Result<bool, MachineError> {
        let set = sys::ioeventfd(&self.0.vm, event, gpa.0);
        set.map_err(|e| MachineError::os("cannot connect a doorbell", e))?;
        Ok(true)
    }

    fn ram(&self) -> &Arc<GuestRam> {
        &self.0.ram
    }

    fn set_dirty_log(&self, on: bool) -> Result<(), MachineError> {
        let vm = &self.0;
        vm.dirty.switch(&vm.vm, &vm.slots, &vm.ram, on)
    }

    fn harvest_dirty(&self, dirty: &PageBitmap, rearm: bool) -> Result<usize, MachineError> {
        self.0.dirty.harvest(&self.0.vm, &self.0.ram, dirty, rearm)
    }

    fn deliveries(&self) -> Vec<Delivery> {
        trial::deliveries_on(self.0.ram.backing())
    }

    fn delivery(&self) -> Option<DeliveryInUse> {
        self.0.faults.armed().map(|armed| armed.in_use())
    }

    fn arm_userfault(
        &self,
        missing: Arc<PageBitmap>,
        options: ArmOptions,
    ) -> Result<Vec<Box<dyn FaultEvents>>, MachineError> {
        let vm = &self.0;
        let in_use = match options.delivery {
            None if vm.caps.lapic && self.deliveries().contains(&Delivery::Minor) => {
                DeliveryInUse {
                    delivery: Delivery::Minor,
                    because: "the guest has an operating system, whose pages KVM itself accesses"
                        .into(),
                }
            }
            _ => trial::delivery_for(vm.vcpus, &vm.ram, &options, || self.deliveries())?,
        };
        vm.arm(&missing, in_use, &options)
    }

    fn state_pages(&self, state: &VcpuState) -> Vec<RamPage> {
        let mut translator = self.0.translator();
        let parts = Parts::decode(state);
        let pages = parts.iter().flat_map(|parts| &parts.pages);
        pages
            .filter_map(|page| translator.page_of(page.gpa.gfn()))
            .collect()
    }

    fn receives_in_place(&self) -> bool {
        self.0.faults.receives_in_place()
    }

    fn install(&self, first: RamPage, pages: u64) -> Result<(), MachineError> {
        self.0.faults.install(first, pages)
    }

    fn install_copy(&self, page: RamPage, bytes: &[u8]) -> Result<(), MachineError> {
        self.0.faults.install_copy(page, bytes)
    }

    fn begin_postcopy(&self) -> Result<(), MachineError> {
        self.0.faults.begin_postcopy()
    }

    fn assist_postcopy(
        &self,
        stop: &dyn Fn() -> bool,
        want: &dyn Fn(RamPage),
    ) -> Result<(), MachineError> {
        self.0.assist(stop, want)
    }

    fn disarm_userfault(&self) -> Result<(), MachineError> {
        self.0.disarm()
    }

    fn collapse(&self, first: RamPage) -> Collapsed {
        self.0.faults.collapse(first)
    }

    fn host_large_bytes(&self) -> Result<u64, MachineError> {
        self.0.faults.host_large_bytes()
    }

    fn engine_large_bytes(&self) -> Option<u64> {
        stats::large_bytes(&self.0.vm)
    }

    fn abandon(&self) {
        self.0.faults.abandon();
    }
}
