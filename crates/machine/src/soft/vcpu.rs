//! A vCPU of the soft engine.

use super::SoftMachine;
use super::calls::{Calls, Missing};
use super::harts::{Harts, Start};
use super::memory::alias_mapping;
use super::plic::Plic;
use super::state::{decode, encode};
use crate::translate::Translator;
use crate::{
    Access, Exit, FirstInstruction, Kicker, MachineError, Reset, ResetKind, StartState, Vcpu,
    VcpuState,
};
use pageferry_addr::Gpa;
use pageferry_hypervisor::hart::{self, Hart, RunState};
use pageferry_hypervisor::{self as hypervisor, KickHandle, SlotData, VcpuCore};
use pageferry_sbi::{Call, Next, serve};
use std::sync::Arc;
use std::time::Duration;

/// `sstatus.SIE` (RISC-V privileged specification).
const STATUS_SIE: u64 = 1 << 1;
const SP: u8 = 2;
const A0: u8 = 10;
const A1: u8 = 11;

pub(super) struct SoftVcpu {
    core: VcpuCore,
    machine: Arc<SoftMachine>,
    harts: Arc<Harts>,
    translator: Translator<SlotData>,
    /// What the other harts know of this one.
    told: RunState,
    /// Whether it waits for an interrupt, or for its start.
    halted: bool,
}

struct SoftKicker(KickHandle);

impl Kicker for SoftKicker {
    fn kick(&self) {
        self.0.kick();
    }

    fn is_kicked(&self) -> bool {
        self.0.is_kicked()
    }
}

impl SoftVcpu {
    /// A hart that is stopped.
    pub(super) fn new(mut core: VcpuCore, machine: &Arc<SoftMachine>, harts: &Arc<Harts>) -> Self {
        core.hart_mut().set_run_state(RunState::Stopped);
        let table = machine.vm.slot_table();
        Self {
            core,
            machine: Arc::clone(machine),
            harts: Arc::clone(harts),
            translator: Translator::new(&table, alias_mapping(&machine.ram)),
            told: RunState::Stopped,
            halted: false,
        }
    }

    /// Carries out a start that another hart has asked for. Returns whether there was one.
    fn take_start(&mut self) -> bool {
        if self.core.hart().run_state() != RunState::Stopped {
            return false;
        }
        let Some(Start { entry, opaque }) = self.harts.take_start(self.core.id()) else {
            return false;
        };
        self.told = RunState::Started;
        let before = self.core.hart().state();
        let state = hart::HartState {
            instret: before.instret,
            // The vCPU may have taken an interrupt that came after the request for the start.
            sip: before.sip,
            ..Hart::new().state()
        };
        self.begin(state, entry, opaque);
        true
    }

    /// Lets the hart begin at `entry`, as SBI's HSM extension defines it. `state` is of the hart
    /// alone. Interrupts that other threads raise meanwhile stay raised, so the vCPU takes them at
    /// its next entry.
    fn begin(&mut self, mut state: hart::HartState, entry: u64, opaque: u64) {
        state.pc = entry;
        state.mode = hart::Mode::Supervisor;
        state.satp = 0;
        state.sstatus &= !STATUS_SIE;
        state.x[usize::from(A0)] = self.core.id().into();
        state.x[usize::from(A1)] = opaque;
        let begun = self.core.hart_mut().set_state(&state);
        begun.expect("a state of a hart, with an address that was checked");
    }

    /// Tells the other harts what this one is now.
    fn tell(&mut self) {
        let now = self.core.hart().run_state();
        if self.told != now {
            self.told = now;
            self.harts.set(self.core.id(), || self.core.state());
        }
    }

    /// Replaces the whole state. Interrupts and starts that other harts have sent before end here.
    fn set_state(&mut self, state: &hart::HartState) -> Result<(), MachineError> {
        self.core
            .set_state(state)
            .map_err(|e| MachineError::BadState(e.to_string()))?;
        self.halted = false;
        // Also if it is as before: the entry may hold a start.
        self.told = state.run_state;
        self.harts.set(self.core.id(), || self.core.state());
        Ok(())
    }

