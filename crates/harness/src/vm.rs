//! A machine, its threads and its hooks.

use crate::hooks::{Board, Faults, Hooks};
use pageferry_addr::PAGE_SIZE;
use pageferry_devices::{MmioBus, Pc, VirtioDevice};
use pageferry_guest::{Control, Isa, Program, Verdict, Workload};
use pageferry_machine::{
    AccessError, Backing, Console, Cpuid, Delivery, Device, Engine, Linux, LinuxError, Machine,
    MachineError, MachineSpec, NewMachine, Reset, StartMode, StartState, Vcpu, VcpuThreads,
    soft::{self, SoftOptions},
};
use pageferry_migration::RunningVm;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The interval at which a wait checks its condition.
const INTERVAL: Duration = Duration::from_millis(2);

/// Returns the instruction set of an engine's guests.
#[must_use]
pub fn isa_of(engine: Engine) -> Isa {
    match engine {
        Engine::Kvm => Isa::X86_64,
        Engine::Soft => Isa::Rv64,
    }
}

/// Returns the fault deliveries of an engine with memory of `backing` on this host, best first. It
/// creates a small machine to find them.
#[must_use]
pub fn deliveries_of(engine: Engine, backing: Backing) -> Vec<Delivery> {
    let spec = MachineSpec {
        backing,
        ..MachineSpec::new(1, backing.page_size().bytes().max(1 << 20))
    };
    let machine = pageferry_machine::create(engine, spec);
    machine.map_or(Vec::new(), |new| new.machine.deliveries())
}

/// The reason why a program was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The engine refused the start state.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The program is for a larger machine, or the machine's memory is not here.
    #[error("the guest program cannot be written: {0}")]
    Memory(#[from] AccessError),
    /// The kernel does not run on this machine.
    #[error(transparent)]
    Linux(#[from] LinuxError),
}

/// The reason why a wait for the end of the programs failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// A vCPU failed.
    #[error("{0}")]
    Failed(String),
    /// The limit passed.
    #[error("the guest did not finish within {} s", .0.as_secs())]
    Late(Duration),
}

/// A virtual machine in this process. Dropping it ends its threads and frees its memory.
pub struct Vm {
    /// The memory, and the engine of the vCPUs.
    pub machine: Arc<dyn Machine>,
    /// The threads of the vCPUs, paused at first.
    pub threads: VcpuThreads,
    /// Those whose states travel.
    devices: Vec<Arc<dyn Device>>,
    hooks: Arc<Hooks>,
}

impl Drop for Vm {
    fn drop(&mut self) {
        // A vCPU may sleep inside the kernel on a page that never comes.
        if self.threads.pause(Duration::ZERO).is_err() {
            self.machine.abandon();
        }
    }
}

impl Vm {
    /// Creates a paused machine with zero memory. `faults` resolves faults on missing pages.
    ///
    /// # Errors
    /// The error of the engine.
    pub fn create(
        engine: Engine,
        spec: MachineSpec,
        faults: Option<Arc<dyn Faults>>,
    ) -> Result<Self, MachineError> {
        Self::start(pageferry_machine::create(engine, spec)?, faults)
    }

    /// As [`Self::create`], with a machine that the caller has created.
    ///
    /// # Errors
    /// When a thread does not start.
    pub fn start(new: NewMachine, faults: Option<Arc<dyn Faults>>) -> Result<Self, MachineError> {
        Self::with(new, faults, None)
    }

    /// Creates a paused machine on which a kernel of the engine's processor runs, with the devices
    /// that it needs, and the virtio devices `devices`. On KVM, its vCPUs have this CPUID, or that
    /// of the host.
    ///
    /// # Errors
    /// The error of the engine.
    pub fn create_for_linux(
        engine: Engine,
        spec: MachineSpec,
        cpuid: Option<&Cpuid>,
        faults: Option<Arc<dyn Faults>>,
        devices: Vec<Box<dyn VirtioDevice>>,
    ) -> Result<Self, MachineError> {
        let (new, pc) = match engine {
            Engine::Soft if devices.is_empty() => return Self::create(engine, spec, faults),
            Engine::Soft => {
                let options = SoftOptions {
                    interrupts: true,
                    ..SoftOptions::default()
                };
                (soft::create_with(spec, options)?, None)
            }
            Engine::Kvm => {
                let new = pageferry_machine::create_pc(spec, cpuid)?;
                let pc = Pc::new(&*new.machine)?;
                (new, Some(pc))
            }
        };
        let bus = MmioBus::new(&*new.machine, devices)?;
        Self::with(new, faults, Some(Board { pc, bus }))
    }

