#![expect(unsafe_code, reason = "carries out an access of the guest")]
//! The vCPU: running, saving and restoring.
//!
//! `KVM_RUN` returns for one of four reasons. [`KvmVcpu::run`] tests for them in this order:
//!
//! 1. an exit of the guest: the ioctl returned 0,
//! 2. a poison marker: its SIGBUS is pending,
//! 3. a kick,
//! 4. a foreign signal, after which the vCPU enters the guest again.
//!
//! **Pending exits.** An instruction that left for MMIO or a port is completed by KVM only at the
//! next `KVM_RUN`. So [`KvmVcpu::complete`] does that before the state is read or replaced, with
//! `immediate_exit`, which returns before the guest is entered. The instruction may then leave
//! again (an access in several pieces). That exit is put off: it is part of the state, and the next
//! `run` returns it first.
//!
//! **Emulated accesses to marked pages.** KVM may emulate an instruction, e.g. one that also
//! accesses MMIO. If its other operand is in a marked page, KVM cannot reach that page and reports
//! the access as MMIO at an address in RAM. The vCPU turns it into an [`Exit::MemoryFault`], and
//! carries out the access itself once the page is there. If the machine is no longer armed, the
//! marker is stale: the vCPU removes it, and carries out the access at once.

use super::kick::Kick;
use super::paging::Known;
use super::run_page::{Mmio, RunPage};
use super::shared::VmShared;
use super::sigbus::Sigbus;
use super::slots::{KvmSlot, guest_mapping};
use super::state::{self, Parts};
use super::userfault::EXIT_FLAG_USERFAULT;
use super::{exits, msr, start, sys};
use crate::translate::Translator;
use crate::{Access, Exit, FirstInstruction, Kicker, MachineError, StartState, Vcpu, VcpuState};
use exits::Left;
use kvm_bindings::{KVM_EXIT_MEMORY_FAULT, kvm_cpuid_entry2, kvm_msr_entry};
use kvm_ioctls::VcpuFd;
use pageferry_addr::{Gpa, Hva, RamPage};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::ThreadId;

/// [`Kick::while_inside`] or [`Kick::without_entering`].
type Enter = fn(&Kick, &mut dyn FnMut() -> Result<(), Errno>) -> Result<(), Errno>;

/// A vCPU of [`super::vm`].
pub(super) struct KvmVcpu {
    fd: VcpuFd,
    id: u32,
    shared: Arc<VmShared>,
    translator: Translator<KvmSlot>,
    kick: Arc<Kick>,
    sigbus: Sigbus,
    cpuid: Vec<kvm_cpuid_entry2>,
    thread: Option<ThreadId>,
    /// The last exit is completed by the next `KVM_RUN`.
    pending: bool,
    /// Exits that came while a pending one was completed.
    put_off: VecDeque<Exit>,
    /// An access to RAM that KVM could not carry out. Implies `pending`.
    blocked: Option<Mmio>,
    /// Registers of a restored state that are set when the vCPU runs first, as KVM then touches
    /// guest memory.
    late: Vec<kvm_msr_entry>,
}

impl KvmVcpu {
    pub(super) fn new(
        fd: VcpuFd,
        id: u32,
        cpuid: Vec<kvm_cpuid_entry2>,
        shared: Arc<VmShared>,
        run_bytes: usize,
    ) -> Result<Self, MachineError> {
        let mapping = guest_mapping(&shared.ram);
        Ok(Self {
            translator: shared.translator(),
            kick: Kick::new(RunPage::map(&fd, run_bytes)?),
            sigbus: Sigbus::new(mapping.start.0..mapping.end.0),
            fd,
            id,
            shared,
            cpuid,
            thread: None,
            pending: false,
            put_off: VecDeque::new(),
            blocked: None,
            late: Vec::new(),
        })
    }

    fn page(&self) -> &RunPage {
        &self.kick.page
    }

    fn failed(&self, why: &str) -> MachineError {
        let at = match (self.fd.get_regs(), self.fd.get_sregs()) {
            (Ok(regs), Ok(sregs)) => exits::place(&regs, &sregs),
            _ => "its registers cannot be read".into(),
        };
        MachineError::Guest {
            vcpu: self.id,
            why: format!("{why}; {at}"),
        }
    }

    /// Calls `KVM_RUN` by `how`. Returns its result, and the address of a marker that the vCPU met.
    fn enter(&mut self, how: Enter) -> Result<(Result<(), Errno>, Option<u64>), MachineError> {
        let run = || how(&self.kick, &mut || sys::run(&self.fd));
        if self.shared.faults.may_have_markers() {
            self.sigbus.collect(&self.fd, run)
        } else {
            self.sigbus.end(&self.fd).map(|()| (run(), None))
        }
        .map_err(|e| MachineError::os("cannot set the signal mask of a vCPU", e))
    }