    /// Serves an ECALL. Returns an exit that the caller must see.
    fn call(&mut self, args: [u64; 8]) -> Option<Exit> {
        let mut calls = Calls {
            core: &mut self.core,
            vm: &self.machine.vm,
            ram: &self.machine.ram,
            harts: &self.harts,
            console: &self.machine.console,
        };
        match serve(&Call::from_registers(args), &mut calls) {
            Ok(Next::Return { error, value }) => self.answer(error as u64, value),
            Ok(Next::Stop) => self.core.hart_mut().set_run_state(RunState::Stopped),
            Ok(Next::Suspend { resume }) => {
                match resume {
                    None => self.answer(0, 0),
                    Some((entry, opaque)) => self.begin(self.core.hart().state(), entry, opaque),
                }
                self.core.hart_mut().set_run_state(RunState::Suspended);
            }
            // A hart that is entered again, here or elsewhere, asks again.
            Ok(Next::Reset(reset)) => {
                self.step_back();
                return Some(Exit::Reset(Reset {
                    kind: match reset.kind {
                        pageferry_sbi::ResetKind::Shutdown => ResetKind::Shutdown,
                        pageferry_sbi::ResetKind::Reboot => ResetKind::Reboot,
                    },
                    failure: reset.failure,
                }));
            }
            Err(Missing { page, access }) => {
                self.step_back();
                return Some(Exit::MemoryFault { page, access });
            }
        }
        None
    }

    /// The interrupt controller, if it has `gpa`, and the offset there.
    fn plic(&self, gpa: Gpa) -> Option<(&Plic, u64)> {
        Some((self.machine.plic.get()?, Plic::offset(gpa)?))
    }

    /// Lets the hart repeat the ECALL that it has left with.
    fn step_back(&mut self) {
        // The ECALL may be the last instruction of the address space.
        let call = self.core.hart().pc().wrapping_sub(4);
        let repeated = self.core.hart_mut().set_pc(call);
        repeated.expect("the address of the ECALL");
    }

    fn answer(&mut self, a0: u64, a1: u64) {
        self.core.hart_mut().set_x(A0, a0);
        self.core.hart_mut().set_x(A1, a1);
    }
}

impl Vcpu for SoftVcpu {
    fn id(&self) -> u32 {
        self.core.id()
    }

    fn run(&mut self) -> Result<Exit, MachineError> {
        self.take_start();
        loop {
            let exit = self.core.run();
            self.tell();
            self.halted &= exit == hypervisor::Exit::Kicked;
            return Ok(match exit {
                hypervisor::Exit::MemoryFault {
                    write_tracked: true,
                    ..
                } => unreachable!("this engine's VMs track no stores"),
                hypervisor::Exit::MemoryFault { gpa, access, .. } => Exit::MemoryFault {
                    page: self.translator.page_of(gpa.gfn()).ok_or_else(|| {
                        MachineError::Guest {
                            vcpu: self.core.id(),
                            why: format!("memory is missing at {gpa}, where there is no RAM"),
                        }
                    })?,
                    access: match access {
                        hart::Access::Fetch => Access::Execute,
                        hart::Access::Load => Access::Read,
                        hart::Access::Store => Access::Write,
                    },
                },
                hypervisor::Exit::MmioRead { gpa, size } => match self.plic(gpa) {
                    Some((plic, offset)) => {
                        let value = plic.read(offset, size);
                        self.core.complete_mmio_read(value);
                        continue;
                    }
                    None => Exit::MmioRead { gpa, size },
                },
                hypervisor::Exit::MmioWrite { gpa, size, value } => match self.plic(gpa) {
                    Some((plic, offset)) => {
                        plic.write(offset, value, size);
                        continue;
                    }
                    None => Exit::MmioWrite { gpa, value, size },
                },
                hypervisor::Exit::Ecall { args } => match self.call(args) {
                    Some(exit) => exit,
                    None => {
                        // A hart that suspends may wait for its timer before it exits again.
                        self.tell();
                        continue;
                    }
                },
                hypervisor::Exit::DirtyRingFull => {
                    unreachable!("this engine's VMs log into bitmaps")
                }
                hypervisor::Exit::Halted => {
                    self.halted = true;
                    // A start that another hart asks for after this look ends the wait.
                    if !self.take_start() {
                        self.core.wait(Duration::MAX);
                    }
                    continue;
                }
                // The other harts know by now that it executes instructions.
                hypervisor::Exit::Resumed => continue,
                hypervisor::Exit::Kicked => Exit::Kicked,
            });
        }
    }

    fn complete_read(&mut self, value: u64) {
        self.core.complete_mmio_read(value);
    }

