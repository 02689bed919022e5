//! Linux on our own hypervisor, in this process.

use super::figures::{Figures, Listener};
use super::{Guest, MEMORY, go_on};
use crate::BenchError;
use crate::vm::Vm;
use pageferry_machine::{Console, Engine, Linux, MachineSpec};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest wait for text.
const INTERVAL: Duration = Duration::from_millis(20);

/// Starts Linux, which then runs.
pub(super) fn start(
    linux: &Linux<'_>,
    vcpus: u32,
    memory_bytes: u64,
) -> Result<(Vm, Arc<Console>), BenchError> {
    let vm = Vm::create(Engine::Soft, MachineSpec::new(vcpus, memory_bytes), None)?;
    let console = vm.machine.console().map(Arc::clone);
    let console = console
        .ok_or_else(|| BenchError::Setting("the soft engine has no console for Linux".into()))?;
    vm.load_linux(linux)?;
    vm.threads.resume();
    Ok((vm, console))
}

/// Checks that a VM goes on.
pub(super) fn check(vm: &Vm) -> Result<(), BenchError> {
    match vm.threads.failures().first() {
        Some(why) => Err(BenchError::Stopped(why.to_string())),
        None if vm.reset().is_some() => {
            let why = "Linux has shut down before its work was done";
            Err(BenchError::Stopped(why.into()))
        }
        None => Ok(()),
    }
}

impl Guest {
    /// Starts Linux on `vcpus` vCPUs, and reads its figures.
    pub(super) fn measure_soft(&self, vcpus: u32) -> Result<Figures, BenchError> {
        let mut listener = Listener::new();
        let (vm, console) = start(&self.linux(super::MEASURE), vcpus, MEMORY)?;
        let deadline = Instant::now() + super::LIMIT;
        while !listener.take(&console.read(INTERVAL))? {
            // What the guest wrote last comes before its end.
            let text = console.read(Duration::ZERO);
            if text.is_empty() {
                check(&vm)?;
            }
            if listener.take(&text)? {
                break;
            }
            go_on(deadline, "Linux on the soft engine")?;
        }
        listener.figures()
    }
}
