//! The control and status registers of VS-mode; trap entry and return.
//!
//! Source: The RISC-V Instruction Set Manual, volume II, chapter "Supervisor-Level ISA", version
//! 1.13. Fields that this hart fixes:
//! - `satp` implements Bare, Sv39 and Sv48, and [`ASID_BITS`](super::ASID_BITS) bits of ASID.
//! - There is no F and no V, so `FS`, `VS` and `SD` are zero.
//! - `UXL` is always 64 bits.
//! - `stimecmp` is there (Sstc). Reset and [`NO_DEADLINE`] mean that no timer is set.

use super::paging::{Satp, View};

/// Ticks a second of the `time` CSR. A device tree gives it as `timebase-frequency`.
pub const TIMEBASE_HZ: u64 = 10_000_000;

/// The value of `stimecmp` that no time reaches.
pub const NO_DEADLINE: u64 = u64::MAX;

/// Interrupts enabled in S-mode.
pub(super) const SSTATUS_SIE: u64 = 1 << 1;
const SSTATUS_SPIE: u64 = 1 << 5;
const SSTATUS_SPP: u64 = 1 << 8;
const SSTATUS_SUM: u64 = 1 << 18;
const SSTATUS_MXR: u64 = 1 << 19;
/// `sstatus.UXL` = 64 bits, its only value.
pub(super) const SSTATUS_UXL: u64 = 2 << 32;
/// The bits of `sstatus` that can change.
pub(super) const SSTATUS_WRITABLE: u64 =
    SSTATUS_SIE | SSTATUS_SPIE | SSTATUS_SPP | SSTATUS_SUM | SSTATUS_MXR;
/// SSIP, STIP, SEIP: the implemented interrupts.
pub(super) const INTERRUPTS: u64 = 1 << 1 | 1 << 5 | 1 << 9;
/// The guest can write SSIP only.
const SIP_WRITABLE: u64 = 1 << 1;
/// CY, TM, IR: the implemented counters.
pub(super) const SCOUNTEREN_WRITABLE: u64 = 7;

const SCAUSE_INTERRUPT: u64 = 1 << 63;

/// The cause of an exception: an `scause` code of the privileged manual.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Cause {
    InstructionMisaligned = 0,
    InstructionAccess = 1,
    Illegal = 2,
    Breakpoint = 3,
    LoadMisaligned = 4,
    LoadAccess = 5,
    StoreMisaligned = 6,
    StoreAccess = 7,
    EcallFromUser = 8,
    InstructionPage = 12,
    LoadPage = 13,
    StorePage = 15,
}

/// The privilege mode of the hart, as the guest sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mode {
    /// User mode (VU).
    User,
    /// Supervisor mode (VS).
    Supervisor,
}

/// An interrupt that the VMM can raise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Interrupt {
    /// SSIP: a supervisor software interrupt, such as an IPI from another hart. The guest clears
    /// it.
    Software = 1,
    /// STIP: the timer, beside the one of `stimecmp`.
    Timer = 5,
    /// SEIP: an external interrupt.
    External = 9,
}

/// The CSR does not exist in this mode, or cannot be written. The instruction is illegal.
pub(super) struct NoCsr;

pub(super) use number::STIMECMP;

/// The numbers of the CSRs.
mod number {
    pub(super) const SSTATUS: u32 = 0x100;
    pub(super) const SIE: u32 = 0x104;
    pub(super) const STVEC: u32 = 0x105;
    pub(super) const SCOUNTEREN: u32 = 0x106;
    pub(super) const SENVCFG: u32 = 0x10a;
    pub(super) const SSCRATCH: u32 = 0x140;
    pub(super) const SEPC: u32 = 0x141;
    pub(super) const SCAUSE: u32 = 0x142;
    pub(super) const STVAL: u32 = 0x143;
    pub(super) const SIP: u32 = 0x144;
    pub(in super::super) const STIMECMP: u32 = 0x14d;
    pub(super) const SATP: u32 = 0x180;
    pub(super) const CYCLE: u32 = 0xc00;
    pub(super) const TIME: u32 = 0xc01;
    pub(super) const INSTRET: u32 = 0xc02;
}

