//! The VMs of the benchmarks.

pub(crate) use pageferry_harness::{Faults, Vm, isa_of};

use crate::{BenchError, note, peer};
use pageferry_addr::RamPage;
use pageferry_guest::{MemoryMap, Touch, TouchAccess, TouchOrder, Toucher};
use pageferry_harness::{BootError, WaitError, size};
use pageferry_machine::{Engine, EngineChoice, MachineSpec};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The longest a benchmark's guest may take for its task.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// The engines to measure: the chosen one, or all that run here.
pub(crate) fn engines(choice: EngineChoice) -> Result<Vec<Engine>, BenchError> {
    if choice != EngineChoice::Auto {
        return Ok(vec![pageferry_machine::select(choice)?.0]);
    }
    match pageferry_machine::select(EngineChoice::Only(Engine::Kvm)) {
        Ok((kvm, _)) => Ok(vec![kvm, Engine::Soft]),
        Err(why) => {
            note(&format!("KVM is not measured: {why}"));
            Ok(vec![Engine::Soft])
        }
    }
}

/// Checks that this host has memory for guests of `needed` bytes together.
pub(crate) fn check_host_memory(needed: u64) -> Result<(), BenchError> {
    let available = peer::kib_of("/proc/meminfo", &["MemAvailable:"])? << 10;
    if needed <= available {
        return Ok(());
    }
    let [needed, available] = [needed, available].map(size::human);
    let advice = "choose a smaller --memory";
    Err(BenchError::Setting(format!(
        "the guests need {needed} of memory, and this host has {available} available: {advice}"
    )))
}

/// A toucher whose vCPUs store to each of the first `pages` data pages once. Each vCPU has a random
/// order of its own.
pub(crate) fn toucher(
    engine: Engine,
    vcpus: u32,
    memory_bytes: u64,
    pages: u64,
    order: TouchOrder,
) -> Result<Toucher, BenchError> {
    let touch = Touch {
        access: TouchAccess::Write,
        order,
        passes: 1,
    };
    let map = MemoryMap::new(isa_of(engine), vcpus, memory_bytes)?;
    if order == TouchOrder::Ascending {
        return Ok(Toucher::partitioned(map, touch));
    }
    let data = map.data();
    let end = data.end.min(data.start.saturating_add(pages));
    let ranges = vec![data.start..end; vcpus as usize];
    Ok(Toucher::new(map, ranges, touch)?)
}

/// A VM whose faults on missing pages go to `faults`.
pub(crate) fn create(
    engine: Engine,
    spec: MachineSpec,
    faults: Arc<dyn Faults>,
) -> Result<Vm, BenchError> {
    Ok(Vm::create(engine, spec, Some(faults))?)
}

/// Fills `pages` of a VM with bytes that are not all zero.
///
/// # Errors
/// When a page is missing.
pub(crate) fn fill(vm: &Vm, pages: Range<u64>) -> Result<(), BenchError> {
    for page in pages {
        vm.machine.ram().try_write(RamPage(page), &filling(page))?;
    }
    Ok(())
}

/// The bytes with which a benchmark fills a page: not all zero, and different for each page.
pub(crate) fn filling(page: u64) -> [u8; 4096] {
    let mut bytes = [0x5a; 4096];
    bytes[8..16].copy_from_slice(&page.to_le_bytes());
    bytes
}

impl From<BootError> for BenchError {
    fn from(error: BootError) -> Self {
        match error {
            BootError::Machine(error) => error.into(),
            BootError::Memory(error) => error.into(),
            BootError::Linux(error) => Self::Setting(error.to_string()),
        }
    }
}

impl From<WaitError> for BenchError {
    fn from(error: WaitError) -> Self {
        match error {
            WaitError::Failed(why) => Self::Stopped(why),
            WaitError::Late(_) => Self::Busy(error.to_string()),
        }
    }
}
