//! The trait of machines, and the names of the engines.

use crate::huge;
use crate::{
    ArmOptions, Backing, Collapsed, Console, Delivery, DeliveryInUse, Device, FaultEvents,
    GuestRam, Interrupt, MachineError, Vcpu, VcpuState,
};
use pageferry_addr::{Gpa, RamPage};
use pageferry_userfault::PageBitmap;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// One of the engines of this crate.
///
/// The set is closed: a program that tells engines apart must decide about a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Engine {
    /// The kernel's KVM.
    Kvm,
    /// `pageferry-hypervisor`, in this process.
    Soft,
}

impl Engine {
    /// The name used in reports and on command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.kind().engine
    }

    /// The names of this engine's machines in a migration.
    #[must_use]
    pub const fn kind(self) -> MachineKind<'static> {
        match self {
            Self::Kvm => MachineKind::new("kvm", "x86_64", "kvm-x86_64/1"),
            Self::Soft => MachineKind::new("soft", "riscv64", "soft-riscv64/1"),
        }
    }
}

impl FromStr for Engine {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::Kvm, Self::Soft]
            .into_iter()
            .find(|engine| engine.name() == text)
            .ok_or_else(|| format!("unknown engine '{text}': expected kvm or soft"))
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The user's choice of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// KVM if a probe VM really runs here, else soft.
    #[default]
    Auto,
    /// This engine, or an error.
    Only(Engine),
}

impl FromStr for EngineChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => text
                .parse()
                .map(Self::Only)
                .map_err(|_| format!("unknown engine '{text}': expected auto, kvm or soft")),
        }
    }
}

impl fmt::Display for EngineChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Only(engine) => engine.fmt(f),
        }
    }
}

/// The names by which the two ends of a migration recognise machines of one kind.
///
/// The implementer of [`Machine`] chooses them. Each is 1 to 64 printable ASCII characters without
/// spaces. A machine takes in only VMs of machines with the same three names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MachineKind<'a> {
    /// The engine that runs the guest, such as `kvm`.
    pub engine: &'a str,
    /// The guest's instruction set, such as `x86_64`.
    pub isa: &'a str,
    /// The format of the states of vCPUs, with its version, such as `kvm-x86_64/1`. A format that
    /// older destinations cannot read has another name. They then refuse the VM while it still runs
    /// at the source.
    pub state_format: &'a str,
}

impl<'a> MachineKind<'a> {
    /// The names of the engine, of the instruction set, and of the format of vCPU states.
    #[must_use]
    pub const fn new(engine: &'a str, isa: &'a str, state_format: &'a str) -> Self {
        Self {
            engine,
            isa,
            state_format,
        }
    }
}

/// The size of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineSpec {
    /// The number of vCPUs, 1 to [`crate::MAX_VCPUS`].
    pub vcpus: u32,
    /// RAM in bytes: a multiple of the page size; see [`crate::RamLayout::for_memory`].
    pub memory_bytes: u64,
    /// The kind of host memory behind RAM. RAM is a multiple of its page.
    pub backing: Backing,
}

impl MachineSpec {
    /// A machine whose RAM is shared memory.
    #[must_use]
    pub const fn new(vcpus: u32, memory_bytes: u64) -> Self {
        Self {
            vcpus,
            memory_bytes,
            backing: Backing::Shmem,
        }
    }
}

/// The parts of a switch-over's blackout that a machine takes and that nobody can measure before.
///
/// A source adds them to what it measures: a harvest of the dirty log, the round trip and the link.
/// They count on both hosts together, with a core free for each thread that wakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlackoutCost {
    /// All but the vCPUs: stopping, freezing memory, loading, resuming.
    pub fixed: Duration,
    /// Saving, sending and restoring one vCPU.
    pub per_vcpu: Duration,
}

impl BlackoutCost {
    /// The cost of a machine with these two parts.
    #[must_use]
    pub const fn new(fixed: Duration, per_vcpu: Duration) -> Self {
        Self { fixed, per_vcpu }
    }

