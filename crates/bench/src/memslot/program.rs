//! The guest's programs, in RV64IM machine code.
//!
//! Host and guest synchronise by three doublewords of the synchronisation page. [`EXIT`] ends the
//! guest. The host sets [`SYNC`], and the guest clears it when it has done its part. [`PASSES`]
//! counts the passes of the writer. A waiting guest tests SYNC [`LOOKS`] times, and then waits for
//! an interrupt, upon which its thread yields.
//!
//! Registers: a0 is the synchronisation page, a1 the first address, a2 the middle or the end, a3
//! the end, a4 the stride. s0 and s1 are the stored values, s2 counts passes. t0 is the address, t1
//! and t2 are scratch. All programs end with an ECALL; the sweep returns its result in a1.

use dynasmrt::riscv::RiscvRelocation;
use dynasmrt::{DynasmApi, DynasmLabelApi, VecAssembler, dynasm};

/// Offset of the word that ends the guest if it is not 0.
pub(super) const EXIT: u64 = 0;
/// Offset of the word that is 1 while the host waits for the guest.
pub(super) const SYNC: u64 = 64;
/// Offset of the word that counts the writer's passes.
pub(super) const PASSES: u64 = 128;

/// The value that the guest stores to the first half of an area, and everywhere in the move tests.
pub(super) const VALUE_1: u64 = 0x1122_3344_5566_7788;
/// The value that the guest stores to the second half.
pub(super) const VALUE_2: u64 = 0x99aa_bbcc_ddee_ff00;
/// The sweep multiplies its sum by this before it adds a slot's word.
pub(super) const FACTOR: u64 = 31;

const LOOKS: i32 = 64;
/// `fence rw, rw`.
const FENCE: u32 = 0x0330_000f;
const WFI: u32 = 0x1050_0073;

pub(crate) type Assembler = VecAssembler<RiscvRelocation>;

/// The machine code of a program.
pub(crate) fn code_words(ops: Assembler) -> Vec<u32> {
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

/// Waits until the host has set SYNC, and clears it. Jumps to `->done` if EXIT is set.
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

/// Stores a word per stride to the first half, waits for the host, does the same with the second
/// half, and repeats.
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
    code_words(ops)
}

/// Stores a word per stride to an area, over and over.
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
    code_words(ops)
}

/// Reads a word per stride of an area and ends with their [`swept`] sum.
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
    code_words(ops)
}

/// The result of a sweep over `words`.
pub(super) fn swept(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0, |sum, word| sum.wrapping_mul(FACTOR).wrapping_add(word))
}
