//! The instructions that leave the interpreter's loop, and accesses that the bus refused there.

use super::bus::{Access, Bus, BusFault, Reserved};
use super::csr::{Cause, Mode, NoCsr, STIMECMP};
use super::decode::{funct3, funct5, imm_b, imm_j};
use super::exit::HartExit;
use super::int::{AmoInt, AmoOp, GuestInt as _};
use super::op::{Kind, Op, SINK};
use super::paging::ASID_BITS;
use super::sync::{Ordering, fence};
use super::{Hart, MmioLoad, Reservation};
use pageferry_addr::first_access;

/// The outcome of one instruction.
pub(super) enum Step {
    /// It is retired; the next one follows.
    Next,
    /// It is retired; the instruction at this address follows.
    Jump(u64),
    /// It raises an exception, with this `stval`.
    Trap(Cause, u64),
    /// It leaves the guest and is retired.
    ExitAfter(HartExit),
    /// It leaves the guest, is not counted, and is not repeated.
    ExitUncounted(HartExit),
    /// It leaves the guest and is repeated at the next entry.
    ExitBefore(HartExit),
}

impl Hart {
    /// Executes `op`, which is at `self.pc`. `self.instret` does not count it yet.
    pub(super) fn slow<B: Bus>(&mut self, bus: &mut B, op: Op) -> Step {
        let raw = op.instruction();
        match op.kind {
            Kind::OddJump => self.odd_jump(op),
            Kind::Fence => {
                guest_fence(raw);
                Step::Next
            }
            Kind::FenceI => {
                self.code.fence();
                Step::Next
            }
            Kind::AtomicW => self.atomic::<u32, B>(bus, op),
            Kind::AtomicD => self.atomic::<u64, B>(bus, op),
            Kind::Csr => self.csr(bus, op).unwrap_or_else(|NoCsr| illegal(raw)),
            Kind::Ecall => match self.csrs.mode {
                Mode::User => Step::Trap(Cause::EcallFromUser, 0),
                Mode::Supervisor => {
                    let args = core::array::from_fn(|i| self.x[10 + i as u8]);
                    Step::ExitUncounted(HartExit::Ecall { args })
                }
            },
            Kind::Ebreak => Step::Trap(Cause::Breakpoint, self.pc),
            Kind::Sret | Kind::Wfi | Kind::SfenceVma if self.csrs.mode == Mode::User => {
                illegal(raw)
            }
            Kind::Sret => Step::Jump(self.csrs.sret()),
            Kind::Wfi => {
                self.read_clock(bus);
                if self.csrs.waking() {
                    Step::Next
                } else {
                    Step::ExitAfter(HartExit::Halted)
                }
            }
            Kind::SfenceVma => {
                // x0 as an operand means all addresses, or all address spaces.
                let address = (op.rs1 != 0).then(|| self.x[op.rs1]);
                let asid = (op.rs2 != 0).then(|| self.x[op.rs2] as u16 & ((1 << ASID_BITS) - 1));
                // Walks after the fence see the stores before it.
                fence(Ordering::SeqCst);
                bus.fence_translations(address, asid);
                self.code.forget_translations();
                Step::Next
            }
            _ => illegal(raw),
        }
    }

    /// JAL or a branch whose target is not a multiple of 4. A taken jump raises the exception at
    /// its own address, and does not write the link register.
    fn odd_jump(&self, op: Op) -> Step {
        let raw = op.instruction();
        let is_jal = raw & 0x7f == 0x6f;
        let (a, b) = (self.x[op.rs1], self.x[op.rs2]);
        let taken = is_jal
            || match funct3(raw) {
                0 => a == b,
                1 => a != b,
                4 => (a as i64) < b as i64,
                5 => a as i64 >= b as i64,
                6 => a < b,
                _ => a >= b,
            };
        if !taken {
            return Step::Next;
        }
        let distance = if is_jal { imm_j(raw) } else { imm_b(raw) };
        Step::Trap(
            Cause::InstructionMisaligned,
            self.pc.wrapping_add(distance as i64 as u64),
        )
    }

