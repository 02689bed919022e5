//! A vCPU of the soft engine.

use super::memory::alias_mapping;
use super::state::{decode, encode};
use crate::translate::Translator;
use crate::{
    Access, Exit, FirstInstruction, GuestRam, Kicker, MachineError, StartState, Vcpu, VcpuState,
};
use pageferry_hypervisor::hart::{self, Hart};
use pageferry_hypervisor::{self as hypervisor, KickHandle, SlotData, VcpuCore, Vm};
use std::sync::Arc;

/// SBI's answer to an unknown call (RISC-V SBI specification, "Binary Encoding"):
/// `SBI_ERR_NOT_SUPPORTED`.
const SBI_NOT_SUPPORTED: u64 = -2i64 as u64;
const SP: u8 = 2;
const A0: u8 = 10;
const A1: u8 = 11;

pub(super) struct SoftVcpu {
    core: VcpuCore,
    vm: Vm,
    translator: Translator<SlotData>,
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
    pub(super) fn new(core: VcpuCore, vm: Vm, ram: &GuestRam) -> Self {
        let translator = Translator::new(&vm.slot_table(), alias_mapping(ram));
        Self {
            core,
            vm,
            translator,
        }
    }
}

impl Vcpu for SoftVcpu {
    fn id(&self) -> u32 {
        self.core.id()
    }

    fn run(&mut self) -> Result<Exit, MachineError> {
        loop {
            return Ok(match self.core.run() {
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
                // Nothing completes the load, so it has returned all ones.
                hypervisor::Exit::MmioRead { gpa, size } => Exit::MmioRead { gpa, size },
                hypervisor::Exit::MmioWrite { gpa, size, value } => {
                    Exit::MmioWrite { gpa, value, size }
                }
                // There is no SBI below this guest, and SBI defines an answer for that.
                hypervisor::Exit::Ecall { .. } => {
                    self.core.hart_mut().set_x(A0, SBI_NOT_SUPPORTED);
                    self.core.hart_mut().set_x(A1, 0);
                    continue;
                }
                hypervisor::Exit::DirtyRingFull => {
                    unreachable!("this engine's VMs log into bitmaps")
                }
                hypervisor::Exit::Halted => Exit::Halted,
                hypervisor::Exit::Kicked => Exit::Kicked,
            });
        }
    }

    fn kicker(&self) -> Arc<dyn Kicker> {
        Arc::new(SoftKicker(self.core.kick_handle()))
    }

    fn save(&mut self) -> Result<VcpuState, MachineError> {
        Ok(encode(&self.core.state(), self.vm.time()))
    }

    fn check(&self, state: &VcpuState) -> Result<(), MachineError> {
        let (state, _) = decode(state)?;
        let valid = state.validate();
        valid.map_err(|e| MachineError::BadState(e.to_string()))
    }

    fn restore(&mut self, state: &VcpuState) -> Result<(), MachineError> {
        let (state, time) = decode(state)?;
        self.core
            .set_state(&state)
            .map_err(|e| MachineError::BadState(e.to_string()))?;
        self.vm.advance_time(time);
        self.core.watch_first_instruction();
        Ok(())
    }

    fn set_start(&mut self, start: &StartState) -> Result<(), MachineError> {
        let mut state = Hart::new().state();
        state.pc = start.entry;
        state.x[usize::from(SP)] = start.stack;
        state.x[usize::from(A0)] = start.args[0];
        state.x[usize::from(A1)] = start.args[1];
        self.core
            .set_state(&state)
            .map_err(|e| MachineError::BadState(e.to_string()))
    }

    fn first_instruction(&self) -> FirstInstruction {
        match self.core.first_instruction() {
            Some(when) => FirstInstruction::At(when),
            None if self.core.watches_first_instruction() => FirstInstruction::NotYet,
            None => FirstInstruction::Untold,
        }
    }
}
