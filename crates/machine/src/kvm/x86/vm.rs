//! Creates VMs of this engine.

use super::device::{open, unavailable};
use super::dirty::{DirtyLog, DirtyTracking};
use super::shared::{Caps, VmShared};
use super::slots::{Slots, check_adjacent};
use super::userfault::FaultPath;
use super::vcpu::KvmVcpu;
use super::{cpuid, events, msr, poison, signal, start};
use crate::{
    ArmOptions, Cpuid, DeliveryInUse, FaultEvents, GuestRam, LayoutError, MAX_VCPUS, MachineError,
    MachineSpec, RamLayout, RamRegion, Vcpu,
};
use kvm_bindings::{
    CpuId, KVM_CAP_SREGS2, KVM_CAP_X86_MSR_FILTER, KVM_CAP_X86_USER_SPACE_MSR, KVM_CAP_XSAVE2,
    KVM_MSR_EXIT_REASON_FILTER, KVM_PIT_SPEAKER_DUMMY, kvm_cpuid_entry2, kvm_enable_cap,
    kvm_pit_config,
};
use kvm_ioctls::{Kvm, VcpuFd};
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use pageferry_userfault::PageBitmap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

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
    /// KVM's PICs, IOAPIC, PIT, and one LAPIC per vCPU, as a kernel for PCs wants them. HLT waits
    /// in the kernel, and all vCPUs but the first wait for a start by the first.
    Kernel,
}

/// The parts of a VM that a caller may choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct KvmOptions<'a> {
    /// The interrupt controllers. A vCPU's state moves only between machines with the same.
    pub irqchip: Irqchip,
    /// The CPUID of a machine with interrupt controllers: that of another host, or of
    /// [`cpuid_of`](super::cpuid::cpuid_of). `None`: all that this host supports.
    pub cpuid: Option<&'a Cpuid>,
    /// The kind of dirty log.
    pub dirty_tracking: DirtyTracking,
}

/// A VM with its vCPUs.
pub(super) struct NewVm {
    pub(super) vm: Arc<VmShared>,
    pub(super) vcpus: Vec<Box<dyn Vcpu>>,
}

/// Creates a VM with new memory.
///
/// # Errors
/// When a size is out of range, or KVM cannot be used or refuses.
pub(super) fn create(spec: MachineSpec, options: KvmOptions<'_>) -> Result<NewVm, MachineError> {
    let layout = RamLayout::for_memory(spec.memory_bytes)?;
    let ram = GuestRam::with_backing(layout, spec.backing)?;
    create_on(spec.vcpus, ram, options)
}

/// Creates a VM with this memory.
///
/// # Errors
/// As [`create`], and when RAM reaches into addresses that a PC has for other things.
pub(super) fn create_on(
    vcpus: u32,
    ram: GuestRam,
    options: KvmOptions<'_>,
) -> Result<NewVm, MachineError> {
    if !(1..=MAX_VCPUS).contains(&vcpus) {
        return Err(LayoutError::Vcpus(vcpus).into());
    }
    check_layout(ram.layout())?;
    check_adjacent(&ram)?;
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
        msr::survey(&kvm, &fd, shared.caps.lapic)?;
        made.push(Box::new(KvmVcpu::new(
            fd,
            id,
            cpuid,
            Arc::clone(&shared),
            run_bytes,
        )?));
    }
    Ok(NewVm {
        vm: shared,
        vcpus: made,
    })
}

impl VmShared {
    /// Arms the machine with this delivery; see [`crate::Machine::arm_userfault`].
    pub(super) fn arm(
        &self,
        missing: &Arc<PageBitmap>,
        in_use: DeliveryInUse,
        options: &ArmOptions,
    ) -> Result<Vec<Box<dyn FaultEvents>>, MachineError> {
        let set = |region: &RamRegion, bits| self.slots.set_userfault(&self.vm, region, bits);
        if self.caps.lapic && self.caps.msr_exits {
            // Without it, KVM sleeps for a missing page in the write of such a register.
            msr::set_writes_leave(&self.vm, true)?;
        }
        events::arm(&self.faults, missing, in_use, options, &set)
    }

