//! A vCPU of the soft engine.

use super::SoftMachine;
use super::calls::{Calls, Missing};
use super::harts::{Harts, Start};
use super::memory::alias_mapping;
use super::state::{decode, encode};
use crate::translate::Translator;
use crate::{
    Access, Exit, FirstInstruction, Kicker, MachineError, Reset, ResetKind, StartState, Vcpu,
    VcpuState,
};
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
            self.harts.set(self.core.id(), now);
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
        self.harts.set(self.core.id(), state.run_state);
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
                hypervisor::Exit::MmioRead { gpa, size } => Exit::MmioRead { gpa, size },
                hypervisor::Exit::MmioWrite { gpa, size, value } => {
                    Exit::MmioWrite { gpa, value, size }
                }
                hypervisor::Exit::Ecall { args } => match self.call(args) {
                    Some(exit) => exit,
                    None => continue,
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
                hypervisor::Exit::Kicked => Exit::Kicked,
            });
        }
    }

    fn complete_mmio_read(&mut self, value: u64) {
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
