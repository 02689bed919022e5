//! A hart's whole state, in the form that moves between processes.

use super::csr::{INTERRUPTS, Mode, SCOUNTEREN_WRITABLE, SSTATUS_UXL, SSTATUS_WRITABLE};
use super::paging::Satp;
use thiserror::Error;

/// The state of a hart that a guest can observe, as plain values.
///
/// It leaves out:
/// - the reservation of an LR, which a move drops (the ISA lets an SC fail without reason);
/// - `cycle`, which equals `instret` (this hart takes one cycle an instruction);
/// - `time`, which belongs to the VM;
/// - `senvcfg`, which is always 0;
/// - cached translations, which a hart may forget at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HartState {
    /// The integer registers; `x[0]` is 0.
    pub x: [u64; 32],
    /// The address of the next instruction, a multiple of 4.
    pub pc: u64,
    /// The privilege mode.
    pub mode: Mode,
    /// The value that the guest reads, `UXL` included.
    pub sstatus: u64,
    /// Interrupts enabled.
    pub sie: u64,
    /// Interrupts pending, without the timer of `stimecmp`.
    pub sip: u64,
    /// Trap vector.
    pub stvec: u64,
    /// Counters that VU-mode may read.
    pub scounteren: u64,
    /// Scratch register.
    pub sscratch: u64,
    /// The address of the last trap, a multiple of 4.
    pub sepc: u64,
    /// The cause of the last trap.
    pub scause: u64,
    /// The address or instruction of the last trap.
    pub stval: u64,
    /// Translation mode, address space and root table; 0 without translation.
    pub satp: u64,
    /// The time of the timer, or [`NO_DEADLINE`](super::NO_DEADLINE).
    pub stimecmp: u64,
    /// Whether the hart executes instructions.
    pub run_state: RunState,
    /// The number of retired instructions.
    pub instret: u64,
}

/// Whether a hart executes instructions: the states of SBI's HSM extension that last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum RunState {
    /// It executes instructions.
    #[default]
    Started,
    /// It does not, until the VMM starts it.
    Stopped,
    /// It does not, until an interrupt is pending that `sie` enables. Then it is started.
    Suspended,
}

/// A [`HartState`] that no hart can be in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StateError {
    /// `x[0]` is not 0.
    #[error("x0 is {0:#x}, must be 0")]
    X0(u64),
    /// `pc` is not a multiple of 4.
    #[error("pc {0:#x} is not a multiple of 4")]
    Pc(u64),
    /// `satp` has a reserved mode, an ASID that is too large, or fields in Bare mode.
    #[error("satp cannot hold {0:#x}: expected 0, or mode 8 (Sv39) or 9 (Sv48) and 9 bits of ASID")]
    Satp(u64),
    /// A CSR has a value that it cannot hold.
    #[error("{name} cannot hold {value:#x}: the bits {bad:#x} are wrong")]
    Csr {
        /// The CSR's name.
        name: &'static str,
        /// The value.
        value: u64,
        /// The bits that are set but must be 0, or are 0 but must be set.
        bad: u64,
    },
}

impl HartState {
    /// Checks that a hart can be in this state.
    ///
    /// # Errors
    /// The first wrong field.
    pub fn validate(&self) -> Result<(), StateError> {
        if self.x[0] != 0 {
            return Err(StateError::X0(self.x[0]));
        }
        if !self.pc.is_multiple_of(4) {
            return Err(StateError::Pc(self.pc));
        }
        for (name, value, bad) in [
            (
                "sstatus",
                self.sstatus,
                self.sstatus & !SSTATUS_WRITABLE ^ SSTATUS_UXL,
            ),
            ("sie", self.sie, self.sie & !INTERRUPTS),
            ("sip", self.sip, self.sip & !INTERRUPTS),
            ("stvec", self.stvec, self.stvec & 2),
            (
                "scounteren",
                self.scounteren,
                self.scounteren & !SCOUNTEREN_WRITABLE,
            ),
            ("sepc", self.sepc, self.sepc & 3),
        ] {
            if bad != 0 {
                return Err(StateError::Csr { name, value, bad });
            }
        }
        match Satp::from_write(self.satp) {
            Some(satp) if satp.bits() == self.satp => Ok(()),
            _ => Err(StateError::Satp(self.satp)),
        }
    }
}