    /// The cost for a number of vCPUs.
    ///
    /// ```
    /// use pageferry_machine::BlackoutCost;
    /// use std::time::Duration;
    ///
    /// let cost = BlackoutCost::new(Duration::from_micros(500), Duration::from_micros(20));
    /// assert_eq!(cost.of(4), Duration::from_micros(580));
    /// ```
    #[must_use]
    pub fn of(self, vcpus: usize) -> Duration {
        let vcpus = u32::try_from(vcpus).unwrap_or(u32::MAX);
        self.fixed
            .saturating_add(self.per_vcpu.saturating_mul(vcpus))
    }
}

/// The cost of the KVM engine of this crate, the slower one: for a machine that was never measured.
impl Default for BlackoutCost {
    fn default() -> Self {
        Self::new(Duration::from_micros(700), Duration::from_micros(220))
    }
}

/// A machine with its vCPUs, which the caller runs.
pub struct NewMachine {
    /// The machine.
    pub machine: Arc<dyn Machine>,
    /// Its vCPUs in order of their ids.
    pub vcpus: Vec<Box<dyn Vcpu>>,
}

/// A virtual machine without its vCPUs: memory, its slots and its logs.
///
/// **For implementers.** The provided methods fit one kind of machine: its vCPUs reach memory by
/// [`GuestRam`] alone, as a VMM's devices do. They find missing pages and log writes there. A
/// machine whose vCPUs reach memory in another way implements *every* method but
/// [`Machine::console`], [`Machine::devices`], [`Machine::interrupt`], [`Machine::doorbell`],
/// [`Machine::blackout_cost`] and [`Machine::refresh`]. Otherwise the writes of its vCPUs are in no
/// dirty log, and a migration loses them. Such a machine calls
/// [`GuestRam::arm`], [`GuestRam::begin`] and [`GuestRam::harvest_writes`] for the VMM's own
/// accesses.
///
/// The life of a machine that receives a migration:
/// 1. [`Machine::arm_userfault`], before any vCPU has run.
/// 2. [`Machine::begin_postcopy`], when the bytes of all other pages are in place.
/// 3. For every page that arrives, [`Machine::install`] (or [`Machine::install_copy`]). Only then
///    the caller clears the page's bit in the missing bitmap.
/// 4. [`Machine::disarm_userfault`], when no page is missing.
pub trait Machine: Send + Sync {
    /// The names that both ends of a migration must share. They never change.
    fn kind(&self) -> MachineKind<'_>;

    /// Its memory, also for the VMM's own accesses.
    fn ram(&self) -> &Arc<GuestRam>;

    /// The machine's part of a blackout, for the forecast of a source. Measure it once, on two idle
    /// hosts.
    fn blackout_cost(&self) -> BlackoutCost {
        BlackoutCost::default()
    }

    /// The guest's text console, if the machine has one.
    fn console(&self) -> Option<&Arc<Console>> {
        None
    }

