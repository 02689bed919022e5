//! Creates VMs of this engine, and implements [`Machine`].

use super::device::{open, unavailable};
use super::dirty::{DirtyLog, DirtyTracking};
use super::events::Events;
use super::plug::MemoryPlug;
use super::shared::{Caps, VmShared};
use super::slots::Slots;
use super::userfault::{FaultPath, deliveries_on, only_delivery};
use super::vcpu::KvmVcpu;
use super::{cpuid, msr, signal, stats, trial};
use crate::huge::{self, whole_range};
use crate::{
    ArmOptions, Backing, Collapsed, Delivery, DeliveryInUse, Engine, FaultEvents, GuestRam,
    LayoutError, MAX_VCPUS, Machine, MachineError, MachineKind, MachineSpec, NewMachine, RamLayout,
    RamRegion, Vcpu,
};
use kvm_bindings::{
    CpuId, KVM_CAP_SREGS2, KVM_CAP_XSAVE2, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2,
};
use kvm_ioctls::{Kvm, VcpuFd};
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use pageferry_userfault::PageBitmap;
use std::ops::Range;
use std::sync::Arc;

/// KVM takes three pages below the top of the hole on Intel hosts (`KVM_SET_TSS_ADDR`), and the
/// page before them for its identity map. RAM never reaches there.
const TSS_ADDRESS: usize = 0xfffb_d000;
const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;
/// These pages, and those of the interrupt controllers: IOAPIC and LAPIC.
const RESERVED: Range<Gpa> = Gpa(0xfec0_0000)..Gpa(1 << 32);

/// Whether the VM has interrupt controllers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Irqchip {
    /// None: HLT leaves the guest, and nothing interrupts it.
    #[default]
    None,
    /// KVM's PIC, IOAPIC and one LAPIC per vCPU. HLT waits in the kernel.
    Kernel,
}

/// The parts of a VM that a caller may choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct KvmOptions {
    /// The interrupt controllers. A vCPU's state moves only between machines with the same.
    pub irqchip: Irqchip,
    /// The kind of dirty log.
    pub dirty_tracking: DirtyTracking,
}

/// The VM without its vCPUs.
struct KvmMachine(Arc<VmShared>);

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
pub fn create_with(spec: MachineSpec, options: KvmOptions) -> Result<NewMachine, MachineError> {
    create_pluggable(spec, options).map(|(machine, _)| machine)
}

/// [`create_with`], plus a handle that plugs memory beyond RAM into the machine.
///
/// # Errors
/// As [`create_with`].
pub fn create_pluggable(
    spec: MachineSpec,
    options: KvmOptions,
) -> Result<(NewMachine, MemoryPlug), MachineError> {
    let layout = RamLayout::for_memory(spec.memory_bytes)?;
    create_on(
        spec.vcpus,
        GuestRam::with_backing(layout, spec.backing)?,
        options,
    )
}

/// [`create_pluggable`], with memory that the caller has made or adopted.
///
/// The host maps huge pages of 2 MiB to the guest where guest address, place in the memfd, and the
/// sum of the regions before agree modulo 2 MiB.
///
/// # Errors
/// As [`create_with`]. [`MachineError::Layout`] if a region reaches into the 20 MiB below 4 GiB.
/// Interrupt controllers and KVM's own pages are there.
pub fn create_on(
    vcpus: u32,
    ram: GuestRam,
    options: KvmOptions,
) -> Result<(NewMachine, MemoryPlug), MachineError> {
    if !(1..=MAX_VCPUS).contains(&vcpus) {
        return Err(LayoutError::Vcpus(vcpus).into());
    }
    check_layout(ram.layout())?;
    let kvm = open(c"/dev/kvm")?;
    let most = kvm.get_max_vcpus();
    if vcpus as usize > most {
        return Err(MachineError::EngineUnavailable(format!(
            "this host's KVM allows {most} vCPUs a VM, and {vcpus} were asked for"
        )));
    }
    signal::install_handler()?;
    let shared = Arc::new(new_vm(&kvm, vcpus, ram, options)?);
    let run_bytes = kvm
        .get_vcpu_mmap_size()
        .map_err(|e| unavailable("KVM does not size its vCPUs' shared page", e))?;
    let mut made: Vec<Box<dyn Vcpu>> = Vec::with_capacity(vcpus as usize);
    for id in 0..vcpus {
        let (fd, cpuid) = new_vcpu(&shared, id)?;
        shared.dirty.add_vcpu(&fd)?;
        msr::survey(&kvm, &fd)?;
        made.push(Box::new(KvmVcpu::new(
            fd,
            id,
            cpuid,
            Arc::clone(&shared),
            run_bytes,
        )?));
    }
    let plug = MemoryPlug::new(Arc::clone(&shared));
    let machine = NewMachine {
        machine: Arc::new(KvmMachine(shared)),
        vcpus: made,
    };
    Ok((machine, plug))
}

