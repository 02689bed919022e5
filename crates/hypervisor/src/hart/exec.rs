//! The interpreter's loop: the frequent instructions, within one code page.
//!
//! The loop keeps an index into the page's decoded instructions. It does not count retired
//! instructions one by one: in straight-line code, the index grows by one an instruction. A taken
//! jump only corrects the difference between index and count.
//!
//! The budget is therefore a bound of the index, and exact. It costs nothing, because the loop
//! checks such a bound for the end of the page anyway.

use super::alu;
use super::bus::{Bus, BusFault, PAGE_WORDS};
use super::code::CodePage;
use super::decode::decode;
use super::int::GuestInt;
use super::op::{Kind, Op};
use super::regs::Regs;
use super::sync::{AtomicU32, Ordering};
use pageferry_addr::{PAGE_MASK, PAGE_SIZE};

/// The state in which the loop was left.
pub(super) struct Left {
    /// The next instruction to execute. For every reason but [`Leave::Jump`], it is the
    /// instruction that stopped the loop.
    pub(super) pc: u64,
    /// The number of retired instructions.
    pub(super) retired: u64,
    pub(super) leave: Leave,
}

/// The reason for which the loop was left.
pub(super) enum Leave {
    /// The code continues in another page, or the budget is used up, or the request word is set.
    Jump,
    /// The loop does not implement this instruction.
    Slow(Op),
    /// The bus refused this load or store.
    Memory(Op, BusFault),
    /// A JALR to this address, which is not a multiple of 4.
    OddTarget(u64),
}