    fn csr<B: Bus>(&mut self, bus: &mut B, op: Op) -> Result<Step, NoCsr> {
        let raw = op.instruction();
        let number = raw >> 20;
        let operand = if funct3(raw) & 4 != 0 {
            u64::from(op.rs1)
        } else {
            self.x[op.rs1]
        };
        let (is_swap, clears) = (funct3(raw) & 3 == 1, funct3(raw) & 3 == 3);
        // CSRRS and CSRRC with x0 or an immediate of 0 only read. CSRRW to x0 only writes.
        let (reads, writes) = (!is_swap || op.rd != SINK, is_swap || op.rs1 != 0);
        self.csrs.check_mode(number)?;
        let old = if reads {
            self.csrs.read(number, self.instret, || bus.time())?
        } else {
            0
        };
        if writes {
            let new = match (is_swap, clears) {
                (true, _) => operand,
                (_, true) => old & !operand,
                _ => old | operand,
            };
            let levels = self.csrs.satp.levels();
            self.csrs.write(number, new)?;
            if self.csrs.satp.levels() != levels {
                self.code.forget_translations();
            }
            if number == STIMECMP {
                self.read_clock(bus);
            }
        }
        self.x[op.rd] = old;
        Ok(Step::Next)
    }

    fn atomic<T: AmoInt, B: Bus>(&mut self, bus: &mut B, op: Op) -> Step {
        let function = op.instruction() >> 27;
        let address = self.x[op.rs1];
        let operand = T::truncate(self.x[op.rs2]);
        let access = if function == funct5::LR {
            Access::Load
        } else {
            Access::Store
        };
        if !address.is_multiple_of(T::BYTES) {
            return match access {
                Access::Load => Step::Trap(Cause::LoadMisaligned, address),
                _ => Step::Trap(Cause::StoreMisaligned, address),
            };
        }
        let amo = match function {
            funct5::LR => {
                return match bus.load_reserved::<T>(address) {
                    Ok(Reserved {
                        value,
                        version,
                        place,
                    }) => {
                        self.reservation = Some(Reservation {
                            address,
                            size: T::BYTES,
                            value: value.to_u64(),
                            version,
                            place,
                        });
                        self.x[op.rd] = sign_extend(value);
                        Step::Next
                    }
                    Err(fault) => refused(fault, access),
                };
            }
            funct5::SC => {
                let stored = match self.reservation {
                    Some(held) if held.address == address && held.size == T::BYTES => {
                        let reserved = Reserved {
                            value: T::truncate(held.value),
                            version: held.version,
                            place: held.place,
                        };
                        match bus.store_conditional::<T>(address, reserved, operand) {
                            Ok(stored) => stored,
                            Err(fault) => return refused(fault, access),
                        }
                    }
                    _ => false,
                };
                self.reservation = None;
                self.x[op.rd] = u64::from(!stored);
                return Step::Next;
            }
            funct5::SWAP => AmoOp::Swap,
            funct5::ADD => AmoOp::Add,
            funct5::XOR => AmoOp::Xor,
            funct5::AND => AmoOp::And,
            funct5::OR => AmoOp::Or,
            funct5::MIN => AmoOp::Min,
            funct5::MAX => AmoOp::Max,
            funct5::MINU => AmoOp::MinU,
            funct5::MAXU => AmoOp::MaxU,
            _ => return illegal(op.instruction()),
        };
        match bus.amo::<T>(address, amo, operand) {
            Ok(old) => {
                self.x[op.rd] = sign_extend(old);
                Step::Next
            }
            Err(fault) => refused(fault, access),
        }
    }

    /// Completes the load or store `op`, which the bus refused with `fault`.
    pub(super) fn memory<B: Bus>(&mut self, bus: &mut B, op: Op, fault: BusFault) -> Step {
        let address = self.x[op.rs1].wrapping_add(op.imm as i64 as u64);
        let (access, size) = kind_of_access(op.kind);
        match (fault, access) {
            (BusFault::Misaligned, Access::Load) => match load_bytes(bus, address, size) {
                Ok(value) => {
                    self.x[op.rd] = extend(op.kind, value);
                    Step::Next
                }
                Err(fault) => refused(fault, access),
            },
            (BusFault::Misaligned, _) => {
                let bytes = self.x[op.rs2].to_le_bytes();
                match bus.store_bytes(address, &bytes[..usize::from(size)]) {
                    Ok(()) => Step::Next,
                    Err(fault) => refused(fault, access),
                }
            }
            (BusFault::Mmio { gpa, .. }, Access::Load) => {
                self.x[op.rd] = extend(op.kind, u64::MAX);
                self.mmio_load = Some(MmioLoad {
                    rd: op.rd,
                    kind: op.kind,
                });
                Step::ExitAfter(HartExit::MmioLoad { gpa, size })
            }
            (BusFault::Mmio { gpa, .. }, _) => {
                let value = self.x[op.rs2] & (u64::MAX >> (64 - 8 * u32::from(size)));
                Step::ExitAfter(HartExit::MmioStore { gpa, size, value })
            }
            (fault, _) => refused(fault, access),
        }
    }
}

