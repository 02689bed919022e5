//! The trait of all vCPUs of a VM together: what a migration asks of them.
//!
//! **Guarantee.** A migration runs, stops and copies the vCPUs of a VM by [`Vcpus`] only. It does
//! not know the threads behind it.
//!
//! **Neighbours.** [`VcpuThreads`](crate::VcpuThreads) is the implementation of this crate. A VMM
//! with vCPU threads of its own implements the trait itself.

use crate::{MachineError, VcpuState};
use std::time::{Duration, Instant};

/// The vCPUs of a VM.
///
/// A fault of a vCPU on a missing page is no part of this: the vCPU's own thread reports it, to the
/// resolver of the migration.
pub trait Vcpus: Send + Sync {
    /// The number of vCPUs. It never changes.
    fn count(&self) -> usize;

    /// Pauses all vCPUs and waits until each has left the guest. From then on none runs, and none
    /// changes its state, until [`Vcpus::resume`]. Repeating it is harmless.
    ///
    /// # Errors
    /// [`MachineError::Timeout`] when a vCPU does not leave the guest within `limit`. The request
    /// stands, and the vCPU stops when it leaves.
    fn pause(&self, limit: Duration) -> Result<PauseReport, MachineError>;

    /// Lets all vCPUs run, except those that stopped for good. Repeating it is harmless.
    fn resume(&self);

    /// Whether the guest counts as running only when another VMM has said so: the caller of the
    /// migration then tells the destination.
    fn confirms_start(&self) -> bool {
        false
    }

    /// The number of vCPUs that still run, or that wait for a page. It is 0 after a pause.
    fn inside(&self) -> usize;

    /// The states of all vCPUs of a paused VM, in order of their ids.
    ///
    /// # Errors
    /// When a state cannot be saved.
    fn save(&self) -> Result<Vec<VcpuState>, MachineError>;

    /// Replaces the states of all vCPUs of a paused VM. The bytes come from another process. So all
    /// are decoded before any vCPU changes.
    ///
    /// A migration calls this in the blackout, before the VM is handed over. So every error leaves
    /// the VM at its source. The call may touch missing pages, which the source sends then: each
    /// costs a round trip, and the thread that calls must not be the one that serves the faults. A
    /// system call that touches memory for the guest, such as `KVM_SET_MSRS` with the guest's
    /// clock, waits for the first run of the vCPU, unless another VMM makes it.
    ///
    /// # Errors
    /// When the number of states is not the number of vCPUs, or a state is refused. No vCPU should
    /// run then.
    fn restore(&self, states: &[VcpuState]) -> Result<(), MachineError>;

    /// The time at which the first guest instruction since [`Vcpus::restore`] ran, if the engine
    /// knows it. It may wait for that for at most `limit`. The vCPUs run on.
    fn first_instruction(&self, _limit: Duration) -> Option<Instant> {
        None
    }
}

/// The times at which the vCPUs stopped.
#[derive(Clone, Copy, Debug)]
pub struct PauseReport {
    /// The first vCPU left the guest for good.
    pub first_stop: Instant,
    /// The last vCPU left the guest for good.
    pub last_stop: Instant,
    /// Whether the VM was to run until this pause. It is false if the VM was paused already. A
    /// migration leaves such a VM paused, at either end.
    pub was_running: bool,
}