    /// The parts of the machine itself whose states travel as those of devices: the console, and
    /// interrupt controllers with their clocks.
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.console()
            .map(|console| Arc::clone(console) as _)
            .into_iter()
            .collect()
    }

    /// The interrupt line `line` of the machine's interrupt controllers. On x86-64 it is a global
    /// system interrupt (GSI), and on a soft machine a source of its PLIC.
    ///
    /// # Errors
    /// When the machine has no such line.
    fn interrupt(&self, _line: u32) -> Result<Arc<dyn Interrupt>, MachineError> {
        Err(MachineError::WrongState(
            "this machine has no interrupt controllers",
        ))
    }

    /// Signals `event`, an eventfd, for each store of 4 bytes of a vCPU to `gpa`, where no memory
    /// is. The store then leaves the guest no more. Returns false if the engine cannot do that: the
    /// store leaves the guest as ever ([`crate::Exit::MmioWrite`]).
    ///
    /// # Errors
    /// When the kernel refuses.
    fn doorbell(&self, _gpa: Gpa, _event: BorrowedFd<'_>) -> Result<bool, MachineError> {
        Ok(false)
    }

    /// Whether the machine knows which pages vCPUs write. A source that moves a machine without a
    /// dirty log never calls [`Machine::set_dirty_log`] and [`Machine::harvest_dirty`].
    fn has_dirty_log(&self) -> bool {
        true
    }

    /// Brings RAM's bytes of `pages` pages from `first` up to date, if RAM is a copy of memory that
    /// the guest has elsewhere. Pages that it cannot read stay as they are. A source calls this
    /// before it reads pages of a running guest, from several threads at once, and never behind
    /// [`Vcpus::pause`](crate::Vcpus::pause). That one brings all of RAM up to date.
    ///
    /// Returns false if RAM is the guest's own memory, which nothing has to bring up to date.
    fn refresh(&self, _first: RamPage, _pages: u64) -> bool {
        false
    }

    /// Starts or stops logging of the pages that vCPUs and the VMM write.
    ///
    /// When this returns after `on`, every later write of a vCPU or by [`GuestRam::write`] is in
    /// the log.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn set_dirty_log(&self, _on: bool) -> Result<(), MachineError> {
        self.ram().forget_writes();
        Ok(())
    }

    /// Adds the pages written since the last call to `dirty`. Returns the number of pages that were
    /// not in it.
    ///
    /// With `rearm`, writes from now on are logged again. A write that happens while the call runs
    /// is in this harvest or in the next. Without `rearm`, the VM must be paused, and its memory
    /// frozen ([`GuestRam::freeze`]) if the VMM may write. The log is then read but not re-armed,
    /// which is cheaper, for switch-over.
    ///
    /// # Errors
    /// When the dirty log is not on, or the kernel refuses.
    fn harvest_dirty(&self, dirty: &PageBitmap, rearm: bool) -> Result<usize, MachineError> {
        self.ram().harvest_writes(dirty, rearm)
    }

    /// The deliveries that this machine can use on this host, the newest first.
    fn deliveries(&self) -> Vec<Delivery> {
        vec![Delivery::Exit]
    }

    /// The delivery, once the machine was armed. It becomes final when
    /// [`Machine::assist_postcopy`] returns.
    fn delivery(&self) -> Option<DeliveryInUse> {
        self.ram().is_armed().then(|| DeliveryInUse {
            delivery: Delivery::Exit,
            because: format!("it is the only one of the {} engine", self.kind().engine),
        })
    }

    /// Begins to deliver faults on the pages whose bit in `missing` is set. The bitmap is the one
    /// truth: the engine reads it at each fault. No vCPU may have run since the machine was
    /// created. If `options` name no delivery, the machine takes the one that is fastest on this
    /// host. The first machine of a process measures that, in about 0.2 s.
    ///
    /// From now on until [`Machine::begin_postcopy`], the VMM's own accesses are refused
    /// ([`crate::AccessError::Receiving`]). This waits for those under way. A machine is armed at
    /// most once.
    ///
    /// Returns the streams of events: one for each reader of each userfaultfd, or none if the
    /// delivery uses no events. An event comes on one stream only. All streams must be read.
    ///
    /// # Errors
    /// As [`ArmOptions::check`], when the delivery is not one of [`Machine::deliveries`], the
    /// machine was armed before, a device holds on to its memory for longer than a second, or the
    /// kernel refuses.
    fn arm_userfault(
        &self,
        missing: Arc<PageBitmap>,
        options: ArmOptions,
    ) -> Result<Vec<Box<dyn FaultEvents>>, MachineError> {
        if let Some(other) = options.delivery.filter(|wanted| *wanted != Delivery::Exit) {
            return Err(MachineError::NoDelivery(other));
        }
        self.ram().arm(&missing, &options, || Ok(()))?;
        Ok(Vec::new())
    }

    /// The pages of RAM whose bytes are part of a vCPU's state: the hypervisor accesses them.
    /// [`Vcpus::restore`](crate::Vcpus::restore) puts them in place, so a receiver never
    /// counts them as missing. None for a state that is malformed: restoring it fails.
    fn state_pages(&self, _state: &VcpuState) -> Vec<RamPage> {
        Vec::new()
    }

    /// Whether the receiver writes arriving bytes into their final place ([`GuestRam::unchecked`])
    /// and then calls [`Machine::install`]. Otherwise it passes them to [`Machine::install_copy`].
    ///
    /// A machine that receives in place also keeps the bytes that came before
    /// [`Machine::begin_postcopy`], of missing pages too: a source may confirm them.
    fn receives_in_place(&self) -> bool {
        true
    }

    /// Makes `pages` pages from `first` accessible to vCPUs, and wakes threads that sleep on them
    /// in the kernel. Their bytes must be in their final place. Repeating it is harmless. Do not
    /// name a page whose bit in the missing bitmap is set and whose bytes are *not* in place.
    ///
    /// # Errors
    /// When the kernel refuses; the guest then cannot reach the page.
    fn install(&self, _first: RamPage, _pages: u64) -> Result<(), MachineError> {
        Ok(())
    }

    /// Puts `bytes` (one page) into `page`, makes it accessible and wakes sleepers, atomically for
    /// vCPUs.
    ///
    /// # Errors
    /// When the kernel refuses; the guest then cannot reach the page.
    fn install_copy(&self, _page: RamPage, _bytes: &[u8]) -> Result<(), MachineError> {
        Err(MachineError::WrongState(
            "this machine takes pages in place only",
        ))
    }

    /// Prepares the missing pages for the delivery (punches holes). Call it once, when the missing
    /// bitmap has its final contents, and before any vCPU runs. It is quick, as it is part of the
    /// blackout. Afterwards the VMM's own accesses reach the pages that are present.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn begin_postcopy(&self) -> Result<(), MachineError> {
        self.ram().begin();
        Ok(())
    }

    /// Does the delivery's work that may run beside the guest (marking missing pages with poison).
    /// A guest whose pages cannot be marked safely gets none, unless `arm_userfault` was told
    /// [`Delivery::Poison`]. [`Machine::delivery`] then says so.
    /// It polls `stop`, and returns when the work is done. If it must first read a missing page (a
    /// guest's page table), it calls `want`. That need not wait, and may be called again for the
    /// same page.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn assist_postcopy(
        &self,
        _stop: &dyn Fn() -> bool,
        _want: &dyn Fn(RamPage),
    ) -> Result<(), MachineError> {
        Ok(())
    }

    /// Ends delivery: no page is missing any more.
    ///
    /// # Errors
    /// When a bit of the missing bitmap is still set, or the kernel refuses.
    fn disarm_userfault(&self) -> Result<(), MachineError> {
        self.ram().disarm()
    }

    /// Makes one huge page of the host of the 2 MiB from `first`, if all of it is present and has
    /// memory. vCPUs may run meanwhile. A vCPU that touches the range waits for it, for as long as
    /// the kernel copies 2 MiB. Does nothing to pages of a pool.
    ///
    /// # Panics
    /// If the range does not begin at a multiple of 2 MiB, or leaves RAM.
    fn collapse(&self, _first: RamPage) -> Collapsed {
        Collapsed::Refused
    }

    /// The bytes of RAM that the host maps by pages of 2 MiB and more, for the guest. The kernel
    /// walks the process's page tables: about 10 ms for each GiB of small pages.
    ///
    /// # Errors
    /// When the kernel does not give the list of mappings.
    fn host_large_bytes(&self) -> Result<u64, MachineError> {
        let ram = self.ram();
        huge::host_bytes(std::iter::once((ram.alias_hva(RamPage(0)), ram.pages())))
    }

    /// The bytes of RAM that the engine itself maps so for its vCPUs. `None` if KVM does not count
    /// them. Quick. Exact while no vCPU runs.
    fn engine_large_bytes(&self) -> Option<u64> {
        None
    }

    /// Wakes the vCPUs that sleep inside the kernel on missing pages, of a VM that never runs
    /// again. Hold the vCPUs first: they then leave the guest, and run nothing on these pages.
    fn abandon(&self) {}
}
