//! One RV64IMA_Zicsr_Zifencei_Zicntr hart in VS-mode: the vCPU's registers and its interpreter.
//!
//! **Guarantee.** [`Hart::run`] executes guest code exactly as the RISC-V manuals specify (volume
//! I, RV64I 2.1, M, A, Zicsr, Zifencei, Zicntr; volume II, supervisor level with Sv39, Sv48 and
//! Svade). It counts every retired instruction, and returns only between instructions. It checks
//! the request word at the end of every code page and at every taken jump. It also does so after
//! every instruction that it executes outside its loop.
//!
//! **Mechanism.** The hart decodes each instruction once into an 8-byte operation, and a loop jumps
//! by the operation's kind. Memory is a [`Bus`], a type parameter, so that a TLB hit is a part of
//! that loop. Rare instructions leave the loop for plain code. The hart tells the bus its [`View`],
//! and the bus translates; [`walk`] is the walk through the guest's tables.
//!
//! **LR and SC.** The hart remembers the address, width and value of the last LR. An SC to another
//! address or of another width fails. Every SC ends the reservation. The bus decides whether
//! another hart has stored to the reserved bytes: see [`Bus::store_conditional`] and
//! [`Reservations`].
//!
//! **Neighbours.** Above: the vCPU, which owns a hart and lends it a TLB. The hart knows no tables,
//! slots or page states. It only learns that an access worked, or why not.

mod alu;
mod bus;
mod code;
mod csr;
mod decode;
mod exec;
mod exit;
mod int;
mod op;
mod paging;
mod regs;
mod reservations;
mod run;
mod slow;
mod state;
mod sync;

pub use bus::{Access, Bus, BusFault, MemoryFault, PAGE_WORDS, Reserved};
pub use csr::{Interrupt, Mode, NO_DEADLINE, TIMEBASE_HZ};
pub use exit::HartExit;
pub use int::{AmoInt, AmoOp, GuestInt};
pub use paging::{ASID_BITS, Leaf, Rights, Satp, View, walk};
pub use reservations::{LrSc, Reservations};
pub use state::{HartState, RunState, StateError};

use code::CodeCache;
use core::fmt;
use csr::{Csrs, SSTATUS_UXL, SSTATUS_WRITABLE};
use op::Kind;
use regs::Regs;

/// The reservation of the last LR, until an SC.
#[derive(Clone, Copy)]
struct Reservation {
    address: u64,
    size: u64,
    value: u64,
    version: u64,
    place: u64,
}

/// The MMIO load for which the hart last left the guest.
#[derive(Clone, Copy)]
struct MmioLoad {
    rd: u8,
    kind: Kind,
}

/// One hart.
///
/// A hart takes about 7 KiB, plus 12 KiB for each of at most 1024 pages of decoded code.
pub struct Hart {
    x: Regs,
    pc: u64,
    csrs: Csrs,
    instret: u64,
    reservation: Option<Reservation>,
    mmio_load: Option<MmioLoad>,
    code: CodeCache,
    /// Whether the bus may hold translations from before the last [`Hart::set_state`].
    restored: bool,
    run_state: RunState,
    /// The number of instructions until the clock is read next.
    poll_in: u64,
}

impl Default for Hart {
    fn default() -> Self {
        Self::new()
    }
}