    /// Handles an exit of the guest. Returns `Ok(None)` to enter the guest again.
    fn left(&mut self) -> Result<Option<Exit>, MachineError> {
        match exits::read(self.page()) {
            Left::Mmio(access) => {
                self.pending = true;
                match self.translator.page_of(Gpa(access.gpa).gfn()) {
                    None => Ok(Some(exits::mmio(self.page(), access))),
                    Some(page) if self.shared.faults.armed().is_some() => {
                        let leaves = self.met_marker(page)?;
                        self.blocked = Some(access);
                        Ok(leaves.then(|| memory_fault(page, access.write)))
                    }
                    Some(page) => {
                        Err(self
                            .failed(&format!("KVM cannot reach page {page} of the guest's RAM")))
                    }
                }
            }
            Left::Port => {
                self.pending = true;
                Ok(None)
            }
            Left::Halted => Ok(Some(Exit::Halted)),
            Left::RingFull => {
                let vm = &self.shared;
                vm.dirty.ring_is_full(&vm.vm, &vm.ram, self.id)?;
                Ok(None)
            }
            Left::Nothing => Ok(None),
            Left::Failed(why) => Err(self.failed(&why)),
        }
    }

    /// Carries out the access that KVM could not, if its page is there by now.
    fn unblock(&mut self) -> Result<(), RamPage> {
        let Some(access) = self.blocked else {
            return Ok(());
        };
        let gpa = Gpa(access.gpa);
        let Some(page) = self.translator.page_of(gpa.gfn()) else {
            return Ok(());
        };
        let ram = &self.shared.ram;
        if self
            .shared
            .faults
            .active()
            .is_some_and(|armed| armed.missing.test(page))
        {
            return Err(page);
        }
        ram.map_present(page, 1);
        let (offset, size) = (gpa.page_offset(), usize::from(access.size));
        // SAFETY: (1) this is the engine, on the vCPU's own thread; (2) the page is present.
        let bytes = unsafe { ram.unchecked() };
        if access.write {
            bytes.write_at(page, offset, &access.bytes[..size]);
            ram.written.mark(page.0..page.0 + 1);
        } else {
            let mut data = [0; 8];
            bytes.read_at(page, offset, &mut data[..size]);
            self.page().set_mmio_data(data);
        }
        self.blocked = None;
        Ok(())
    }

    /// Handles the touch of a marker at `address`. Returns `Ok(None)` to enter the guest again.
    fn poisoned(&mut self, address: u64) -> Result<Option<Exit>, MachineError> {
        let Some(page) = self.translator.page_at_hva(Hva(address)) else {
            return Ok(None);
        };
        let leaves = self.met_marker(page)?;
        Ok(leaves.then(|| memory_fault(page, false)))
    }

    /// Returns whether the vCPU leaves the guest for the marker. Fails if there was none, and the
    /// host's memory is broken.
    fn met_marker(&self, page: RamPage) -> Result<bool, MachineError> {
        let met = self.shared.faults.met_marker(page);
        met.map_err(|e| self.failed(&format!("page {page} of RAM: {e}")))
    }

    /// Handles an error of `KVM_RUN` other than a signal.
    fn refused(&mut self, errno: Errno) -> Result<Option<Exit>, MachineError> {
        if matches!(errno, Errno::FAULT | Errno::HWPOISON)
            && self.page().exit_reason() == KVM_EXIT_MEMORY_FAULT
        {
            let (flags, gpa) = self.page().memory_fault();
            let page = self.translator.page_of(Gpa(gpa).gfn());
            // The page may have arrived since, or delivery may have ended.
            if let (Some(page), Some(_)) = (page, self.shared.faults.armed())
                && flags & EXIT_FLAG_USERFAULT != 0
            {
                return Ok(Some(memory_fault(page, false)));
            }
            if let (Some(page), Some(armed)) = (page, self.shared.faults.active())
                && (armed.missing.test(page) || errno == Errno::HWPOISON)
            {
                return Ok(Some(memory_fault(page, false)));
            }
            return Err(self.failed(&format!(
                "KVM cannot reach memory at {} (flags {flags:#x}, {errno})",
                Gpa(gpa)
            )));
        }
        Err(self.failed(&format!("KVM_RUN failed: {errno}")))
    }

