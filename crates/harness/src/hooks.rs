//! The hooks of a VM's vCPU threads.

use pageferry_addr::{Gpa, RamPage};
use pageferry_devices::{MmioBus, Pc};
use pageferry_guest::{Doorbell, Event};
use pageferry_machine::{
    Access, DOORBELL_GPA, HookVerdict, Kicker, MachineError, Reset, VcpuHooks,
};
use pageferry_migration::Resolver;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// Resolves faults on missing pages.
pub trait Faults: Send + Sync {
    /// Resolves a vCPU's fault on the missing `page`. Runs on the vCPU's own thread.
    fn memory_fault(
        &self,
        vcpu: u32,
        page: RamPage,
        access: Access,
        kicker: &dyn Kicker,
    ) -> HookVerdict;

    /// Wakes vCPUs that wait for a page, since a pause begins.
    fn pausing(&self) {}
}

impl Faults for Resolver {
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

/// The devices of a machine for a kernel.
pub struct Board {
    /// Those at the I/O ports of a PC.
    pub pc: Option<Pc>,
    /// The virtio devices.
    pub bus: MmioBus,
}

/// The hooks of one VM.
pub struct Hooks {
    faults: Option<Arc<dyn Faults>>,
    finished: AtomicU32,
    errors: AtomicU32,
    /// The threads for which the workload does not rest.
    hurried: AtomicU32,
    reset: OnceLock<Reset>,
    /// The devices of a kernel.
    board: Option<Board>,
}

impl Hooks {
    /// Returns hooks that resolve faults by `faults`, and pass accesses on to the devices of
    /// `board`. A VM without `faults` must have no missing pages.
    #[must_use]
    pub fn new(faults: Option<Arc<dyn Faults>>, board: Option<Board>) -> Self {
        Self {
            faults,
            finished: AtomicU32::new(0),
            errors: AtomicU32::new(0),
            hurried: AtomicU32::new(0),
            reset: OnceLock::new(),
            board,
        }
    }

    /// Returns the number of vCPUs whose program has ended.
    #[must_use]
    pub fn finished(&self) -> u32 {
        self.finished.load(Ordering::SeqCst)
    }

    /// Calls `wait`. The workload does its pages without a rest meanwhile.
    pub(crate) fn hurried<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.hurried.fetch_add(1, Ordering::SeqCst);
        let waited = wait();
        self.hurried.fetch_sub(1, Ordering::SeqCst);
        waited
    }

    /// Returns how the guest has ended itself, if it has.
    #[must_use]
    pub fn reset(&self) -> Option<Reset> {
        self.reset.get().copied()
    }

    /// Returns the devices of a kernel, if there are any.
    #[must_use]
    pub fn board(&self) -> Option<&Board> {
        self.board.as_ref()
    }

    /// The devices at the I/O ports of a PC.
    pub(crate) fn pc(&self) -> Option<&Pc> {
        self.board()?.pc.as_ref()
    }

    /// Returns the number of errors that the guest has signalled, such as wrong pages.
    #[must_use]
    pub fn errors(&self) -> u32 {
        self.errors.load(Ordering::SeqCst)
    }
}

impl VcpuHooks for Hooks {
    fn memory_fault(
        &self,
        vcpu: u32,
        page: RamPage,
        access: Access,
        kicker: &dyn Kicker,
    ) -> HookVerdict {
        match &self.faults {
            Some(faults) => faults.memory_fault(vcpu, page, access, kicker),
            None => HookVerdict::Resume,
        }
    }

    fn mmio_write(&self, _vcpu: u32, gpa: Gpa, value: u64, size: u8) -> HookVerdict {
        if let Some(board) = &self.board {
            board.bus.mmio_write(gpa, value, size);
            return HookVerdict::Resume;
        }
        let event = (gpa == DOORBELL_GPA)
            .then(|| u32::try_from(value).ok())
            .flatten()
            .and_then(|value| Doorbell::parse(value).ok())
            .map(|doorbell| doorbell.event);
        match event {
            Some(Event::Finished) => {
                self.finished.fetch_add(1, Ordering::SeqCst);
                // A program that has ended would only signal again.
                return HookVerdict::Park;
            }
            Some(Event::Rest(time)) => {
                if self.hurried.load(Ordering::SeqCst) == 0 {
                    std::thread::sleep(time);
                }
            }
            // The guest also counts its errors on the vCPU's control page, which migrates with the
            // VM. A store that is no signal is an error too.
            Some(Event::Error(_)) | None => {
                self.errors.fetch_add(1, Ordering::SeqCst);
            }
        }
        HookVerdict::Resume
    }

    fn mmio_read(&self, _vcpu: u32, gpa: Gpa, size: u8) -> u64 {
        let read = |board: &Board| board.bus.mmio_read(gpa, size);
        self.board.as_ref().map_or(0, read)
    }

    fn port_write(&self, vcpu: u32, port: u16, value: u32, size: u8) -> HookVerdict {
        let Some(pc) = self.pc() else {
            return HookVerdict::Resume;
        };
        pc.port_write(port, value, size);
        match pc.ended() {
            Some(end) => {
                VcpuHooks::reset(self, vcpu, end);
                HookVerdict::Park
            }
            None => HookVerdict::Resume,
        }
    }

    fn port_read(&self, _vcpu: u32, port: u16, size: u8) -> u32 {
        match self.pc() {
            Some(pc) => pc.port_read(port, size),
            None => u32::MAX,
        }
    }

    /// Keeps the first end.
    fn reset(&self, _vcpu: u32, reset: Reset) {
        let _ = self.reset.set(reset);
    }

    /// Does nothing: [`pageferry_machine::VcpuThreads::failures`] keeps the error, and waits check
    /// it.
    fn failed(&self, _vcpu: u32, _error: &MachineError) {}

    fn pausing(&self) {
        if let Some(faults) = &self.faults {
            faults.pausing();
        }
    }
}