    /// See [`crate::Machine::disarm_userfault`].
    pub(super) fn disarm(&self) -> Result<(), MachineError> {
        let set = |region: &RamRegion, bits| self.slots.set_userfault(&self.vm, region, bits);
        self.faults.disarm(&set)?;
        if self.caps.lapic && self.caps.msr_exits {
            // Where this fails, each such write goes on to cost an exit.
            let _ = msr::set_writes_leave(&self.vm, false);
        }
        Ok(())
    }

    /// See [`crate::Machine::assist_postcopy`].
    pub(super) fn assist(
        &self,
        stop: &dyn Fn() -> bool,
        want: &dyn Fn(RamPage),
    ) -> Result<(), MachineError> {
        let mut translator = self.translator();
        let page_of = |gpa: Gpa| translator.page_of(gpa.gfn());
        poison::assist(&self.faults, self.vcpus, page_of, stop, want)
    }
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
    options: KvmOptions<'_>,
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
        // With the port by which a kernel measures its TSC.
        let pit = kvm_pit_config {
            flags: KVM_PIT_SPEAKER_DUMMY,
            ..Default::default()
        };
        vm.create_pit2(pit)
            .map_err(|e| unavailable("KVM refuses to create a timer", e))?;
    }
    let offers = |cap: u32| vm.check_extension_raw(cap.into());
    let caps = Caps {
        sregs2: offers(KVM_CAP_SREGS2) > 0,
        xsave_bytes: usize::try_from(offers(KVM_CAP_XSAVE2))
            .unwrap_or(0)
            .max(super::sys::XSAVE_BASE_BYTES),
        lapic: options.irqchip == Irqchip::Kernel,
        msr_exits: offers(KVM_CAP_X86_MSR_FILTER) > 0
            && vm
                .enable_cap(&kvm_enable_cap {
                    cap: KVM_CAP_X86_USER_SPACE_MSR,
                    args: [KVM_MSR_EXIT_REASON_FILTER.into(), 0, 0, 0],
                    ..Default::default()
                })
                .is_ok(),
    };
    let mut cpuid = match caps.lapic {
        true => cpuid::of_pc(kvm, vcpus)?,
        false => cpuid::of_host(kvm)?,
    };
    if let (true, Some(chosen)) = (caps.lapic, options.cpuid) {
        let chosen = cpuid::to_entries(chosen);
        cpuid::refuse_unoffered(&chosen, &cpuid).map_err(MachineError::Cpu)?;
        cpuid = chosen;
    }
    let ram = Arc::new(ram);
    let slots = Slots::new(&vm);
    for region in ram.layout().regions() {
        slots.create_ram(&vm, &ram, region)?;
    }
    let dirty = DirtyLog::new(&vm, options.dirty_tracking, ram.layout().bytes())?;
    let faults = Arc::new(FaultPath::new(Arc::clone(&ram)));
    Ok(VmShared {
        vm,
        ram,
        slots,
        vcpus,
        caps,
        cpuid,
        dirty,
        faults,
        clock: Mutex::new(None),
    })
}

fn new_vcpu(shared: &VmShared, id: u32) -> Result<(VcpuFd, Vec<kvm_cpuid_entry2>), MachineError> {
    let fd = shared
        .vm
        .create_vcpu(id.into())
        .map_err(|e| unavailable("KVM refuses to create a vCPU", e))?;
    let entries = cpuid::for_vcpu(&shared.cpuid, id);
    let wanted = CpuId::from_entries(&entries).expect("no more leaves than KVM takes");
    fd.set_cpuid2(&wanted)
        .map_err(|e| unavailable("KVM refuses the CPUID", e))?;
    if shared.caps.lapic {
        start::prepare_pc(&fd)?;
    }
    Ok((fd, entries))
}