/// Checks that RAM keeps out of the addresses that a PC has for other things.
fn check_layout(layout: &RamLayout) -> Result<(), LayoutError> {
    let reserved = RESERVED.start.gfn()..RESERVED.end.gfn();
    let into = |region: &&RamRegion| {
        region.gfn < reserved.end && region.gfn.0 + region.pages > reserved.start.0
    };
    match layout.regions().iter().find(into) {
        None => Ok(()),
        Some(region) => Err(LayoutError::Region {
            start: region.gfn.gpa(),
            bytes: region.pages * PAGE_SIZE,
            why: "reaches into 0xfec00000..0x100000000, which interrupt controllers and KVM take",
        }),
    }
}

fn new_vm(
    kvm: &Kvm,
    vcpus: u32,
    ram: GuestRam,
    options: KvmOptions,
) -> Result<VmShared, MachineError> {
    let vm = kvm
        .create_vm()
        .map_err(|e| unavailable("KVM refuses to create a VM", e))?;
    vm.set_identity_map_address(IDENTITY_MAP_ADDRESS)
        .map_err(|e| unavailable("KVM refuses the address of its identity map", e))?;
    vm.set_tss_address(TSS_ADDRESS)
        .map_err(|e| unavailable("KVM refuses the address of its TSS", e))?;
    if options.irqchip == Irqchip::Kernel {
        vm.create_irq_chip()
            .map_err(|e| unavailable("KVM refuses to create interrupt controllers", e))?;
    }
    let offers = |cap: u32| vm.check_extension_raw(cap.into());
    let caps = Caps {
        sregs2: offers(KVM_CAP_SREGS2) > 0,
        xsave_bytes: usize::try_from(offers(KVM_CAP_XSAVE2))
            .unwrap_or(0)
            .max(super::sys::XSAVE_BASE_BYTES),
        lapic: options.irqchip == Irqchip::Kernel,
    };
    let supported = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(|e| unavailable("KVM does not say which CPUID it supports", e))?;
    let ram = Arc::new(ram);
    let slots = Slots::new(&vm);
    for region in ram.layout().regions() {
        slots.create_ram(&vm, &ram, region)?;
    }
    let dirty = DirtyLog::new(&vm, options.dirty_tracking, ram.layout().bytes())?;
    let faults = FaultPath::new();
    let supported_cpuid = supported.as_slice().to_vec();
    Ok(VmShared {
        vm,
        ram,
        slots,
        vcpus,
        caps,
        supported_cpuid,
        dirty,
        faults,
    })
}

fn new_vcpu(shared: &VmShared, id: u32) -> Result<(VcpuFd, Vec<kvm_cpuid_entry2>), MachineError> {
    let fd = shared
        .vm
        .create_vcpu(id.into())
        .map_err(|e| unavailable("KVM refuses to create a vCPU", e))?;
    let entries = cpuid::for_vcpu(&shared.supported_cpuid, id);
    let wanted = CpuId::from_entries(&entries).expect("as many leaves as KVM gave");
    fd.set_cpuid2(&wanted)
        .map_err(|e| unavailable("KVM refuses the CPUID it supports", e))?;
    Ok((fd, entries))
}

