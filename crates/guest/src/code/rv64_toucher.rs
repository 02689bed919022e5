//! The toucher and the spinner in RV64IM machine code.
//!
//! Registers of the toucher:
//!
//! | register | contents |
//! |---|---|
//! | a0, a1 | control page, doorbell |
//! | s0, s1 | first page, pages |
//! | s2, s3 | order mask, order shift |
//! | s4, s5, s6 | pass, pages done, visits left in this pass |
//! | s7, s8 | order generator's state, its increment |
//! | s9, s10, s11 | tag, fill multiplier, sum |
//! | a3, a4, a6 | order multiplier, pass limit, first page behind the hole |
//! | gp, tp | golden ratio, length of the hole |
//! | a2, t0, t1 | page index, page address, scratch |

use crate::address_space::{HOLE_BYTES, HOLE_PAGE};
use crate::control::{DONE, FIRST, MASK, PAGES, PASS, PASS_LIMIT, SHIFT, STATE, SUM, VCPU};
use crate::event::{EVENT_FINISHED, EVENT_SHIFT};
use crate::params::{FILL_MULTIPLIER, GOLDEN, ORDER_MULTIPLIER, PAGE_MAGIC};
use crate::touch::{Touch, TouchAccess, TouchOrder};
use dynasmrt::riscv::RiscvRelocation;
use dynasmrt::{DynasmApi, DynasmLabelApi, VecAssembler, dynasm};

pub(super) fn assemble(touch: &Touch) -> Vec<u8> {
    let mut ops = VecAssembler::<RiscvRelocation>::new(0);
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
        ; ld a4, [a0, PASS_LIMIT as i32]
        ; li s10, FILL_MULTIPLIER as i64
        ; li a3, ORDER_MULTIPLIER as i64
        ; li a6, HOLE_PAGE as i64
        ; li gp, GOLDEN as i64
        ; li tp, HOLE_BYTES as i64
        ; li.12 s4, 1
        ; li.12 s5, 0
        ; li.12 s11, 0
        ;->pass:
        ; sd s4, [a0, PASS as i32]
        ; mv s6, s1
    );
    match touch.order {
        TouchOrder::Ascending => dynasm!(ops
            ; .arch riscv64i
            ; li.12 s7, -1
            ;->visit:
            ; addi s7, s7, 1
            ; mv a2, s7
        ),
        TouchOrder::Random => dynasm!(ops
            ; .arch riscv64i
            ; .feature m
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
        ),
    }
    dynasm!(ops
        ; .arch riscv64i
        ; .feature m
        ; sd s7, [a0, STATE as i32]
        ; add a2, a2, s0
        ; slli t0, a2, 12
        ; bltu a2, a6, >low
        ; add t0, t0, tp
        ;low:
    );
    match touch.access {
        TouchAccess::Read => dynasm!(ops
            ; .arch riscv64i
            ; ld t1, [t0, 0]
            ; add s11, s11, t1
            ; sd s11, [a0, SUM as i32]
        ),
        TouchAccess::Write => dynasm!(ops
            ; .arch riscv64i
            ; addi t1, a2, 1
            ; sd t1, [t0, 0]
        ),
    }
    dynasm!(ops
        ; .arch riscv64i
        ; .feature m
        ; addi s5, s5, 1
        ; sd s5, [a0, DONE as i32]
        ; addi s6, s6, -1
        ; bnez s6, ->visit
        ; beq s4, a4, >finished
        ; addi s4, s4, 1
        ; j ->pass
        ;finished:
        ; slli t1, s9, 48
        ; srli t1, t1, 48
        ; li.32 t0, (EVENT_FINISHED << EVENT_SHIFT) as i32
        ; or t1, t1, t0
        ;ring:
        ; sw t1, [a1, 0]
        ; j <ring
    );
    ops.finalize()
        .expect("every label of fixed code is defined")
}

/// Registers: a0 control page, t0 rounds.
pub(super) fn assemble_spin() -> Vec<u8> {
    let mut ops = VecAssembler::<RiscvRelocation>::new(0);
    dynasm!(ops
        ; .arch riscv64i
        ; li.12 t0, 0
        ;next:
        ; addi t0, t0, 1
        ; sd t0, [a0, DONE as i32]
        ; j <next
    );
    ops.finalize()
        .expect("every label of fixed code is defined")
}
