//! The VM that a migration moves.

use pageferry_machine::{Device, Engine, Machine, VcpuThreads};
use std::sync::Arc;

/// A VM with its vCPU threads.
#[derive(Clone, Copy)]
pub struct RunningVm<'a> {
    /// The machine.
    pub machine: &'a Arc<dyn Machine>,
    /// The threads of its vCPUs.
    pub threads: &'a VcpuThreads,
    /// The devices whose states travel. Both ends have the same ones, by name. A destination pauses
    /// them before the VM comes, and a source that has handed the VM over leaves them paused.
    pub devices: &'a [Arc<dyn Device>],
}

/// Returns the wire numbers of an engine and of its guests' ISA.
pub(crate) fn wire_engine(engine: Engine) -> (crate::wire::Engine, crate::wire::Isa) {
    match engine {
        Engine::Kvm => (crate::wire::Engine::Kvm, crate::wire::Isa::X86_64),
        Engine::Soft => (crate::wire::Engine::Soft, crate::wire::Isa::Riscv64),
    }
}

/// Returns the engine with this wire number.
pub(crate) fn machine_engine(engine: crate::wire::Engine) -> Engine {
    match engine {
        crate::wire::Engine::Kvm => Engine::Kvm,
        crate::wire::Engine::Soft => Engine::Soft,
    }
}
