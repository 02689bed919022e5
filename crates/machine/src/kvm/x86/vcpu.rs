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
//!
//! **Registers that name memory.** On an armed machine with interrupt controllers, the guest's
//! write of the register of a clock or the like leaves `KVM_RUN`. KVM would touch the page, and
//! sleep in the kernel, or fail at a marker. The vCPU asks for the missing pages by
//! [`Exit::MemoryFault`]. Then it sets the register, and maps the pages first. An address outside
//! RAM is KVM's matter.

use super::kick::Kick;
use super::paging::Known;
use super::run_page::{Mmio, Port, RunPage};
use super::shared::VmShared;
use super::sigbus::Sigbus;
use super::slots::{KvmSlot, guest_mapping};
use super::state::{self, Late, Parts, SharedPage};
use super::userfault::EXIT_FLAG_USERFAULT;
use super::{exits, msr, start, sys};
use crate::translate::Translator;
use crate::{Access, Exit, FirstInstruction, Kicker, MachineError, StartState, Vcpu, VcpuState};
use exits::Left;
use kvm_bindings::{KVM_EXIT_MEMORY_FAULT, kvm_cpuid_entry2, kvm_msr_entry};
use kvm_ioctls::VcpuFd;
use pageferry_addr::{Gpa, Hva, PAGE_SIZE, RamPage};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
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
    /// A write of a register whose pages are to be there first. Implies `pending`.
    wrmsr: Option<kvm_msr_entry>,
    /// The port access of the last exit, and how many of its values have left. Implies `pending`.
    port: Option<(Port, u32)>,
    /// Parts of a restored state that are set when the vCPU runs first. KVM touches guest memory
    /// then, or the state of the machine must be there.
    late: Late,
    /// It has left the guest to wait, so its guest is told when it goes on.
    stood_still: bool,
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
            wrmsr: None,
            port: None,
            late: Late::default(),
            stood_still: false,
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
            Left::Port(access) => {
                self.pending = true;
                self.port = Some((access, 0));
                Ok(self.next_port())
            }
            Left::WriteMsr(msr) => {
                self.pending = true;
                self.wrmsr = Some(msr);
                Ok(self.unblock()?.map(|page| memory_fault(page, true)))
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

    /// The exit for the next value of a port access, if any is left.
    fn next_port(&mut self) -> Option<Exit> {
        let (access, done) = self.port.filter(|(access, done)| *done < access.count)?;
        self.port = Some((access, done + 1));
        Some(exits::port(self.page(), &access, done))
    }

    fn is_missing(&self, page: RamPage) -> bool {
        let armed = self.shared.faults.active();
        armed.is_some_and(|armed| armed.missing.test(page))
    }

    /// Sets the register that the guest has written, if all pages are there by now. Returns the
    /// first that is missing.
    fn set_msr(&mut self) -> Result<Option<RamPage>, MachineError> {
        let Some(msr) = self.wrmsr else {
            return Ok(None);
        };
        let pages = msr::pages_of(&msr);
        let pages: Vec<RamPage> = pages
            .filter_map(|gpa| self.translator.page_of(gpa.gfn()))
            .collect();
        if let Some(missing) = pages.iter().find(|page| self.is_missing(**page)) {
            return Ok(Some(*missing));
        }
        for page in pages {
            // No empty entry makes KVM sleep, and no stale marker makes it fail.
            self.shared.faults.install(page, 1)?;
        }
        let set = msr::write_for_guest(&self.fd, msr)?;
        self.page().set_msr_refused(!set);
        self.wrmsr = None;
        Ok(None)
    }

    /// Carries out what KVM could not, if the pages are there by now. Returns one that is missing.
    fn unblock(&mut self) -> Result<Option<RamPage>, MachineError> {
        let Some(access) = self.blocked else {
            return self.set_msr();
        };
        let gpa = Gpa(access.gpa);
        let Some(page) = self.translator.page_of(gpa.gfn()) else {
            return Ok(None);
        };
        if self.is_missing(page) {
            return Ok(Some(page));
        }
        let ram = &self.shared.ram;
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
        Ok(None)
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
        const WAITS: MachineError = MachineError::WrongState(
            "the vCPU waits for a missing page in the middle of an instruction: its state cannot be taken",
        );
        if self.unblock()?.is_some() {
            return Err(WAITS);
        }
        while std::mem::take(&mut self.pending) {
            // Values that the guest wrote still leave. Those that it reads are ones.
            while let Some(exit) = self.next_port() {
                if matches!(exit, Exit::PortWrite { .. }) {
                    self.put_off.push_back(exit);
                }
            }
            self.port = None;
            // The guest meets a marker that KVM meets here again.
            let (result, _) = self.enter(Kick::without_entering)?;
            match result {
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(errno) => {
                    return Err(self.failed(&format!("an access cannot be completed: {errno}")));
                }
                Ok(()) => match self.left()? {
                    Some(Exit::MemoryFault { .. }) if self.unblock()?.is_some() => {
                        return Err(WAITS);
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
        (self.blocked, self.wrmsr) = (None, None);
        self.complete()?;
        self.put_off.clear();
        Ok(())
    }

    /// Sets the TSC of a restored state, once the machine's clock is here.
    fn set_tsc(&mut self) -> Result<(), MachineError> {
        if let Some(tsc) = self.late.tsc {
            let moved = *self
                .shared
                .clock
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            if let Some(moved) = moved {
                tsc.set(&self.fd, &moved)?;
            }
            self.late.tsc = None;
        }
        Ok(())
    }

    fn run_to_exit(&mut self) -> Result<Exit, MachineError> {
        if self.kick.register_thread(&mut self.thread) {
            self.shared.faults.note_run();
        }
        if let Some(exit) = self.put_off.pop_front() {
            return Ok(exit);
        }
        self.set_tsc()?;
        if !self.late.msrs.is_empty() {
            // This may sleep for a page, as KVM_RUN itself may. A kick is taken behind it.
            msr::write_late(&self.fd, &self.late.msrs)?;
            self.late.msrs.clear();
            self.stood_still = true;
        }
        if std::mem::take(&mut self.stood_still) {
            // The guest's watchdogs learn of it. Some guests have no clock to tell by.
            let _ = self.fd.kvmclock_ctrl();
        }
        if let Some(exit) = self.next_port() {
            return Ok(exit);
        }
        self.port = None;
        loop {
            if let Some(page) = self.unblock()? {
                let write = self.blocked.is_none_or(|access| access.write);
                return Ok(if self.kick.take() {
                    Exit::Kicked
                } else {
                    memory_fault(page, write)
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

    /// Reads the whole state, with the registers that are yet to be set.
    fn load(&self) -> Result<Parts, MachineError> {
        let mut parts = state::load(&self.fd, &self.shared, &self.cpuid)?;
        msr::overlay(&mut parts.msrs, &self.late.msrs);
        if self.shared.caps.lapic && !self.late.scaled {
            parts.tsc_offset = sys::tsc_offset(&self.fd).ok();
        }
        Ok(parts)
    }

    /// The pages that KVM itself accesses for this vCPU, unless they are missing.
    fn shared_pages(&mut self, parts: &Parts) -> Vec<SharedPage> {
        let mut pages: Vec<SharedPage> = Vec::new();
        for gpa in msr::shared_pages(&parts.msrs) {
            let Some(page) = self.translator.page_of(gpa.gfn()) else {
                continue;
            };
            if self.is_missing(page) || pages.iter().any(|other| other.gpa == gpa) {
                continue;
            }
            let mut bytes = Box::new([0; PAGE_SIZE as usize]);
            // SAFETY: (1) this is the engine, on the vCPU's own thread; (2) the page is present.
            unsafe { self.shared.ram.unchecked() }.read_at(page, 0, &mut *bytes);
            pages.push(SharedPage { gpa, bytes });
        }
        pages
    }

    /// Puts the pages of a state in place, before the guest runs. Nobody waits for another host:
    /// none of them is missing.
    fn put_shared_pages(&mut self, parts: &Parts) -> Result<(), MachineError> {
        for SharedPage { gpa, bytes } in &parts.pages {
            let Some(page) = self.translator.page_of(gpa.gfn()) else {
                continue;
            };
            if self.is_missing(page) {
                continue;
            }
            let vm = &self.shared;
            if !vm.faults.receives_in_place() {
                // Afterwards the page is there, with these bytes or older ones.
                vm.faults.install_copy(page, &**bytes)?;
            }
            // SAFETY: (1) this is the engine, on the vCPU's own thread; (2) the page is present.
            unsafe { vm.ram.unchecked() }.write_at(page, 0, &**bytes);
            vm.ram.written.mark(page.0..page.0 + 1);
            vm.faults.install(page, 1)?;
        }
        Ok(())
    }

    /// Records the pages that must not be marked because of this vCPU.
    fn note(&self, parts: &Parts) {
        let known = Known {
            paging: parts.special.paging(),
            shared: msr::shared_pages(&parts.msrs).collect(),
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
        let exit = self.run_to_exit()?;
        // A kick mostly means a pause. A guest that is told once too often loses nothing.
        self.stood_still = exit == Exit::Kicked;
        Ok(exit)
    }

    fn complete_read(&mut self, value: u64) {
        // A load that KVM completed while a state was saved is over: it returned all ones.
        if !self.pending || self.blocked.is_some() {
            return;
        }
        match (exits::read(self.page()), self.port) {
            (Left::Mmio(access), _) if !access.write => {
                self.page().set_mmio_data(value.to_le_bytes());
            }
            (Left::Port(_), Some((access, done))) if !access.write && done > 0 => {
                self.page().set_port_read(&access, done - 1, value as u32);
            }
            _ => {}
        }
    }

    fn kicker(&self) -> Arc<dyn Kicker> {
        Arc::clone(&self.kick) as Arc<dyn Kicker>
    }

    fn save(&mut self) -> Result<VcpuState, MachineError> {
        self.complete()?;
        self.set_tsc()?;
        let mut parts = self.load()?;
        parts.exits = self.put_off.iter().copied().collect();
        if self.shared.caps.lapic {
            // Last: KVM notes in them that the vCPU has left its core.
            parts.pages = self.shared_pages(&parts);
        }
        Ok(parts.encode())
    }

    fn check(&self, state: &VcpuState) -> Result<(), MachineError> {
        let parts = Parts::decode(state).map_err(MachineError::BadState)?;
        state::check(&self.shared, &parts)
    }

    fn restore(&mut self, state: &VcpuState) -> Result<(), MachineError> {
        let parts = Parts::decode(state).map_err(MachineError::BadState)?;
        self.discard()?;
        self.put_shared_pages(&parts)?;
        self.late = state::store(&self.fd, &self.shared, &self.cpuid, &parts, self.id == 0)?;
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