    fn kicker(&self) -> Arc<dyn Kicker> {
        Arc::new(SoftKicker(self.core.kick_handle()))
    }

    fn save(&mut self) -> Result<VcpuState, MachineError> {
        self.take_start();
        Ok(encode(&self.core.state(), self.machine.vm.time()))
    }

    fn check(&self, state: &VcpuState) -> Result<(), MachineError> {
        let (state, _) = decode(state)?;
        let valid = state.validate();
        valid.map_err(|e| MachineError::BadState(e.to_string()))
    }

    fn restore(&mut self, state: &VcpuState) -> Result<(), MachineError> {
        let (state, time) = decode(state)?;
        self.set_state(&state)?;
        self.machine.vm.advance_time(time);
        self.core.watch_first_instruction();
        Ok(())
    }

    fn set_start(&mut self, start: &StartState) -> Result<(), MachineError> {
        let mut state = Hart::new().state();
        state.pc = start.entry;
        state.x[usize::from(SP)] = start.stack;
        state.x[usize::from(A0)] = start.args[0];
        state.x[usize::from(A1)] = start.args[1];
        self.set_state(&state)
    }

    fn first_instruction(&self) -> FirstInstruction {
        match self.core.first_instruction() {
            Some(when) => FirstInstruction::At(when),
            None if self.halted => FirstInstruction::Untold,
            None if self.core.watches_first_instruction() => FirstInstruction::NotYet,
            None => FirstInstruction::Untold,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::soft::SoftOptions;
    use crate::{GuestRam, RamLayout};
    use pageferry_addr::PAGE_SIZE;
    use pageferry_hypervisor::hart::{HartState, Interrupt, Mode};

    const HSM: u64 = 0x48_534d;
    const ENTRY: u64 = 0x3000;

    /// Hart 1 of a machine of two.
    fn second() -> SoftVcpu {
        let ram = GuestRam::new(RamLayout::for_memory(64 << 12).unwrap()).unwrap();
        let machine = SoftMachine::new(2, ram, SoftOptions::default()).unwrap();
        let cores = [0, 1].map(|id| machine.vm.create_vcpu(id).unwrap());
        let harts = Arc::new(Harts::new(cores.iter().map(VcpuCore::kick_handle)));
        let [_, core] = cores;
        SoftVcpu::new(core, &machine, &harts)
    }

    /// The state of a hart that has run for a while: no field has the value of a new hart.
    fn used(run_state: RunState) -> HartState {
        let mut x: [u64; 32] = std::array::from_fn(|i| 0x1111 * i as u64 + 7);
        x[0] = 0;
        let state = HartState {
            x,
            pc: 0x2000,
            mode: Mode::Supervisor,
            sstatus: 2 << 32 | 1 << 19 | 1 << 18 | 1 << 8 | 1 << 5 | STATUS_SIE,
            sie: 1 << 1 | 1 << 5 | 1 << 9,
            sip: 0,
            stvec: 0x2004,
            scounteren: 7,
            sscratch: 11,
            sepc: 0x2008,
            scause: 13,
            stval: 17,
            satp: 8 << 60 | 3 << 44 | 16,
            stimecmp: 19,
            run_state,
            instret: 23,
        };
        state.validate().unwrap();
        state
    }

    /// SBI 2.0, "Hart Start": the hart starts in S-mode, without translation and interrupts, with
    /// its id and the caller's value.
    #[test]
    fn a_started_hart_has_nothing_of_its_former_run() {
        // An interrupt comes between the start and its thread, which may take it before the start.
        for (mode, taken) in [(Mode::Supervisor, false), (Mode::User, true)] {
            let mut vcpu = second();
            let before = HartState {
                mode,
                ..used(RunState::Stopped)
            };
            vcpu.set_state(&before).unwrap();
            let start = Start {
                entry: ENTRY,
                opaque: 99,
            };
            vcpu.harts.start(1, start).unwrap();
            let handle = vcpu.core.kick_handle();
            handle.raise(Interrupt::Software);
            if taken {
                handle.kick();
                assert_eq!(vcpu.core.run(), hypervisor::Exit::Kicked);
            }
            assert!(vcpu.take_start());
            let mut expected = HartState {
                pc: ENTRY,
                instret: before.instret,
                sip: 1 << Interrupt::Software as u32,
                ..Hart::new().state()
            };
            expected.x[10] = 1;
            expected.x[11] = 99;
            assert_eq!(vcpu.core.state(), expected, "{mode:?}");
            assert_eq!(expected.run_state, RunState::Started);
        }
    }

    /// SBI 2.0, "Hart Suspend", non-retentive: the hart resumes in the state of a start.
    #[test]
    fn a_hart_resumes_at_an_address_without_translation_and_interrupts() {
        let mut vcpu = second();
        vcpu.set_state(&used(RunState::Started)).unwrap();
        let call = [0x8000_0000, ENTRY, 98, 0, 0, 0, 3, HSM];
        assert_eq!(vcpu.call(call), None);
        let state = vcpu.core.state();
        assert_eq!((state.pc, state.mode), (ENTRY, Mode::Supervisor));
        assert_eq!((state.satp, state.sstatus & STATUS_SIE), (0, 0));
        assert_eq!((state.x[10], state.x[11]), (1, 98));
        assert_eq!(state.run_state, RunState::Suspended);
        // It may leave the other registers undefined. `sie` decides what resumes it.
        assert_eq!(state.sie, used(RunState::Started).sie);
    }

    /// A started hart finds no translation and no code of its former run.
    #[test]
    fn a_started_hart_reaches_what_its_own_tables_say() {
        let mut vcpu = second();
        let ram = Arc::clone(&vcpu.machine.ram);
        let put = |at: u64, value: u64| ram.try_write(Gpa(at), &value.to_le_bytes()).unwrap();
        let code = |at: u64, words: &[u32]| {
            for (i, word) in (0..).zip(words) {
                ram.try_write(Gpa(at + 4 * i), &word.to_le_bytes()).unwrap();
            }
        };
        let doorbell = crate::DOORBELL_GPA;
        // ld a0, 8(a1); sd a0, 0(a2), which is the doorbell.
        let ring = [0x0085_b503, 0x00a6_3023];
        // csrw satp, a3
        const ENABLE: u32 = 0x1806_9073;
        // Sv39: page 16 is the root. Page 0 is at page 5, page 3 at page 6, and the doorbell's GiB
        // at itself.
        let giga = doorbell.0 >> 30;
        for (table, index, entry) in [
            (16, 0, 17 << 10 | 1),
            (16, giga, giga << 28 | 0xcf),
            (17, 0, 18 << 10 | 1),
            (18, 0, 5 << 10 | 0xcf),
            (18, 3, 6 << 10 | 0xcf),
        ] {
            put(table * PAGE_SIZE + index * 8, entry);
        }
        for (page, offset, value) in [(0, 8, 1), (5, 8, 39), (7, 8, 40), (7, 16, 41)] {
            put(page * PAGE_SIZE + offset, value);
        }
        code(ENTRY, &ring);
        code(ENTRY + 8, &[ENABLE]);
        code(6 * PAGE_SIZE + 12, &ring);
        let rang = |value| Exit::MmioWrite {
            gpa: doorbell,
            value,
            size: 8,
        };
        let mut state = used(RunState::Started);
        (state.pc, state.sie, state.stimecmp) = (ENTRY + 12, 0, u64::MAX);
        (state.x[11], state.x[12]) = (0, doorbell.0);
        // As after a start, so that both runs have the same view.
        state.sstatus = Hart::new().state().sstatus;
        vcpu.set_state(&state).unwrap();
        assert_eq!(vcpu.run().unwrap(), rang(39));
        vcpu.core.hart_mut().set_run_state(RunState::Stopped);
        vcpu.tell();
        // Meanwhile page 0 comes to page 7, and the code loads from 16(a1). The hart that starts
        // needs no fence to see either.
        put(18 * PAGE_SIZE, 7 << 10 | 0xcf);
        code(6 * PAGE_SIZE + 12, &[0x0105_b503]);
        let start = Start {
            entry: ENTRY,
            opaque: 0,
        };
        vcpu.harts.start(1, start).unwrap();
        assert!(vcpu.take_start());
        vcpu.core.hart_mut().set_x(12, doorbell.0);
        vcpu.core.hart_mut().set_x(13, state.satp);
        assert_eq!(vcpu.run().unwrap(), rang(1), "without translation");
        assert_eq!(
            vcpu.run().unwrap(),
            rang(41),
            "by the tables and code of now"
        );
    }
}
