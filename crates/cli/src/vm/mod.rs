//! A VM for the commands: a machine, its threads and its guest program.

mod description;
mod devices;
mod disk;
mod saved;

pub(crate) use description::{GuestDescription, GuestProgram};
pub(crate) use devices::{DeviceArgs, DeviceKind, Devices, Disks};
pub(crate) use disk::Disk;
pub(crate) use pageferry_harness::deliveries_of;
pub(crate) use saved::SavedFiles;

use crate::args::BackingArgs;
use crate::exit::{Exit, Failure};
use crate::limits::{self, Needs};
use crate::memory;
use crate::report::LargeMappings;
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_guest::{Control, Verdict, Workload};
use pageferry_harness::size;
use pageferry_harness::{BootError, verify};
use pageferry_machine::{
    AccessError, ArmOptions, Backing, Console, CpuModel, DeliveryInUse, Engine, EngineChoice,
    Linux, MachineSpec, RamLayout, Reset, VcpuThreads, kvm,
};
use pageferry_migration::{Resolver, RunningVm};
use std::sync::Arc;
use std::time::Duration;

/// The time limit for vCPUs to leave the guest. A kick takes well under a millisecond on an idle
/// host.
pub(crate) const PAUSE_LIMIT: Duration = Duration::from_secs(10);

/// Chooses the engine for a VM that this host receives, and gives the reason. With `auto`, the
/// engine must be able to deliver faults on missing pages here.
///
/// # Errors
/// As [`pageferry_machine::select`].
pub(crate) fn engine_that_receives(choice: EngineChoice) -> Result<(Engine, String), Failure> {
    let (engine, because) = pageferry_machine::select(choice)?;
    if choice == EngineChoice::Auto && deliveries_of(engine, Backing::Shmem).is_empty() {
        let why =
            "KVM runs here, but receiving a VM on KVM needs userfaultfd, which is not permitted";
        return Ok((Engine::Soft, why.into()));
    }
    Ok((engine, because))
}

/// A virtual machine in this process. Dropping it ends it.
pub(crate) struct Vm {
    inner: pageferry_harness::Vm,
    guest: GuestDescription,
    /// The test program, unless the guest is Linux.
    workload: Option<Workload>,
    disks: Vec<Disk>,
}

impl Vm {
    /// Creates the machine for `guest`, paused, its memory zero, with the virtio devices that it
    /// describes. A `resolver` fetches missing pages.
    ///
    /// # Errors
    /// [`Exit::Usage`] for impossible sizes, [`Exit::Engine`] if the engine does not run here,
    /// [`Exit::Delivery`] if this host lacks the backing.
    pub(crate) fn create(
        guest: &GuestDescription,
        backing: Backing,
        resolver: Option<Arc<Resolver>>,
        devices: Devices,
    ) -> Result<Self, Failure> {
        let workload = guest.workload()?;
        let spec = MachineSpec {
            backing,
            ..MachineSpec::new(guest.vcpus, guest.memory_bytes)
        };
        let faults = resolver.map(|resolver| resolver as _);
        let engine = guest.engine();
        let mut guest = guest.clone();
        if guest.is_pc() && guest.cpuid.is_none() {
            guest.cpuid = Some(kvm::cpuid_of(&CpuModel::default(), guest.vcpus)?);
        }
        let inner = match guest.program {
            GuestProgram::Workload => pageferry_harness::Vm::create(engine, spec, faults),
            GuestProgram::Linux => pageferry_harness::Vm::create_for_linux(
                engine,
                spec,
                guest.cpuid.as_ref(),
                faults,
                devices.devices,
            ),
        }?;
        Ok(Self {
            inner,
            guest,
            workload,
            disks: devices.disks,
        })
    }

    /// The disks that its guest may write.
    pub(crate) fn disks(&self) -> &[Disk] {
        &self.disks
    }

    /// Writes the guest program into memory, with this rest after each page. The VM stays paused.
    ///
    /// # Errors
    /// When the engine refuses the start state, or a rest is too long.
    pub(crate) fn load(&self, rest: Duration) -> Result<(), Failure> {
        if let Some(workload) = &self.workload {
            let resting = workload.clone().with_rest(rest);
            let resting = resting.map_err(|e| Failure::new(Exit::Usage, e.to_string()))?;
            self.inner.load(resting.program())?;
        }
        Ok(())
    }

    /// Writes a kernel into memory. The VM stays paused.
    ///
    /// # Errors
    /// [`Exit::Usage`] if the kernel does not fit, or is for another machine.
    pub(crate) fn load_linux(&self, linux: &Linux<'_>) -> Result<(), Failure> {
        self.inner.load_linux(linux)?;
        Ok(())
    }

