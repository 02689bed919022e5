//! The demo workload in RV64IM machine code.
//!
//! Registers that keep their contents from visit to visit:
//!
//! | register | contents |
//! |---|---|
//! | a0, a1 | control page, doorbell |
//! | s0, s1 | first page, pages of the share |
//! | s2, s3 | order mask, order shift |
//! | s4, s5, s6 | pass, pages done, visits left in this pass |
//! | s7, s8 | order generator's state, its increment |
//! | s9, s10, s11 | tag, fill multiplier, checksum multiplier |
//! | a3, a4, a5 | order multiplier, fill increment, start of the checksum |
//! | a6, a7 | first page behind the hole, bytes of payload |
//! | gp, tp | golden ratio, length of the hole |
//!
//! In a visit, a2 is the page index and t0 the page address; t1 to t6 are scratch.

use crate::ErrorKind;
use crate::address_space::{HOLE_BYTES, HOLE_PAGE};
use crate::control::{
    DONE, ERROR_EXPECTED, ERROR_FOUND, ERROR_KIND, ERROR_PAGE, ERROR_PASS, ERRORS, FIRST,
    IN_PROGRESS, MAGIC, MASK, PAGES, PASS, REST, SHIFT, STATE, VCPU,
};
use crate::event::{EVENT_ERROR, EVENT_SHIFT, KIND_SHIFT};
use crate::params::{
    FILL_INCREMENT, FILL_MULTIPLIER, GOLDEN, HASH_MULTIPLIER, HASH_START, ORDER_MULTIPLIER,
    PAGE_MAGIC, UNROLL, WORD_CHECKSUM, WORD_INDEX, WORD_PAYLOAD, WORD_SEQUENCE, WORD_TAG, WORDS,
};
use dynasmrt::riscv::RiscvRelocation;
use dynasmrt::{DynasmApi, DynasmLabelApi, VecAssembler, dynasm};

const TAG: i32 = 8 * WORD_TAG as i32;
const INDEX: i32 = 8 * WORD_INDEX as i32;
const SEQUENCE: i32 = 8 * WORD_SEQUENCE as i32;
const PAYLOAD: i32 = 8 * WORD_PAYLOAD as i32;
const PAYLOAD_BYTES: i32 = 8 * (WORD_CHECKSUM - WORD_PAYLOAD) as i32;
const STRIDE: i32 = 8 * UNROLL as i32;
/// Rounds of the unrolled loops over a page's payload.
const ROUNDS: u64 = (WORD_CHECKSUM - WORD_PAYLOAD) as u64 / UNROLL as u64;

/// Instructions at the start of a pass.
pub(crate) const INSTRUCTIONS_PER_PASS: u64 = 14;
/// Instructions for each step of the order generator, whether its value is used or skipped.
pub(crate) const INSTRUCTIONS_PER_STEP: u64 = 6;
/// Instructions of a visit (from the second pass on, below the hole), without those of the order
/// generator.
pub(crate) const INSTRUCTIONS_PER_VISIT: u64 = 56 + ROUNDS * (UNROLL as u64 * (3 + 5) + 2 * 2);

pub(super) fn assemble() -> Vec<u8> {
    let mut ops = VecAssembler::<RiscvRelocation>::new(0);
    start_and_choose(&mut ops);
    verify(&mut ops);
    rewrite(&mut ops);
    classify(&mut ops);
    report(&mut ops);
    ops.finalize()
        .expect("every label of fixed code is defined")
}

/// Entry, start of a pass, choice of the next page, address of the page.
fn start_and_choose(ops: &mut VecAssembler<RiscvRelocation>) {
    dynasm!(ops
        ; .arch riscv64i
        ; .feature m
        ; li s9, PAGE_MAGIC as i64
        ; ld t1, [a0, VCPU as i32]
        ; add s9, s9, t1
        ; ld s0, [a0, FIRST as i32]
        ; ld s1, [a0, PAGES as i32]
        ; ld s2, [a0, MASK as i32]
        ; ld s3, [a0, SHIFT as i32]
        ; li s10, FILL_MULTIPLIER as i64
        ; li s11, HASH_MULTIPLIER as i64
        ; li a3, ORDER_MULTIPLIER as i64
        ; li a4, FILL_INCREMENT as i64
        ; li a5, HASH_START as i64
        ; li a6, HOLE_PAGE as i64
        ; li a7, i64::from(PAYLOAD_BYTES)
        ; li gp, GOLDEN as i64
        ; li tp, HOLE_BYTES as i64
        ; li.12 s4, 1
        ; li.12 s5, 0
        ;->pass:
        ; sd s4, [a0, PASS as i32]
        ; mv s6, s1
        // seed = ((pass * GOLDEN + tag) mixed) * FILL_MULTIPLIER, mixed
        ; mul s7, s4, gp
        ; add s7, s7, s9
        ; srli t1, s7, 32
        ; xor s7, s7, t1
        ; mul s7, s7, s10
        ; srli t1, s7, 29
        ; xor s7, s7, t1
        ; srli s8, s7, 32
        ; ori s8, s8, 1
        ; and s7, s7, s2
        ;->visit:
        ; mul s7, s7, a3
        ; add s7, s7, s8
        ; and s7, s7, s2
        ; srl a2, s7, s3
        ; xor a2, a2, s7
        ; bgeu a2, s1, ->visit
        ; sd s7, [a0, STATE as i32]
        ; add a2, a2, s0
        ; slli t0, a2, 12
        ; bltu a2, a6, >low
        ; add t0, t0, tp
        ;low:
    );
}