/// The access of a load or store `kind`, and its number of bytes.
pub(super) const fn kind_of_access(kind: Kind) -> (Access, u8) {
    match kind {
        Kind::Lb | Kind::Lbu => (Access::Load, 1),
        Kind::Lh | Kind::Lhu => (Access::Load, 2),
        Kind::Lw | Kind::Lwu => (Access::Load, 4),
        Kind::Ld => (Access::Load, 8),
        Kind::Sb => (Access::Store, 1),
        Kind::Sh => (Access::Store, 2),
        Kind::Sw => (Access::Store, 4),
        _ => (Access::Store, 8),
    }
}

/// The register value after a load of `kind` that read `value`.
pub(super) const fn extend(kind: Kind, value: u64) -> u64 {
    match kind {
        Kind::Lb => value as i8 as i64 as u64,
        Kind::Lh => value as i16 as i64 as u64,
        Kind::Lw => value as i32 as i64 as u64,
        Kind::Lbu => value as u8 as u64,
        Kind::Lhu => value as u16 as u64,
        Kind::Lwu => value as u32 as u64,
        _ => value,
    }
}

fn sign_extend<T: AmoInt>(value: T) -> u64 {
    let shift = 64 - 8 * T::BYTES as u32;
    ((value.to_u64() << shift) as i64 >> shift) as u64
}

/// A misaligned load, by accesses that are naturally aligned. A fault in between has no effect.
fn load_bytes<B: Bus>(bus: &mut B, address: u64, size: u8) -> Result<u64, BusFault> {
    let size = u64::from(size);
    let (mut value, mut done) = (0, 0);
    while done < size {
        let at = address.wrapping_add(done);
        let bytes = first_access(at, size - done);
        let part = match bytes {
            1 => bus.load::<u8>(at)?.to_u64(),
            2 => bus.load::<u16>(at)?.to_u64(),
            _ => bus.load::<u32>(at)?.to_u64(),
        };
        value |= part << (8 * done);
        done += bytes;
    }
    Ok(value)
}

fn illegal(raw: u32) -> Step {
    // stval holds the instruction. A 16-bit encoding has only 16 bits.
    Step::Trap(
        Cause::Illegal,
        u64::from(if raw & 3 == 3 { raw } else { raw & 0xffff }),
    )
}

/// The outcome of a refused access that the hart neither splits nor lets the VMM emulate. Atomics,
/// misaligned accesses and fetches in MMIO are access faults.
pub(super) fn refused(fault: BusFault, access: Access) -> Step {
    match fault {
        BusFault::Requested => Step::ExitBefore(HartExit::Requested),
        BusFault::Memory(fault) => Step::ExitBefore(HartExit::MemoryFault { fault, access }),
        BusFault::Mmio { address, .. } | BusFault::Access { address } => {
            let cause = match access {
                Access::Fetch => Cause::InstructionAccess,
                Access::Load => Cause::LoadAccess,
                Access::Store => Cause::StoreAccess,
            };
            Step::Trap(cause, address)
        }
        BusFault::Page { address } => {
            let cause = match access {
                Access::Fetch => Cause::InstructionPage,
                Access::Load => Cause::LoadPage,
                Access::Store => Cause::StorePage,
            };
            Step::Trap(cause, address)
        }
        // The hart never calls this for an access that can be misaligned.
        BusFault::Misaligned => unreachable!("a bus reported an aligned access as misaligned"),
    }
}

/// FENCE, by a host fence that is at least as strong.
///
/// Guest accesses are relaxed atomics. Between them,
/// - an acquire fence orders earlier loads before all later accesses;
/// - a release fence orders all earlier accesses before later stores;
/// - only a sequentially consistent fence orders earlier stores before later loads.
fn guest_fence(raw: u32) {
    let [reads_before, writes_before] = [raw >> 24 & 0b1010, raw >> 24 & 0b0101];
    let [reads_after, writes_after] = [raw >> 20 & 0b1010, raw >> 20 & 0b0101];
    // FENCE.TSO orders everything but earlier stores before later loads.
    let is_tso = raw >> 28 == 8;
    if reads_before | writes_before == 0 || reads_after | writes_after == 0 {
        // A hint (PAUSE is one).
    } else if writes_before != 0 && reads_after != 0 && !is_tso {
        fence(Ordering::SeqCst);
    } else {
        fence(Ordering::AcqRel);
    }
}