/// Executes at most `budget` (at least 1) instructions from `pc`, which lies in `page`.
#[inline(never)]
pub(super) fn run_page<B: Bus>(
    x: &mut Regs,
    page: &mut CodePage,
    bus: &mut B,
    request: &AtomicU32,
    pc: u64,
    budget: u64,
) -> Left {
    let base = pc & !PAGE_MASK;
    let mut idx = ((pc & PAGE_MASK) >> 2) as usize;
    // Retired instructions are `idx - origin`, modulo 2^64.
    let mut origin = idx;
    // Below half the range, so that a signed comparison of `origin + budget` is right.
    let budget = budget.min(i64::MAX as u64 / 2) as usize;
    let bound =
        |origin: usize| (origin.wrapping_add(budget) as isize).min(PAGE_WORDS as isize) as usize;
    let mut end = bound(origin);

    macro_rules! leave {
        ($leave:expr) => {
            return Left {
                pc: base.wrapping_add((idx as u64).wrapping_mul(4)),
                retired: idx.wrapping_sub(origin) as u64,
                leave: $leave,
            }
        };
    }
    macro_rules! pc {
        () => {
            base + idx as u64 * 4
        };
    }
    // Continues at index `target`, which may lie outside this page.
    macro_rules! jump {
        ($target:expr) => {{
            let target: usize = $target;
            origin = origin.wrapping_add(target.wrapping_sub(idx).wrapping_sub(1));
            idx = target;
            if target >= PAGE_WORDS || request.load(Ordering::Relaxed) != 0 {
                leave!(Leave::Jump);
            }
            end = bound(origin);
            continue;
        }};
    }
    macro_rules! branch {
        ($op:ident, $taken:expr) => {
            if $taken {
                jump!(idx.wrapping_add($op.imm as isize as usize));
            }
        };
    }
    macro_rules! load {
        ($op:ident, $int:ty, $extend:ty) => {
            match bus.load::<$int>(x[$op.rs1].wrapping_add($op.imm as i64 as u64)) {
                Ok(value) => x[$op.rd] = value as $extend as i64 as u64,
                Err(fault) => leave!(Leave::Memory($op, fault)),
            }
        };
    }
    macro_rules! store {
        ($op:ident, $int:ty) => {
            match bus.store::<$int>(
                x[$op.rs1].wrapping_add($op.imm as i64 as u64),
                <$int>::truncate(x[$op.rs2]),
            ) {
                Ok(()) => {}
                Err(fault) => leave!(Leave::Memory($op, fault)),
            }
        };
    }
    macro_rules! imm {
        ($op:ident, |$a:ident, $b:ident| $result:expr) => {{
            let ($a, $b) = (x[$op.rs1], $op.imm as i64 as u64);
            x[$op.rd] = $result;
        }};
    }
    macro_rules! reg {
        ($op:ident, |$a:ident, $b:ident| $result:expr) => {{
            let ($a, $b) = (x[$op.rs1], x[$op.rs2]);
            x[$op.rd] = $result;
        }};
    }

    loop {
        if idx >= end {
            leave!(Leave::Jump);
        }
        let op = page[idx % PAGE_WORDS];
        match op.kind {
            Kind::Addi => imm!(op, |a, b| a.wrapping_add(b)),
            Kind::Slti => imm!(op, |a, b| u64::from((a as i64) < b as i64)),
            Kind::Sltiu => imm!(op, |a, b| u64::from(a < b)),
            Kind::Xori => imm!(op, |a, b| a ^ b),
            Kind::Ori => imm!(op, |a, b| a | b),
            Kind::Andi => imm!(op, |a, b| a & b),
            Kind::Slli => imm!(op, |a, b| a.wrapping_shl(b as u32)),
            Kind::Srli => imm!(op, |a, b| a.wrapping_shr(b as u32)),
            Kind::Srai => imm!(op, |a, b| (a as i64).wrapping_shr(b as u32) as u64),
            Kind::Addiw => imm!(op, |a, b| alu::word(a.wrapping_add(b) as u32)),
            Kind::Slliw => imm!(op, |a, b| alu::word((a as u32).wrapping_shl(b as u32))),
            Kind::Srliw => imm!(op, |a, b| alu::word((a as u32).wrapping_shr(b as u32))),
            Kind::Sraiw => imm!(op, |a, b| alu::word(
                (a as i32).wrapping_shr(b as u32) as u32
            )),
            Kind::Lui => x[op.rd] = op.imm as i64 as u64,
            Kind::Auipc => x[op.rd] = pc!().wrapping_add(op.imm as i64 as u64),

            Kind::Add => reg!(op, |a, b| a.wrapping_add(b)),
            Kind::Sub => reg!(op, |a, b| a.wrapping_sub(b)),
            // Like the ISA's shifts, Rust's wrapping shifts take the amount modulo the width.
            Kind::Sll => reg!(op, |a, b| a.wrapping_shl(b as u32)),
            Kind::Slt => reg!(op, |a, b| u64::from((a as i64) < b as i64)),
            Kind::Sltu => reg!(op, |a, b| u64::from(a < b)),
            Kind::Xor => reg!(op, |a, b| a ^ b),
            Kind::Srl => reg!(op, |a, b| a.wrapping_shr(b as u32)),
            Kind::Sra => reg!(op, |a, b| (a as i64).wrapping_shr(b as u32) as u64),
            Kind::Or => reg!(op, |a, b| a | b),
            Kind::And => reg!(op, |a, b| a & b),
            Kind::Addw => reg!(op, |a, b| alu::word((a as u32).wrapping_add(b as u32))),
            Kind::Subw => reg!(op, |a, b| alu::word((a as u32).wrapping_sub(b as u32))),
            Kind::Sllw => reg!(op, |a, b| alu::word((a as u32).wrapping_shl(b as u32))),
            Kind::Srlw => reg!(op, |a, b| alu::word((a as u32).wrapping_shr(b as u32))),
            Kind::Sraw => reg!(op, |a, b| alu::word(
                (a as i32).wrapping_shr(b as u32) as u32
            )),

            Kind::Mul => reg!(op, |a, b| a.wrapping_mul(b)),
            Kind::Mulh => reg!(op, |a, b| alu::mulh(a, b)),
            Kind::Mulhsu => reg!(op, |a, b| alu::mulhsu(a, b)),
            Kind::Mulhu => reg!(op, |a, b| alu::mulhu(a, b)),
            Kind::Div => reg!(op, |a, b| alu::div(a, b)),
            Kind::Divu => reg!(op, |a, b| alu::divu(a, b)),
            Kind::Rem => reg!(op, |a, b| alu::rem(a, b)),
            Kind::Remu => reg!(op, |a, b| alu::remu(a, b)),
            Kind::Mulw => reg!(op, |a, b| alu::word((a as u32).wrapping_mul(b as u32))),
            Kind::Divw => reg!(op, |a, b| alu::divw(a, b)),
            Kind::Divuw => reg!(op, |a, b| alu::divuw(a, b)),
            Kind::Remw => reg!(op, |a, b| alu::remw(a, b)),
            Kind::Remuw => reg!(op, |a, b| alu::remuw(a, b)),

            Kind::Lb => load!(op, u8, i8),
            Kind::Lh => load!(op, u16, i16),
            Kind::Lw => load!(op, u32, i32),
            Kind::Ld => load!(op, u64, i64),
            Kind::Lbu => load!(op, u8, u8),
            Kind::Lhu => load!(op, u16, u16),
            Kind::Lwu => load!(op, u32, u32),
            Kind::Sb => store!(op, u8),
            Kind::Sh => store!(op, u16),
            Kind::Sw => store!(op, u32),
            Kind::Sd => store!(op, u64),

            Kind::Beq => branch!(op, x[op.rs1] == x[op.rs2]),
            Kind::Bne => branch!(op, x[op.rs1] != x[op.rs2]),
            Kind::Blt => branch!(op, (x[op.rs1] as i64) < x[op.rs2] as i64),
            Kind::Bge => branch!(op, x[op.rs1] as i64 >= x[op.rs2] as i64),
            Kind::Bltu => branch!(op, x[op.rs1] < x[op.rs2]),
            Kind::Bgeu => branch!(op, x[op.rs1] >= x[op.rs2]),
            Kind::Jal => {
                x[op.rd] = pc!().wrapping_add(4);
                jump!(idx.wrapping_add(op.imm as isize as usize));
            }
            Kind::Jalr => {
                let target = x[op.rs1].wrapping_add(op.imm as i64 as u64) & !1;
                if target & 2 != 0 {
                    leave!(Leave::OddTarget(target));
                }
                x[op.rd] = pc!().wrapping_add(4);
                if target.wrapping_sub(base) >= PAGE_SIZE {
                    return Left {
                        pc: target,
                        retired: idx.wrapping_sub(origin).wrapping_add(1) as u64,
                        leave: Leave::Jump,
                    };
                }
                jump!(((target & PAGE_MASK) >> 2) as usize);
            }

            Kind::Undecoded => {
                page[idx % PAGE_WORDS] = decode(op.instruction());
                continue;
            }
            Kind::Illegal
            | Kind::OddJump
            | Kind::Fence
            | Kind::FenceI
            | Kind::AtomicW
            | Kind::AtomicD
            | Kind::Csr
            | Kind::Ecall
            | Kind::Ebreak
            | Kind::Sret
            | Kind::Wfi
            | Kind::SfenceVma => leave!(Leave::Slow(op)),
        }
        idx += 1;
    }
}