/// Checks header and checksum of the page against the previous pass. In the first pass, checks that
/// the page is zero.
fn verify(ops: &mut VecAssembler<RiscvRelocation>) {
    dynasm!(ops
        ; .arch riscv64i
        ; .feature m
        ; addi t6, s4, -1
        ; beqz t6, ->first_pass
        ; mv t3, a5
    );
    for word in 0..PAYLOAD / 8 {
        dynasm!(ops
            ; .arch riscv64i
            ; .feature m
            ; ld t5, [t0, 8 * word]
            ; mul t3, t3, s11
            ; add t3, t3, t5
        );
    }
    dynasm!(ops
        ; .arch riscv64i
        ; .feature m
        ; addi t1, t0, PAYLOAD
        ; add t2, t1, a7
        ;next:
    );
    for word in 0..UNROLL as i32 {
        dynasm!(ops
            ; .arch riscv64i
            ; .feature m
            ; ld t5, [t1, 8 * word]
            ; mul t3, t3, s11
            ; add t3, t3, t5
        );
    }
    dynasm!(ops
        ; .arch riscv64i
        ; .feature m
        ; addi t1, t1, STRIDE
        ; bne t1, t2, <next
        ; ld t5, [t1, 0]
        ; bne t5, t3, ->bad
        ; ld t5, [t0, TAG]
        ; bne t5, s9, ->bad
        ; ld t5, [t0, INDEX]
        ; bne t5, a2, ->bad
        ; ld t5, [t0, SEQUENCE]
        ; bne t5, t6, ->bad
    );
}

/// Rewrites the page in ascending order, between the two stores that publish it as in progress.
/// Then counts it, and asks for a rest if the control page says so.
fn rewrite(ops: &mut VecAssembler<RiscvRelocation>) {
    dynasm!(ops
        ; .arch riscv64i
        ; .feature m
        ;->write:
        ; addi t5, a2, 1
        ; sd t5, [a0, IN_PROGRESS as i32]
        // seed of the fill generator, as in the model
        ; mul t4, a2, gp
        ; add t4, t4, s9
        ; mul t4, t4, s10
        ; add t4, t4, s4
        ; mul t4, t4, gp
        ; srli t5, t4, 32
        ; xor t4, t4, t5
        ; sd s9, [t0, TAG]
        ; mul t3, a5, s11
        ; add t3, t3, s9
        ; sd a2, [t0, INDEX]
        ; mul t3, t3, s11
        ; add t3, t3, a2
        ; sd s4, [t0, SEQUENCE]
        ; mul t3, t3, s11
        ; add t3, t3, s4
        ; addi t1, t0, PAYLOAD
        ; add t2, t1, a7
        ;next:
    );
    for word in 0..UNROLL as i32 {
        dynasm!(ops
            ; .arch riscv64i
            ; .feature m
            ; mul t4, t4, s10
            ; add t4, t4, a4
            ; sd t4, [t1, 8 * word]
            ; mul t3, t3, s11
            ; add t3, t3, t4
        );
    }
    dynasm!(ops
        ; .arch riscv64i
        ; .feature m
        ; addi t1, t1, STRIDE
        ; bne t1, t2, <next
        ; sd t3, [t1, 0]
        // the control page is memory, too: it must still hold this vCPU's last store
        ; ld t1, [a0, DONE as i32]
        ; bne t1, s5, ->control_error
        ;->count:
        ; addi s5, s5, 1
        ; sd s5, [a0, DONE as i32]
        ; sd zero, [a0, IN_PROGRESS as i32]
        ; ld t1, [a0, REST as i32]
        ; beqz t1, >on
        ; sw t1, [a1, 0]
        ;on:
        ; addi s6, s6, -1
        ; bnez s6, ->visit
        ; addi s4, s4, 1
        ; j ->pass
    );
}