    /// Tells the guest that it goes on from a saved state.
    ///
    /// # Errors
    /// When the guest cannot be told.
    pub(crate) fn renew_generation(&self) -> Result<(), Failure> {
        Ok(self.inner.renew_generation()?)
    }

    /// How the guest has ended itself, if it has.
    pub(crate) fn reset(&self) -> Option<Reset> {
        self.inner.reset()
    }

    /// The guest's text console, if it has one.
    pub(crate) fn console(&self) -> Option<&Arc<Console>> {
        self.inner.console()
    }

    /// The guest, in the form that travels with a migration.
    pub(crate) const fn guest(&self) -> &GuestDescription {
        &self.guest
    }

    /// The engine that runs it.
    pub(crate) fn engine(&self) -> Engine {
        self.guest.engine()
    }

    /// The delivery of faults on missing pages, if it was received.
    pub(crate) fn delivery(&self) -> Option<DeliveryInUse> {
        self.inner.machine.delivery()
    }

    /// The kind of host memory behind it.
    pub(crate) fn backing(&self) -> Backing {
        self.inner.machine.ram().backing()
    }

    /// The large mappings of its memory. See [`pageferry_machine::Machine::host_large_bytes`] for
    /// the time that this takes.
    pub(crate) fn large_mappings(&self) -> LargeMappings {
        LargeMappings {
            host_bytes: self.inner.machine.host_large_bytes().ok(),
            engine_bytes: self.engine_large_bytes(),
        }
    }

    /// The bytes of its memory that the engine maps by large pages.
    pub(crate) fn engine_large_bytes(&self) -> Option<u64> {
        self.inner.machine.engine_large_bytes()
    }

    /// Its threads.
    pub(crate) fn threads(&self) -> &VcpuThreads {
        &self.inner.threads
    }

    /// The test program that runs in it, unless the guest is Linux.
    pub(crate) const fn workload(&self) -> Option<&Workload> {
        self.workload.as_ref()
    }

    /// The VM as the source of a migration takes it.
    pub(crate) fn running(&self) -> RunningVm<'_> {
        self.inner.running()
    }

    /// Lets the VM run on after a migration that a defect ended, unless its owner has `paused` it.
    pub(crate) fn run_on(&self, paused: bool) {
        let running = self.running();
        // A failure to stop the dirty log costs only speed.
        let _ = running.machine.set_dirty_log(false);
        running.devices.iter().for_each(|device| device.resume());
        if !paused {
            self.threads().resume();
        }
    }

    /// The number of vCPUs.
    pub(crate) fn vcpus(&self) -> u32 {
        self.guest.vcpus
    }

    /// The size of RAM in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.inner.machine.ram().pages() * PAGE_SIZE
    }

    /// A vCPU's control page; `None` while it is missing or not written yet, or if the guest is
    /// Linux.
    ///
    /// The guest may write the page meanwhile. Each field is untorn.
    pub(crate) fn control(&self, vcpu: u32) -> Option<Control> {
        self.inner.control(self.workload.as_ref()?, vcpu)
    }

    /// The control pages of all vCPUs, in order.
    pub(crate) fn controls(&self) -> Vec<Option<Control>> {
        (0..self.vcpus()).map(|vcpu| self.control(vcpu)).collect()
    }

    /// Checks that no vCPU has stopped for good.
    ///
    /// # Errors
    /// [`Exit::Guest`] with the first vCPU's reason.
    pub(crate) fn check_guest(&self) -> Result<(), Failure> {
        match self.inner.threads.failures().first() {
            None => Ok(()),
            Some(why) => Err(Failure::new(
                Exit::Guest,
                format!("the guest cannot go on: {why}"),
            )),
        }
    }

    /// Checks that faults can be delivered as wanted, or at all.
    ///
    /// # Errors
    /// [`Exit::Delivery`], with the available deliveries, and [`Exit::Usage`].
    pub(crate) fn check_delivery(&self, options: ArmOptions) -> Result<(), Failure> {
        let ram = self.inner.machine.ram();
        options.check(ram.pages(), ram.backing())?;
        let wanted = options.delivery;
        let usable = self.inner.machine.deliveries();
        let names: Vec<&str> = usable.iter().map(|d| d.name()).collect();
        let message = match wanted {
            _ if usable.is_empty() && !deliveries_of(self.engine(), Backing::Shmem).is_empty() => format!(
                "this host delivers no faults of KVM guests on memory of {}, which takes Linux 5.18: use --backing shmem",
                self.backing()
            ),
            _ if usable.is_empty() => "this host delivers no faults of KVM guests: userfaultfd is needed and not \
                permitted; run as root, set the sysctl vm.unprivileged_userfaultfd=1, or use --engine soft \
                (`pageferry probe` says more)"
                .into(),
            Some(wanted) if !usable.contains(&wanted) => format!(
                "fault delivery {wanted} is not available for a VM on {} with backing {} here: use {} (`pageferry probe` says why)",
                self.engine(),
                self.backing(),
                names.join(", ")
            ),
            _ => return Ok(()),
        };
        Err(Failure::new(Exit::Delivery, message))
    }

    /// Checks every page against the vCPUs' own counters. Missing pages are fetched. The VM is
    /// paused meanwhile, and runs on afterwards if it ran before.
    ///
    /// # Errors
    /// When a vCPU does not leave the guest.
    pub(crate) fn verify(&self) -> Result<Verdict, Failure> {
        let paused = self.inner.threads.pause(PAUSE_LIMIT)?;
        let verdict = self.verify_paused();
        if paused.was_running {
            self.inner.threads.resume();
        }
        verdict
    }

    /// [`Vm::verify`] for a paused VM.
    pub(crate) fn verify_paused(&self) -> Result<Verdict, Failure> {
        let Some(workload) = &self.workload else {
            return Err(Failure::new(
                Exit::Declined,
                "the guest is Linux, and nobody knows what its pages hold: verify a VM of the test program",
            ));
        };
        // A wait for a page ends when the migration fails.
        Ok(verify(&*self.inner.machine, workload, &|| false)?)
    }

    /// For tests: flips one bit in a page of vCPU 0 that the guest is not writing. The VM must be
    /// paused. Returns the page.
    pub(crate) fn corrupt_a_page(&self) -> Result<RamPage, Failure> {
        let workload = self.workload.as_ref().expect("a demo's guest");
        let busy = self.control(0).and_then(|c| c.in_progress);
        let share = workload.share(0);
        let middle = share.start + (share.end - share.start) / 2;
        let page = if busy == Some(RamPage(middle)) {
            RamPage(share.start)
        } else {
            RamPage(middle)
        };
        let mut byte = [0];
        let ram = self.inner.machine.ram();
        ram.try_read((page, 1000), &mut byte)?;
        ram.try_write((page, 1000), &[byte[0] ^ 0x10])?;
        Ok(page)
    }
}

