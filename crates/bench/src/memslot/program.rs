//! What the guest does, in RV64IM machine code.
//!
//! Host and guest keep in step by three doublewords of the synchronisation page: [`EXIT`] ends the
//! guest, [`SYNC`] is set by the host and cleared by the guest when it has done its part,
//! [`PASSES`] counts the mover's passes. A guest that waits looks [`LOOKS`] times and then waits
//! for an interrupt, upon which its thread yields.
//!
//! Registers: a0 synchronisation page, a1 first address, a2 middle or end, a3 end, a4 stride, s0
//! and s1 the values written, s2 passes; t0 address, t1 and t2 scratch. All programs end with an
//! ECALL, the sweep with its answer in a1.

use dynasmrt::riscv::RiscvRelocation;
use dynasmrt::{DynasmApi, DynasmLabelApi, VecAssembler, dynasm};

/// Not 0 where the guest is to end.
pub(super) const EXIT: u64 = 0;
/// 1 where the host waits for the guest.
pub(super) const SYNC: u64 = 64;
/// How many passes the mover's guest has done.
pub(super) const PASSES: u64 = 128;

/// What the guest writes into the first half of an area, and everywhere in the move tests.
pub(super) const VALUE_1: u64 = 0x1122_3344_5566_7788;
/// What it writes into the second half.
pub(super) const VALUE_2: u64 = 0x99aa_bbcc_ddee_ff00;
/// By what the sweep multiplies its sum before it adds a slot's word.
pub(super) const FACTOR: u64 = 31;

const LOOKS: i32 = 64;
/// `fence rw, rw`.
const FENCE: u32 = 0x0330_000f;
const WFI: u32 = 0x1050_0073;

type Assembler = VecAssembler<RiscvRelocation>;

fn words(ops: Assembler) -> Vec<u32> {
    let bytes = ops
        .finalize()
        .expect("every label of fixed code is defined");
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|&word| u32::from_le_bytes(word))
        .collect()
}

/// Waits until the host has set SYNC, and clears it; goes to `->done` where the guest is to end.
fn synchronise(ops: &mut Assembler) {
    dynasm!(ops
        ; .arch riscv64i
        ;wait:
        ; li.12 t2, LOOKS
        ;look:
        ; ld t1, [a0, EXIT as i32]
        ; bnez t1, ->done
        ; ld t1, [a0, SYNC as i32]
        ; bnez t1, >go
        ; addi t2, t2, -1
        ; bnez t2, <look
        ; .u32 WFI
        ; j <wait
        ;go:
        ; .u32 FENCE
        ; sd zero, [a0, SYNC as i32]
    );
}

/// Writes a word of every stride of the first half, waits for the host, does the same with the
/// second, and so on.
pub(super) fn halves() -> Vec<u32> {
    let mut ops = Assembler::new(0);
    dynasm!(ops
        ; .arch riscv64i
        ; li s0, VALUE_1 as i64
        ; li s1, VALUE_2 as i64
        ;->again:
        ; mv t0, a1
        ;first:
        ; sd s0, [t0, 0]
        ; add t0, t0, a4
        ; bltu t0, a2, <first
    );
    synchronise(&mut ops);
    dynasm!(ops
        ; .arch riscv64i
        ; mv t0, a2
        ;second:
        ; sd s1, [t0, 0]
        ; add t0, t0, a4
        ; bltu t0, a3, <second
    );
    synchronise(&mut ops);
    dynasm!(ops
        ; .arch riscv64i
        ; j ->again
        ;->done:
        ; ecall
        ; j ->done
    );
    words(ops)
}

/// Writes a word of every stride of an area, over and over.
pub(super) fn writer() -> Vec<u32> {
    let mut ops = Assembler::new(0);
    dynasm!(ops
        ; .arch riscv64i
        ; li s0, VALUE_1 as i64
        ; li.12 s2, 0
        ;->again:
        ; ld t1, [a0, EXIT as i32]
        ; bnez t1, ->done
        ; mv t0, a1
        ;next:
        ; sd s0, [t0, 0]
        ; add t0, t0, a4
        ; bltu t0, a2, <next
        ; addi s2, s2, 1
        ; sd s2, [a0, PASSES as i32]
        ; j ->again
        ;->done:
        ; ecall
        ; j ->done
    );
    words(ops)
}

/// Reads a word of every stride of an area and ends; see [`swept`].
pub(super) fn sweep() -> Vec<u32> {
    let mut ops = Assembler::new(0);
    dynasm!(ops
        ; .arch riscv64i
        ; .feature m
        ; li.12 s2, 0
        ; li.12 t2, FACTOR as i32
        ;->next:
        ; ld t1, [a1, 0]
        ; mul s2, s2, t2
        ; add s2, s2, t1
        ; add a1, a1, a4
        ; bltu a1, a2, ->next
        ; mv a1, s2
        ;->done:
        ; ecall
        ; j ->done
    );
    words(ops)
}

/// What a sweep over `words` gives.
pub(super) fn swept(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0, |sum, word| sum.wrapping_mul(FACTOR).wrapping_add(word))
}