impl Machine for KvmMachine {
    fn kind(&self) -> MachineKind<'_> {
        Engine::Kvm.kind()
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
        deliveries_on(self.0.ram.backing())
    }

    fn delivery(&self) -> Option<DeliveryInUse> {
        self.0.faults.armed().map(|armed| armed.in_use())
    }

    fn arm_userfault(
        &self,
        missing: Arc<PageBitmap>,
        options: ArmOptions,
    ) -> Result<Vec<Box<dyn FaultEvents>>, MachineError> {
        options.check(self.0.ram.pages(), self.0.ram.backing())?;
        let forced = options.delivery.is_some();
        let (vm, userfaultfds) = (&self.0, options.userfaultfds);
        let in_use = match (options.delivery, only_delivery(vm.ram.backing())) {
            (Some(delivery), _) => DeliveryInUse {
                delivery,
                because: "it was requested".into(),
            },
            (None, Some((delivery, because))) => DeliveryInUse {
                delivery,
                because: because.into(),
            },
            (None, None) => trial::choose(vm.vcpus)?,
        };
        vm.ram.gate.arm(&missing, || {
            let missing = Arc::clone(&missing);
            vm.faults.arm(vm, missing, in_use, forced, userfaultfds)
        })?;
        if vm.ram.backing() == Backing::Anonymous {
            let vm = Arc::downgrade(vm);
            self.0.ram.map.get_or_init(|| {
                Box::new(move |first, pages| {
                    // If this fails, a fault thread does it when the touch sleeps.
                    let _ = (vm.upgrade()).map(|vm| vm.faults.install(&vm.ram, first, pages));
                })
            });
        }
        let mut streams: Vec<Box<dyn FaultEvents>> = Vec::new();
        for part in 0..userfaultfds as usize {
            for _ in 0..options.readers {
                streams.push(Box::new(Events::new(Arc::clone(&self.0), part)));
            }
        }
        Ok(streams)
    }

    fn receives_in_place(&self) -> bool {
        self.0
            .faults
            .armed()
            .is_none_or(|armed| armed.delivery != Delivery::Missing)
    }

    fn install(&self, first: RamPage, pages: u64) -> Result<(), MachineError> {
        self.0.faults.install(&self.0.ram, first, pages)
    }

    fn install_copy(&self, page: RamPage, bytes: &[u8]) -> Result<(), MachineError> {
        self.0.faults.install_copy(&self.0.ram, page, bytes)
    }

    fn begin_postcopy(&self) -> Result<(), MachineError> {
        self.0.faults.begin_postcopy(&self.0.ram)?;
        self.0.ram.gate.begin();
        Ok(())
    }

    fn assist_postcopy(
        &self,
        stop: &dyn Fn() -> bool,
        want: &dyn Fn(RamPage),
    ) -> Result<(), MachineError> {
        super::poison::assist(&self.0, stop, want)
    }

    fn disarm_userfault(&self) -> Result<(), MachineError> {
        self.0.faults.disarm(&self.0)?;
        self.0.ram.gate.begin();
        Ok(())
    }

    fn collapse(&self, first: RamPage) -> Collapsed {
        let range = whole_range(&self.0.ram, first);
        let armed = self.0.faults.active();
        let missing = armed.and_then(|armed| armed.missing.next_set(range.start));
        match missing {
            Some(missing) if missing < range.end => Collapsed::Missing,
            _ => huge::collapse(&self.0.ram, self.0.ram.guest_hva(RamPage(0)), first),
        }
    }

    fn host_large_bytes(&self) -> Result<u64, MachineError> {
        huge::host_bytes(&self.0.ram, self.0.ram.guest_hva(RamPage(0)))
    }

    fn engine_large_bytes(&self) -> Option<u64> {
        stats::large_bytes(&self.0.vm)
    }

    fn abandon(&self) {
        self.0.faults.abandon();
    }
}
