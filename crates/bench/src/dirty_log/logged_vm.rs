//! One VM that goes through all phases.

use super::{DirtyLogFlags, ITERATIONS, Pattern};
use crate::BenchError;
use crate::Samples;
use crate::demand_paging::{GuestExit, HostRam, Runner, race};
use dynasmrt::riscv::RiscvRelocation;
use dynasmrt::{DynasmApi, DynasmLabelApi, VecAssembler, dynasm};
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use pageferry_hypervisor::{
    DirtyBy, DirtyProtect, Exit, HostMemory, Memslots, Region, SlotFlags, VcpuCore, Vm, VmConfig,
};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The slot with the program, at guest address 0, and the slot that is measured.
const PROGRAM: u16 = 0;
const MEASURED: u16 = 1;
/// The guest address of the measured slot.
const AT: Gpa = Gpa(1 << 30);

/// Samples of each phase, in milliseconds.
pub(super) type Times = BTreeMap<&'static str, Samples>;

/// Host memory for the program's page and all vCPUs, which the kernel has allocated.
pub(super) fn host(flags: &DirtyLogFlags) -> Result<Arc<HostRam>, BenchError> {
    let host = HostRam::new(PAGE_SIZE + u64::from(flags.vcpus) * flags.memory)?;
    host.placing().write_at(RamPage(0), 0, &program());
    Ok(host)
}

/// The guest program. It writes a0 into a doubleword of every page from a1 up to a2, then makes an
/// ECALL.
fn program() -> Vec<u8> {
    let mut ops = VecAssembler::<RiscvRelocation>::new(0);
    dynasm!(ops
        ; .arch riscv64i
        ; li t0, PAGE_SIZE as i64
        ;->next:
        ; sd a0, [a1, 0]
        ; add a1, a1, t0
        ; bltu a1, a2, ->next
        ; ecall
    );
    ops.finalize().expect("every label is defined")
}

pub(super) struct LoggedVm<M: Memslots> {
    vm: Vm<M>,
    vcpus: Vec<VcpuCore<M>>,
    host: Arc<HostRam>,
    /// The pages of each vCPU.
    each: u64,
}

impl<M: Memslots> LoggedVm<M>
where
    VcpuCore<M>: Send,
{
    pub(super) fn new(host: &Arc<HostRam>, flags: &DirtyLogFlags) -> Result<Self, BenchError> {
        let vm = Vm::<M>::with_memslots(VmConfig {
            dirty_by: match flags.dirty_bits {
                true => DirtyBy::Bits,
                false => DirtyBy::WriteProtection,
            },
            dirty_protect: DirtyProtect::ByClear,
            ..VmConfig::default()
        });
        let logged_vm = Self {
            vcpus: (0..flags.vcpus)
                .map(|id| vm.create_vcpu(id))
                .collect::<Result<_, _>>()?,
            host: Arc::clone(host),
            vm,
            each: flags.memory / PAGE_SIZE,
        };
        logged_vm.set(PROGRAM, Gpa(0), 0..1, SlotFlags::EMPTY)?;
        logged_vm.set_log(SlotFlags::EMPTY)?;
        Ok(logged_vm)
    }

    fn pages(&self) -> u64 {
        self.vcpus.len() as u64 * self.each
    }

    fn set(
        &self,
        slot: u16,
        gpa: Gpa,
        pages: Range<u64>,
        flags: SlotFlags,
    ) -> Result<(), BenchError> {
        let region = Region {
            slot,
            flags,
            gpa,
            size: (pages.end - pages.start) * PAGE_SIZE,
            hva: self.host.ram().alias_hva(RamPage(pages.start)),
            memory: Some(Arc::clone(&self.host) as Arc<dyn HostMemory>),
            userfault: None,
        };
        Ok(self.vm.set_user_memory_region2(region)?)
    }

    fn set_log(&self, flags: SlotFlags) -> Result<(), BenchError> {
        self.set(MEASURED, AT, 1..1 + self.pages(), flags)
    }

    /// Runs all phases and adds their times to `times`.
    pub(super) fn run(mut self, pattern: Pattern, times: &mut Times) -> Result<(), BenchError> {
        let mut add = |phase, took: Duration| {
            let samples = times.entry(phase).or_default();
            samples.push(took.as_secs_f64() * 1e3);
        };
        add("populate", self.write(pattern, 0)?);
        let enable = timed(|| self.set_log(SlotFlags::LOG_DIRTY_PAGES))?;
        add("enable", enable);
        let words = self.pages().div_ceil(64) as usize;
        let mut log = vec![0_u64; words];
        for iteration in 1..=ITERATIONS {
            add("dirty", self.write(pattern, iteration)?);
            let get = timed(|| Ok(self.vm.get_dirty_log(MEASURED, &mut log)?))?;
            add("get", get);
            let named: u64 = log.iter().map(|word| u64::from(word.count_ones())).sum();
            if named != self.pages() {
                return Err(BenchError::Hypervisor(format!(
                    "the dirty log names {named} of {} written pages",
                    self.pages()
                )));
            }
            let clear = timed(|| Ok(self.vm.clear_dirty_log(MEASURED, 0, &log)?))?;
            add("clear", clear);
        }
        let disable = timed(|| self.set_log(SlotFlags::EMPTY))?;
        add("disable", disable);
        Ok(())
    }

    /// Runs all vCPUs over their pages. Returns the time from the first vCPU's start to the last
    /// vCPU's end.
    fn write(&mut self, pattern: Pattern, value: u32) -> Result<Duration, BenchError> {
        let (each, all) = (self.each, self.pages());
        let writers = (0..).zip(&mut self.vcpus).map(|(index, vcpu)| {
            let part = match pattern {
                Pattern::Partitioned => index * each..(index + 1) * each,
                Pattern::Overlapping => 0..all,
            };
            let hart = vcpu.hart_mut();
            hart.set_pc(0)
                .map_err(|e| BenchError::Hypervisor(e.to_string()))?;
            hart.set_x(10, u64::from(value));
            hart.set_x(11, AT.0 + part.start * PAGE_SIZE);
            hart.set_x(12, AT.0 + part.end * PAGE_SIZE);
            Ok(Writer(vcpu))
        });
        let writers = writers.collect::<Result<Vec<_>, BenchError>>()?;
        let missing = |_, page| Err(BenchError::Hypervisor(format!("{page:?} is not missing")));
        Ok(race(writers, &|| {}, &missing, &|| ())?.whole)
    }
}

/// A vCPU that writes its pages.
struct Writer<'a, M: Memslots>(&'a mut VcpuCore<M>);

impl<M: Memslots> Runner for Writer<'_, M>
where
    VcpuCore<M>: Send,
{
    fn run(&mut self) -> Result<GuestExit, BenchError> {
        match self.0.run() {
            Exit::Ecall { .. } => Ok(GuestExit::Finished),
            Exit::Kicked => Ok(GuestExit::Kicked),
            other => Err(BenchError::unexpected_exit(&other)),
        }
    }

    fn kicker(&self) -> Box<dyn Fn() + Send + Sync> {
        let handle = self.0.kick_handle();
        Box::new(move || handle.kick())
    }
}

fn timed<R>(f: impl FnOnce() -> Result<R, BenchError>) -> Result<Duration, BenchError> {
    let began = Instant::now();
    f()?;
    Ok(began.elapsed())
}