    fn with(
        new: NewMachine,
        faults: Option<Arc<dyn Faults>>,
        board: Option<Board>,
    ) -> Result<Self, MachineError> {
        let mut devices = new.machine.devices();
        if let Some(Board { pc, bus }) = &board {
            devices.extend(pc.iter().flat_map(Pc::devices));
            devices.extend(bus.devices());
        }
        let hooks = Arc::new(Hooks::new(faults, board));
        Ok(Self {
            threads: VcpuThreads::start(new.vcpus, Arc::clone(&hooks) as _)?,
            devices,
            machine: new.machine,
            hooks,
        })
    }

    /// Writes a program to memory and its start values to the vCPUs, which stay paused.
    ///
    /// # Errors
    /// [`BootError`] if the program is for another machine.
    pub fn load(&self, program: &Program) -> Result<(), BootError> {
        write_image(&*self.machine, program)?;
        let set = |vcpu: &mut dyn Vcpu| vcpu.set_start(&start_of(program, vcpu.id()));
        self.threads.with_vcpus(set)?;
        Ok(())
    }

    /// Writes a kernel to memory and its start values to vCPU 0. All vCPUs stay paused.
    ///
    /// # Errors
    /// [`BootError::Linux`] if it does not fit, or is for another machine.
    pub fn load_linux(&self, linux: &Linux<'_>) -> Result<(), BootError> {
        let vcpus = u32::try_from(self.threads.count()).unwrap_or(u32::MAX);
        let board = self.hooks.board();
        let places = board.map_or(Vec::new(), |board| board.bus.places());
        let ram = self.machine.ram();
        let start = match self.hooks.pc().is_some() {
            false => linux.load_with(ram, vcpus, &places)?,
            #[cfg(target_arch = "x86_64")]
            true => linux.load_pc(ram, vcpus, &places)?,
            #[cfg(not(target_arch = "x86_64"))]
            true => unreachable!("KVM's machines are for x86-64 hosts"),
        };
        self.threads.with_vcpus(|vcpu| match vcpu.id() {
            0 => vcpu.set_start(&start),
            _ => Ok(()),
        })?;
        self.renew_generation()?;
        Ok(())
    }

    /// Gives a VM that was saved a new generation, and tells its kernel. See
    /// [`Pc::renew_generation`]. A VM without a PC has none.
    ///
    /// # Errors
    /// As [`Pc::renew_generation`].
    pub fn renew_generation(&self) -> Result<(), MachineError> {
        self.hooks.pc().map_or(Ok(()), Pc::renew_generation)
    }

    /// Returns the guest's text console, if it has one.
    #[must_use]
    pub fn console(&self) -> Option<&Arc<Console>> {
        let pc = self.hooks.pc();
        pc.map(Pc::console).or_else(|| self.machine.console())
    }

    /// Returns how the guest has ended itself, if it has.
    #[must_use]
    pub fn reset(&self) -> Option<Reset> {
        self.hooks.reset()
    }

    /// Returns the number of errors that the guest has signalled, such as wrong pages.
    #[must_use]
    pub fn errors(&self) -> u32 {
        self.hooks.errors()
    }