impl Hart {
    /// A hart in VS-mode with all registers 0.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            x: Regs::new(),
            pc: 0,
            csrs: Csrs::new(),
            instret: 0,
            reservation: None,
            mmio_load: None,
            code: CodeCache::new(),
            restored: false,
            run_state: RunState::Started,
            poll_in: u64::MAX,
        }
    }

    /// Register `index`.
    ///
    /// # Panics
    /// If `index` is not below 32.
    #[must_use]
    pub fn x(&self, index: u8) -> u64 {
        assert!(index < 32, "there is no x{index}");
        self.x[index]
    }

    /// Sets register `index`. A write to `x0` has no effect.
    ///
    /// # Panics
    /// If `index` is not below 32.
    pub fn set_x(&mut self, index: u8, value: u64) {
        assert!(index < 32, "there is no x{index}");
        self.x.set(index, value);
    }

    /// The address of the next instruction.
    #[must_use]
    pub const fn pc(&self) -> u64 {
        self.pc
    }

    /// Sets the address of the next instruction.
    ///
    /// # Errors
    /// If it is not a multiple of 4.
    pub const fn set_pc(&mut self, pc: u64) -> Result<(), StateError> {
        if pc & 3 != 0 {
            return Err(StateError::Pc(pc));
        }
        self.pc = pc;
        Ok(())
    }

    /// The number of retired instructions: the `instret` CSR.
    #[must_use]
    pub const fn instret(&self) -> u64 {
        self.instret
    }

    /// Raises or lowers an interrupt. The guest takes it at the next entry, if it has enabled it.
    pub const fn set_interrupt(&mut self, interrupt: Interrupt, pending: bool) {
        let bit = 1 << interrupt as u32;
        if pending {
            self.csrs.sip |= bit;
        } else {
            self.csrs.sip &= !bit;
        }
    }

    /// Sets the timer, as SBI's `set_timer` asks: STIP is pending once `time` reaches `deadline`,
    /// and not before. [`NO_DEADLINE`] switches the timer off. This is the guest's `stimecmp`.
    pub const fn set_timer(&mut self, deadline: u64) {
        self.csrs.set_deadline(deadline);
    }

    /// The time of the timer, or [`NO_DEADLINE`].
    #[must_use]
    pub const fn timer(&self) -> u64 {
        self.csrs.stimecmp
    }

    /// The time at which the timer ends a WFI. `None` if it is off, due already, or not enabled in
    /// `sie`.
    #[must_use]
    pub const fn wakes_at(&self) -> Option<u64> {
        if matches!(self.run_state, RunState::Stopped) {
            return None;
        }
        self.csrs.wakes_at()
    }

    /// Whether the hart executes instructions.
    #[must_use]
    pub const fn run_state(&self) -> RunState {
        self.run_state
    }

    /// Starts, stops or suspends the hart, as SBI's HSM extension asks.
    pub const fn set_run_state(&mut self, state: RunState) {
        self.run_state = state;
    }

    /// The number of pages of decoded code, at most 1024.
    #[must_use]
    pub const fn code_pages(&self) -> usize {
        self.code.pages()
    }

    /// Compares the page of code that contains `gpa` with memory before it is next executed, and
    /// decodes again what has changed. Call it when other memory appears there, or when the VMM
    /// wrote code there that must run without the guest's FENCE.I.
    pub fn invalidate_code_page(&mut self, gpa: u64) {
        self.code.invalidate(gpa);
    }

    /// Does the same for all code. Call it after a change of memory slots or a whole TLB flush.
    ///
    /// It also drops the reservation of an LR: there may be other memory at its address now.
    pub fn invalidate_code(&mut self) {
        self.code.fence();
        self.reservation = None;
    }

    /// Compares all code with memory before it is next executed, like FENCE.I.
    pub fn fence_code(&mut self) {
        self.code.fence();
    }

    /// Forgets the translations of code. Call it with each fence that another hart requests for the
    /// translations of this one.
    pub fn forget_code_translations(&mut self) {
        self.code.forget_translations();
    }

    /// The whole architectural state.
    #[must_use]
    pub fn state(&self) -> HartState {
        let csrs = &self.csrs;
        HartState {
            x: self.x.all(),
            pc: self.pc,
            mode: csrs.mode,
            sstatus: csrs.sstatus | SSTATUS_UXL,
            sie: csrs.sie,
            sip: csrs.sip,
            stvec: csrs.stvec,
            scounteren: csrs.scounteren,
            sscratch: csrs.sscratch,
            sepc: csrs.sepc,
            scause: csrs.scause,
            stval: csrs.stval,
            satp: csrs.satp.bits(),
            stimecmp: csrs.stimecmp,
            run_state: self.run_state,
            instret: self.instret,
        }
    }

    /// Replaces the whole architectural state, and drops translations and the reservation.
    ///
    /// # Errors
    /// If no hart can be in `state`. The hart is then unchanged.
    pub fn set_state(&mut self, state: &HartState) -> Result<(), StateError> {
        state.validate()?;
        let satp = Satp::from_write(state.satp).unwrap_or_default();
        for (index, &value) in (0..).zip(&state.x) {
            self.x.set(index, value);
        }
        self.pc = state.pc;
        self.csrs = Csrs {
            mode: state.mode,
            sstatus: state.sstatus & SSTATUS_WRITABLE,
            sie: state.sie,
            sip: state.sip,
            stvec: state.stvec,
            scounteren: state.scounteren,
            sscratch: state.sscratch,
            sepc: state.sepc,
            scause: state.scause,
            stval: state.stval,
            satp,
            stimecmp: state.stimecmp,
            timer_due: false,
            view_changed: true,
        };
        self.instret = state.instret;
        self.run_state = state.run_state;
        self.reservation = None;
        self.mmio_load = None;
        self.code.fence();
        self.restored = true;
        Ok(())
    }
}

impl fmt::Debug for Hart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Hart").field(&self.state()).finish()
    }
}