/// The CSRs and the privilege mode. Every field holds only values that the guest could read back.
#[derive(Clone, Debug)]
pub(super) struct Csrs {
    pub(super) mode: Mode,
    /// Without the constant `UXL`.
    pub(super) sstatus: u64,
    pub(super) sie: u64,
    pub(super) sip: u64,
    pub(super) stvec: u64,
    pub(super) scounteren: u64,
    pub(super) sscratch: u64,
    pub(super) sepc: u64,
    pub(super) scause: u64,
    pub(super) stval: u64,
    pub(super) satp: Satp,
    pub(super) stimecmp: u64,
    /// Whether `time` had reached `stimecmp` when the clock was last read. STIP shows it.
    pub(super) timer_due: bool,
    /// Whether the view has changed since [`Csrs::take_view`].
    pub(super) view_changed: bool,
}

impl Csrs {
    pub(super) const fn new() -> Self {
        Self {
            mode: Mode::Supervisor,
            sstatus: 0,
            sie: 0,
            sip: 0,
            stvec: 0,
            scounteren: 0,
            sscratch: 0,
            sepc: 0,
            scause: 0,
            stval: 0,
            satp: Satp::BARE,
            stimecmp: NO_DEADLINE,
            timer_due: false,
            view_changed: true,
        }
    }

    /// The view of memory, if it may have changed since the last call.
    #[inline]
    pub(super) fn take_view(&mut self) -> Option<View> {
        core::mem::take(&mut self.view_changed).then_some(View {
            satp: self.satp,
            mode: self.mode,
            sum: self.sstatus & SSTATUS_SUM != 0,
            mxr: self.sstatus & SSTATUS_MXR != 0,
        })
    }

    /// Checks that this mode may access CSR `number`: bits 9:8 of the number are the lowest
    /// allowed mode.
    pub(super) fn check_mode(&self, number: u32) -> Result<(), NoCsr> {
        let needs = number >> 8 & 3;
        let mode = match self.mode {
            Mode::User => 0,
            Mode::Supervisor => 1,
        };
        if needs > mode { Err(NoCsr) } else { Ok(()) }
    }

    /// Returns the value of CSR `number`. `instret` and `time` give the counters.
    pub(super) fn read(
        &mut self,
        number: u32,
        instret: u64,
        time: impl FnOnce() -> u64,
    ) -> Result<u64, NoCsr> {
        Ok(match number {
            number::SSTATUS => self.sstatus | SSTATUS_UXL,
            number::SIE => self.sie,
            number::SIP => {
                if self.awaits_deadline() {
                    self.see_time(time());
                }
                self.pending()
            }
            STIMECMP => self.stimecmp,
            number::STVEC => self.stvec,
            number::SCOUNTEREN => self.scounteren,
            number::SSCRATCH => self.sscratch,
            number::SEPC => self.sepc,
            number::SCAUSE => self.scause,
            number::STVAL => self.stval,
            number::SATP => self.satp.bits(),
            // FIOM is read-only zero: fences already order I/O with memory. The extensions of the
            // other bits are absent.
            number::SENVCFG => 0,
            number::CYCLE | number::TIME | number::INSTRET => {
                let enabled = self.scounteren >> (number & 3) & 1 != 0;
                if self.mode == Mode::User && !enabled {
                    return Err(NoCsr);
                }
                if number == number::TIME {
                    let now = time();
                    self.see_time(now);
                    now
                } else {
                    instret
                }
            }
            _ => return Err(NoCsr),
        })
    }

    /// Writes CSR `number`. Bits that the hart does not implement keep their values (WARL). The
    /// counters are read-only.
    pub(super) fn write(&mut self, number: u32, value: u64) -> Result<(), NoCsr> {
        match number {
            number::SSTATUS => {
                self.sstatus = value & SSTATUS_WRITABLE;
                self.view_changed = true;
            }
            number::SIE => self.sie = value & INTERRUPTS,
            number::SIP => self.sip = self.sip & !SIP_WRITABLE | value & SIP_WRITABLE,
            // Modes 2 and 3 are reserved; bit 1 is read-only zero.
            number::STVEC => self.stvec = value & !2,
            number::SCOUNTEREN => self.scounteren = value & SCOUNTEREN_WRITABLE,
            number::SSCRATCH => self.sscratch = value,
            // IALIGN is 32: the two low bits are read-only zero.
            number::SEPC => self.sepc = value & !3,
            number::SCAUSE => self.scause = value,
            number::STVAL => self.stval = value,
            STIMECMP => self.set_deadline(value),
            // A write with a mode that is not implemented has no effect.
            number::SATP => {
                if let Some(satp) = Satp::from_write(value) {
                    self.satp = satp;
                    self.view_changed = true;
                }
            }
            number::SENVCFG => {}
            _ => return Err(NoCsr),
        }
        Ok(())
    }