    /// Calls `wait`, which waits for progress of the guest. The workload does not rest meanwhile.
    pub fn hurried<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.hooks.hurried(wait)
    }

    /// Returns the state of a vCPU of `workload`, from its control page. Returns `None` while the
    /// page is missing or not yet written.
    ///
    /// The guest may write the page meanwhile. No field is torn.
    #[must_use]
    pub fn control(&self, workload: &Workload, vcpu: u32) -> Option<Control> {
        let mut bytes = [0; PAGE_SIZE as usize];
        let page = workload.control_page(vcpu);
        self.machine.ram().try_read(page, &mut bytes).ok()?;
        Control::parse(&bytes).ok()
    }

    /// Returns the VM for a migration.
    #[must_use]
    pub fn running(&self) -> RunningVm<'_> {
        RunningVm {
            machine: &self.machine,
            vcpus: &self.threads,
            devices: &self.devices,
        }
    }

    /// Waits until the programs of all vCPUs have ended, for `limit` at most.
    ///
    /// # Errors
    /// [`WaitError`] if a vCPU fails, or the limit passes.
    pub fn wait_finished(&self, limit: Duration) -> Result<(), WaitError> {
        let deadline = Instant::now() + limit;
        while (self.hooks.finished() as usize) < self.threads.count() {
            if let Some(why) = self.threads.failures().first() {
                return Err(WaitError::Failed(why.to_string()));
            }
            if Instant::now() > deadline {
                return Err(WaitError::Late(limit));
            }
            std::thread::sleep(INTERVAL);
        }
        Ok(())
    }
}

/// Writes the pieces of a program to a machine's memory.
///
/// # Errors
/// [`BootError::Memory`] if the program is for a larger machine, or the machine's memory is not
/// here.
pub fn write_image(machine: &dyn Machine, program: &Program) -> Result<(), BootError> {
    for (gpa, bytes) in program.image() {
        machine.ram().try_write(gpa, &bytes)?;
    }
    Ok(())
}

/// Returns the start values of a vCPU of `program`.
#[must_use]
pub fn start_of(program: &Program, vcpu: u32) -> StartState {
    let start = program.start(vcpu);
    StartState {
        entry: start.entry,
        stack: start.stack,
        args: start.args,
        tables: start.tables,
        mode: StartMode::User,
    }
}

/// Compares every page of a paused machine that runs `workload` with the bytes that follow from the
/// guest's counters. Missing pages are fetched, until `stop` returns true.
///
/// # Errors
/// When a page is missing and does not come.
pub fn verify(
    machine: &dyn Machine,
    workload: &Workload,
    stop: &dyn Fn() -> bool,
) -> Result<Verdict, AccessError> {
    workload.verify(&mut |page, bytes| machine.ram().read(page, bytes, stop))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_addr::RamPage;
    use pageferry_guest::{MemoryMap, Touch, TouchAccess, TouchOrder, Toucher};

    const MEMORY: u64 = 8 << 20;

    fn machine(vcpus: u32) -> Vm {
        let spec = MachineSpec::new(vcpus, MEMORY);
        Vm::create(Engine::Soft, spec, None).expect("soft runs everywhere")
    }

    fn toucher(memory_bytes: u64) -> Toucher {
        let map = MemoryMap::new(Isa::Rv64, 1, memory_bytes).expect("a map");
        let touch = Touch {
            access: TouchAccess::Write,
            order: TouchOrder::Random,
            passes: 1,
        };
        let pages = map.data();
        Toucher::new(map, vec![pages], touch).expect("a program")
    }

    #[test]
    fn a_program_that_ends_is_waited_for() {
        let vm = machine(1);
        vm.load(toucher(MEMORY).program()).expect("it fits");
        let short = Duration::from_millis(20);
        assert_eq!(
            vm.wait_finished(short),
            Err(WaitError::Late(short)),
            "it is paused"
        );
        vm.threads.resume();
        vm.wait_finished(Duration::from_secs(300)).expect("it ends");
    }

    #[test]
    fn a_workload_that_was_stopped_verifies_and_a_changed_byte_does_not() {
        let vm = machine(2);
        let workload = Workload::new(Isa::Rv64, 2, MEMORY).expect("it fits");
        vm.load(workload.program()).expect("it fits");
        vm.threads.resume();
        std::thread::sleep(Duration::from_millis(100));
        vm.threads
            .pause(Duration::from_secs(300))
            .expect("it stops");
        let verified = || verify(&*vm.machine, &workload, &|| false).unwrap();
        assert!(verified().host_holds());
        let page = RamPage(workload.share(0).start);
        let mut bytes = [0; 4096];
        vm.machine.ram().try_read(page, &mut bytes).unwrap();
        bytes[1000] ^= 1;
        vm.machine.ram().try_write(page, &bytes).unwrap();
        let changed = verified();
        assert!(!changed.host_holds(), "{changed:?}");
    }
}