/// Classifies the error: t4 becomes the kind, t5 the expected word, t6 the word found.
fn classify(ops: &mut VecAssembler<RiscvRelocation>) {
    let kind = |kind: ErrorKind| kind.code() as i32;
    dynasm!(ops
        ; .arch riscv64i
        ; .feature m
        ;->first_pass:
        ; mv t1, t0
        ; li.32 t2, 8 * WORDS as i32
        ; add t2, t2, t0
        ; mv t3, zero
        ;next:
    );
    for word in 0..UNROLL as i32 {
        dynasm!(ops
            ; .arch riscv64i
            ; ld t5, [t1, 8 * word]
            ; or t3, t3, t5
        );
    }
    dynasm!(ops
        ; .arch riscv64i
        ; .feature m
        ; addi t1, t1, STRIDE
        ; bne t1, t2, <next
        ; bnez t3, ->bad
        ; j ->write
        ;->bad:
        ; mv t1, t0
        ; li.32 t2, 8 * WORDS as i32
        ; add t2, t2, t0
        ; mv t6, zero
        ;next:
        ; ld t5, [t1, 0]
        ; or t6, t6, t5
        ; addi t1, t1, 8
        ; bne t1, t2, <next
        ; li.12 t4, kind(ErrorKind::Lost)
        ; addi t5, s4, -1
        ; beqz t6, ->page_error
        ; mv t1, t0
        ; add t2, t0, a7
        ; addi t2, t2, PAYLOAD
        ; mv t5, a5
        ;next:
        ; ld t6, [t1, 0]
        ; mul t5, t5, s11
        ; add t5, t5, t6
        ; addi t1, t1, 8
        ; bne t1, t2, <next
        ; li.12 t4, kind(ErrorKind::Torn)
        ; ld t6, [t1, 0]
        ; bne t5, t6, ->page_error
        ; li.12 t4, kind(ErrorKind::Foreign)
        ; mv t5, s9
        ; ld t6, [t0, TAG]
        ; bne t5, t6, ->page_error
        ; mv t5, a2
        ; ld t6, [t0, INDEX]
        ; bne t5, t6, ->page_error
        ; li.12 t4, kind(ErrorKind::Stale)
        ; addi t5, s4, -1
        ; ld t6, [t0, SEQUENCE]
        ;->page_error:
        ; mv t1, a2
        ; j ->report
        ;->control_error:
        ; mv t5, s5
        ; mv t6, t1
        ; srli t1, a0, 12
        ; li.12 t4, kind(ErrorKind::Lost)
        ; ld t2, [a0, MAGIC as i32]
        ; beqz t2, ->report
        ; li.12 t4, kind(ErrorKind::Stale)
    );
}

/// Records the error (page in t1), stores to the doorbell, and continues after the failed check.
#[expect(
    clippy::unnecessary_cast,
    reason = "the assembler casts shift amounts that have the right type"
)]
fn report(ops: &mut VecAssembler<RiscvRelocation>) {
    dynasm!(ops
        ; .arch riscv64i
        ; .feature m
        ;->report:
        ; ld t2, [a0, ERRORS as i32]
        ; bnez t2, >again
        ; sd t4, [a0, ERROR_KIND as i32]
        ; sd t1, [a0, ERROR_PAGE as i32]
        ; sd t5, [a0, ERROR_EXPECTED as i32]
        ; sd t6, [a0, ERROR_FOUND as i32]
        ; sd s4, [a0, ERROR_PASS as i32]
        ;again:
        ; addi t2, t2, 1
        ; sd t2, [a0, ERRORS as i32]
        ; slli t4, t4, KIND_SHIFT
    );
    ring(ops, EVENT_ERROR);
    dynasm!(ops
        ; .arch riscv64i
        ; .feature m
        ; beq t1, a2, ->write
        ; j ->count
    );
}

/// Stores an event to the doorbell, with the bits of t4. Changes t2 and t4.
fn ring(ops: &mut VecAssembler<RiscvRelocation>, event: u32) {
    dynasm!(ops
        ; .arch riscv64i
        ; .feature m
        ; slli t2, s9, 48
        ; srli t2, t2, 48
        ; or t4, t4, t2
        ; li.32 t2, (event << EVENT_SHIFT) as i32
        ; or t4, t4, t2
        ; sw t4, [a1, 0]
    );
}