    /// Enters the trap handler for an exception at `pc`. Returns the handler's address.
    pub(super) fn trap(&mut self, cause: Cause, stval: u64, pc: u64) -> u64 {
        self.enter(cause as u64, stval, pc);
        self.stvec & !3
    }

    /// Whether an interrupt is pending and enabled in `sie`. Such an interrupt ends WFI even if
    /// `sstatus` masks interrupts.
    pub(super) const fn waking(&self) -> bool {
        self.pending() & self.sie != 0
    }

    /// The pending interrupts. STIP is pending if the timer is due, or if the VMM has raised it.
    const fn pending(&self) -> u64 {
        self.sip | (self.timer_due as u64) << Interrupt::Timer as u32
    }

    /// Sets `stimecmp`. The timer is not due until the clock is read.
    pub(super) const fn set_deadline(&mut self, deadline: u64) {
        self.stimecmp = deadline;
        self.timer_due = false;
    }

    /// Whether the clock will make the timer due.
    pub(super) const fn awaits_deadline(&self) -> bool {
        self.stimecmp != NO_DEADLINE && !self.timer_due
    }

    /// The deadline that ends WFI, if there is one.
    pub(super) const fn wakes_at(&self) -> Option<u64> {
        if self.awaits_deadline() && self.sie >> Interrupt::Timer as u32 & 1 != 0 {
            Some(self.stimecmp)
        } else {
            None
        }
    }

    /// Notes the time.
    pub(super) const fn see_time(&mut self, now: u64) {
        self.timer_due = now >= self.stimecmp && self.stimecmp != NO_DEADLINE;
    }

    /// Enters the handler of the interrupt that the hart has to take before the instruction at
    /// `pc`, if there is one. Returns the handler's address.
    #[inline]
    pub(super) fn interrupt(&mut self, pc: u64) -> Option<u64> {
        let taken = match self.mode {
            Mode::User => true,
            Mode::Supervisor => self.sstatus & SSTATUS_SIE != 0,
        };
        if !taken || !self.waking() {
            return None;
        }
        let pending = self.pending() & self.sie;
        // The manual's priority order of simultaneous interrupts.
        let code = [Interrupt::External, Interrupt::Software, Interrupt::Timer]
            .into_iter()
            .map(|interrupt| interrupt as u64)
            .find(|code| pending >> code & 1 != 0)?;
        self.enter(SCAUSE_INTERRUPT | code, 0, pc);
        let vectored = self.stvec & 1 != 0;
        Some((self.stvec & !3).wrapping_add(if vectored { 4 * code } else { 0 }))
    }

    fn enter(&mut self, scause: u64, stval: u64, pc: u64) {
        self.scause = scause;
        self.stval = stval;
        self.sepc = pc;
        let mut status = self.sstatus & !(SSTATUS_SIE | SSTATUS_SPIE | SSTATUS_SPP);
        if self.sstatus & SSTATUS_SIE != 0 {
            status |= SSTATUS_SPIE;
        }
        if self.mode == Mode::Supervisor {
            status |= SSTATUS_SPP;
        }
        self.sstatus = status;
        self.mode = Mode::Supervisor;
        self.view_changed = true;
    }

    /// SRET. Returns the target address.
    pub(super) fn sret(&mut self) -> u64 {
        self.mode = if self.sstatus & SSTATUS_SPP != 0 {
            Mode::Supervisor
        } else {
            Mode::User
        };
        let mut status = self.sstatus & !(SSTATUS_SIE | SSTATUS_SPP) | SSTATUS_SPIE;
        if self.sstatus & SSTATUS_SPIE != 0 {
            status |= SSTATUS_SIE;
        }
        self.sstatus = status;
        self.view_changed = true;
        self.sepc
    }
}