impl From<AccessError> for Failure {
    fn from(error: AccessError) -> Self {
        Self::new(Exit::Internal, error.to_string())
    }
}

impl From<BootError> for Failure {
    fn from(error: BootError) -> Self {
        match error {
            BootError::Machine(error) => error.into(),
            BootError::Memory(error) => error.into(),
            BootError::Linux(error) => Self::new(Exit::Usage, error.to_string()),
        }
    }
}

/// Checks that the host has `machines` times the memory of `guest`, of the backing, that the memory
/// is a multiple of its page, and that no limit is too low.
///
/// # Errors
/// [`Exit::Usage`] for a wrong size or when the host has too little memory, [`Exit::Delivery`] when
/// it lacks the backing, its pool is too small, or a limit is too low.
pub(crate) fn check_backing(
    args: &BackingArgs,
    guest: &GuestDescription,
    machines: u64,
) -> Result<(), Failure> {
    let (backing, bytes) = (args.backing, guest.memory_bytes);
    let usage = |e: pageferry_machine::LayoutError| Failure::new(Exit::Usage, e.to_string());
    let layout = RamLayout::for_memory(bytes).map_err(usage)?;
    backing.check_layout(&layout).map_err(usage)?;
    backing.check(bytes.saturating_mul(machines))?;
    if args.ignore_limits {
        return Ok(());
    }
    // Pages of a pool are not among the host's available memory.
    if !backing.is_hugetlb() {
        check_host_memory(bytes, machines).map_err(|why| why.and("choose a smaller --memory"))?;
    }
    limits::check(&Needs {
        backing,
        bytes,
        machines,
        vcpus: guest.vcpus,
        engine: guest.engine(),
    })
}

/// Checks that the host has room for `machines` machines of `memory_bytes` bytes.
///
/// # Errors
/// [`Exit::Usage`] when the host has too little memory.
pub(crate) fn check_host_memory(memory_bytes: u64, machines: u64) -> Result<(), Failure> {
    let Some(available) = memory::available_bytes() else {
        return Ok(());
    };
    let needed = memory_bytes.saturating_mul(machines);
    if needed <= available {
        return Ok(());
    }
    let both = if machines == 1 {
        ""
    } else {
        ", source and destination together"
    };
    Err(Failure::new(
        Exit::Usage,
        format!(
            "{} of guest memory need {}{both}, and this host has {} available",
            size::human(memory_bytes),
            size::human(needed),
            size::human(available),
        ),
    ))
}