    /// Completes a pending exit without entering the guest. Exits that follow are put off.
    fn complete(&mut self) -> Result<(), MachineError> {
        if self.unblock().is_err() {
            return Err(MachineError::WrongState(
                "the vCPU waits for a missing page in the middle of an instruction: its state cannot be taken",
            ));
        }
        while std::mem::take(&mut self.pending) {
            // The guest meets a marker that KVM meets here again.
            let (result, _) = self.enter(Kick::without_entering)?;
            match result {
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(errno) => {
                    return Err(self.failed(&format!("an access cannot be completed: {errno}")));
                }
                Ok(()) => match self.left()? {
                    Some(Exit::MemoryFault { .. }) if self.unblock().is_err() => {
                        return Err(MachineError::WrongState(
                            "the vCPU waits for a missing page in the middle of an instruction: its state cannot be taken",
                        ));
                    }
                    Some(Exit::MemoryFault { .. }) | None => {}
                    Some(exit) => self.put_off.push_back(exit),
                },
            }
        }
        Ok(())
    }

    /// Drops the pending exit, before the state is replaced.
    fn discard(&mut self) -> Result<(), MachineError> {
        self.blocked = None;
        self.complete()?;
        self.put_off.clear();
        Ok(())
    }

    /// Reads the whole state, with the registers that are yet to be set.
    fn load(&self) -> Result<Parts, MachineError> {
        let mut parts = state::load(&self.fd, &self.shared, &self.cpuid)?;
        msr::overlay(&mut parts.msrs, &self.late);
        Ok(parts)
    }

    /// Records the pages that must not be marked because of this vCPU.
    fn note(&self, parts: &Parts) {
        let known = Known {
            paging: parts.special.paging(),
            shared: msr::shared_addresses(&parts.msrs).map(Gpa).collect(),
        };
        self.shared.faults.note_vcpu(self.id, known);
    }
}

fn memory_fault(page: RamPage, write: bool) -> Exit {
    // For a marker, KVM does not report the kind of access. A read is the weakest assumption.
    let access = if write { Access::Write } else { Access::Read };
    Exit::MemoryFault { page, access }
}

impl Vcpu for KvmVcpu {
    fn id(&self) -> u32 {
        self.id
    }

    fn run(&mut self) -> Result<Exit, MachineError> {
        if self.kick.register_thread(&mut self.thread) {
            self.shared.faults.note_run();
        }
        if let Some(exit) = self.put_off.pop_front() {
            return Ok(exit);
        }
        if !self.late.is_empty() {
            // This may sleep for a page, as KVM_RUN itself may. A kick is taken behind it.
            msr::write_late(&self.fd, &self.late)?;
            self.late.clear();
        }
        loop {
            if let Err(page) = self.unblock() {
                return Ok(if self.kick.take() {
                    Exit::Kicked
                } else {
                    memory_fault(page, false)
                });
            }
            self.pending = false;
            let exit = match self.enter(Kick::while_inside)? {
                // An exit goes first: the guest touches the marked page again.
                (Ok(()), _) => self.left()?,
                (Err(_), Some(address)) => self.poisoned(address)?,
                (Err(Errno::INTR | Errno::AGAIN), None) => self.kick.take().then_some(Exit::Kicked),
                (Err(errno), None) => self.refused(errno)?,
            };
            if let Some(exit) = exit {
                return Ok(exit);
            }
        }
    }

    fn complete_mmio_read(&mut self, value: u64) {
        // A load that KVM completed while a state was saved is over: it returned all ones.
        if self.pending
            && self.blocked.is_none()
            && let Left::Mmio(access) = exits::read(self.page())
            && !access.write
        {
            self.page().set_mmio_data(value.to_le_bytes());
        }
    }

    fn kicker(&self) -> Arc<dyn Kicker> {
        Arc::clone(&self.kick) as Arc<dyn Kicker>
    }

    fn save(&mut self) -> Result<VcpuState, MachineError> {
        self.complete()?;
        let mut parts = self.load()?;
        parts.exits = self.put_off.iter().copied().collect();
        Ok(parts.encode())
    }

    fn check(&self, state: &VcpuState) -> Result<(), MachineError> {
        let parts = Parts::decode(state).map_err(MachineError::BadState)?;
        state::check(&self.shared, &parts)
    }

    fn restore(&mut self, state: &VcpuState) -> Result<(), MachineError> {
        let parts = Parts::decode(state).map_err(MachineError::BadState)?;
        self.discard()?;
        self.late = state::store(&self.fd, &self.shared, &self.cpuid, &parts)?;
        self.note(&parts);
        self.put_off.extend(&parts.exits);
        self.cpuid = parts.cpuid;
        Ok(())
    }

    fn set_start(&mut self, start: &StartState) -> Result<(), MachineError> {
        self.discard()?;
        start::set(&self.fd, &self.cpuid, start)?;
        let parts = self.load()?;
        self.note(&parts);
        Ok(())
    }

    fn first_instruction(&self) -> FirstInstruction {
        // KVM does not report when it entered the guest.
        FirstInstruction::Untold
    }
}
