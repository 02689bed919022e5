//! VMs of the benchmarks.

use crate::BenchError;
use pageferry_addr::{Gpa, RamPage};
use pageferry_guest::{
    Doorbell, Event, Isa, Layout, Program, Touch, TouchAccess, TouchOrder, Toucher,
};
use pageferry_machine::{
    Access, Engine, HookVerdict, Kicker, Machine, MachineError, MachineSpec, StartState, VcpuHooks,
    VcpuThreads,
};
use pageferry_migration::RunningVm;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The longest a benchmark's guest may take for its task.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// Brings the pages that a benchmark's vCPUs touch.
pub(crate) trait Faults: Send + Sync {
    fn memory_fault(
        &self,
        vcpu: u32,
        page: RamPage,
        access: Access,
        kicker: &dyn Kicker,
    ) -> HookVerdict;
    fn pausing(&self) {}
}

impl Faults for pageferry_migration::Resolver {
    fn memory_fault(
        &self,
        vcpu: u32,
        page: RamPage,
        access: Access,
        kicker: &dyn Kicker,
    ) -> HookVerdict {
        Self::memory_fault(self, vcpu, page, access, kicker)
    }
    fn pausing(&self) {
        Self::pausing(self);
    }
}

struct Hooks {
    faults: Arc<dyn Faults>,
    finished: AtomicU32,
}

impl VcpuHooks for Hooks {
    fn memory_fault(
        &self,
        vcpu: u32,
        page: RamPage,
        access: Access,
        kicker: &dyn Kicker,
    ) -> HookVerdict {
        self.faults.memory_fault(vcpu, page, access, kicker)
    }
    fn mmio_write(&self, _: u32, _: Gpa, value: u64) -> HookVerdict {
        match Doorbell::parse(value as u32) {
            Ok(bell) if bell.event == Event::Finished => {
                self.finished.fetch_add(1, Ordering::SeqCst);
                HookVerdict::Park
            }
            _ => HookVerdict::Resume,
        }
    }
    fn failed(&self, _: u32, _: &MachineError) {}
    fn pausing(&self) {
        self.faults.pausing();
    }
}

/// A VM with its threads.
pub(crate) struct Vm {
    pub(crate) machine: Arc<dyn Machine>,
    pub(crate) threads: VcpuThreads,
    hooks: Arc<Hooks>,
}

pub(crate) fn isa_of(engine: Engine) -> Isa {
    match engine {
        Engine::Kvm => Isa::X86_64,
        Engine::Soft => Isa::Rv64,
    }
}

/// A toucher whose only vCPU stores to each of the first `pages` data pages once, in random order.
pub(crate) fn toucher(
    engine: Engine,
    memory_bytes: u64,
    pages: u64,
) -> Result<Toucher, BenchError> {
    let touch = Touch {
        access: TouchAccess::Write,
        order: TouchOrder::Random,
        passes: 1,
    };
    let layout = Layout::new(isa_of(engine), 1, memory_bytes)?;
    let data = layout.data();
    let end = data.end.min(data.start.saturating_add(pages));
    let only = data.start..end;
    Ok(Toucher::new(layout, Vec::from([only]), touch)?)
}

impl Vm {
    pub(crate) fn create(
        engine: Engine,
        vcpus: u32,
        memory_bytes: u64,
        faults: Arc<dyn Faults>,
    ) -> Result<Self, BenchError> {
        let new = pageferry_machine::create(
            engine,
            MachineSpec {
                vcpus,
                memory_bytes,
            },
        )?;
        let hooks = Arc::new(Hooks {
            faults,
            finished: AtomicU32::new(0),
        });
        Ok(Self {
            machine: new.machine,
            threads: VcpuThreads::start(new.vcpus, Arc::clone(&hooks) as Arc<dyn VcpuHooks>)?,
            hooks,
        })
    }

    /// Puts a program into memory and its start values into the vCPUs.
    pub(crate) fn load(&self, program: &Program) -> Result<(), BenchError> {
        let ram = self.machine.ram();
        for (gpa, bytes) in program.image() {
            let page = ram
                .layout()
                .page_of(gpa.gfn())
                .expect("a program lies in RAM");
            ram.write_at(page, gpa.page_offset(), &bytes);
        }
        self.threads.with_vcpus(|vcpu| {
            let start = program.start(vcpu.id());
            vcpu.set_start(&StartState {
                entry: start.entry,
                stack: start.stack,
                args: start.args,
                tables: start.tables,
            })
        })?;
        Ok(())
    }

    /// Fills the pages with bytes that are not zero.
    pub(crate) fn fill(&self, pages: std::ops::Range<u64>) {
        let mut bytes = [0x5a; 4096];
        for page in pages {
            bytes[8..16].copy_from_slice(&page.to_le_bytes());
            self.machine.ram().write(RamPage(page), &bytes);
        }
    }

    pub(crate) fn running(&self) -> RunningVm<'_> {
        RunningVm {
            machine: &self.machine,
            threads: &self.threads,
        }
    }

    /// Waits until every vCPU's program has ended.
    pub(crate) fn wait_finished(&self) -> Result<(), BenchError> {
        let deadline = Instant::now() + LIMIT;
        while (self.hooks.finished.load(Ordering::SeqCst) as usize) < self.threads.count() {
            if let Some(why) = self.threads.failures().first() {
                return Err(BenchError::TooFew(format!("the guest failed: {why}")));
            }
            if Instant::now() > deadline {
                return Err(BenchError::TooFew(
                    "the guest did not finish in time".into(),
                ));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}
