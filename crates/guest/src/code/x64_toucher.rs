//! The toucher and the spinner in x86-64 machine code.
//!
//! Registers of the toucher:
//!
//! | register | contents |
//! |---|---|
//! | rdi | control page |
//! | r8, r9, r15 | pass, pages done, visits left in this pass |
//! | r10, r11 | order generator's state, its increment |
//! | ecx, rbp | order shift, order mask |
//! | r12, rbx | tag, sum |
//! | r13, r14 | first page, pages |
//! | rdx, rsi, rax | page index, page address, scratch |

use crate::address_space::{DOORBELL_GPA, HOLE_BYTES, HOLE_PAGE};
use crate::control::{DONE, FIRST, MASK, PAGES, PASS, PASS_LIMIT, SHIFT, STATE, SUM, VCPU};
use crate::event::{EVENT_FINISHED, EVENT_SHIFT};
use crate::params::{FILL_MULTIPLIER, GOLDEN, ORDER_MULTIPLIER, PAGE_MAGIC};
use crate::touch::{Touch, TouchAccess, TouchOrder};
use dynasmrt::x64::X64Relocation;
use dynasmrt::{DynasmApi, DynasmLabelApi, VecAssembler, dynasm};

pub(super) fn assemble(touch: &Touch) -> Vec<u8> {
    let mut ops = VecAssembler::<X64Relocation>::new(0);
    dynasm!(ops
        ; .arch x64
        ; mov r12, QWORD PAGE_MAGIC as i64
        ; add r12, [rdi + VCPU as i32]
        ; mov r13, [rdi + FIRST as i32]
        ; mov r14, [rdi + PAGES as i32]
        ; mov rbp, [rdi + MASK as i32]
        ; mov ecx, [rdi + SHIFT as i32]
        ; mov r8d, 1
        ; xor r9d, r9d
        ; xor ebx, ebx
        ;->pass:
        ; mov [rdi + PASS as i32], r8
        ; mov r15, r14
    );
    match touch.order {
        TouchOrder::Ascending => dynasm!(ops
            ; .arch x64
            ; mov r10, -1
            ;->visit:
            ; inc r10
            ; mov rdx, r10
        ),
        TouchOrder::Random => dynasm!(ops
            ; .arch x64
            ; mov r10, QWORD GOLDEN as i64
            ; imul r10, r8
            ; add r10, r12
            ; mov rax, r10
            ; shr rax, 32
            ; xor r10, rax
            ; mov rax, QWORD FILL_MULTIPLIER as i64
            ; imul r10, rax
            ; mov rax, r10
            ; shr rax, 29
            ; xor r10, rax
            ; mov r11, r10
            ; shr r11, 32
            ; or r11, 1
            ; and r10, rbp
            ;->visit:
            ; imul r10, r10, ORDER_MULTIPLIER as i32
            ; add r10, r11
            ; and r10, rbp
            ; mov rdx, r10
            ; shr rdx, cl
            ; xor rdx, r10
            ; cmp rdx, r14
            ; jae ->visit
        ),
    }
    dynasm!(ops
        ; .arch x64
        ; mov [rdi + STATE as i32], r10
        ; add rdx, r13
        ; mov rsi, rdx
        ; shl rsi, 12
        ; cmp rdx, HOLE_PAGE as i32
        ; jb >low
        ; add rsi, HOLE_BYTES as i32
        ;low:
    );
    match touch.access {
        TouchAccess::Read => dynasm!(ops
            ; .arch x64
            ; add rbx, [rsi]
            ; mov [rdi + SUM as i32], rbx
        ),
        TouchAccess::Write => dynasm!(ops
            ; .arch x64
            ; lea rax, [rdx + 1]
            ; mov [rsi], rax
        ),
    }
    dynasm!(ops
        ; .arch x64
        ; inc r9
        ; mov [rdi + DONE as i32], r9
        ; dec r15
        ; jnz ->visit
        ; cmp r8, [rdi + PASS_LIMIT as i32]
        ; je >finished
        ; inc r8
        ; jmp ->pass
        ;finished:
        ; movzx eax, r12w
        ; or eax, (EVENT_FINISHED << EVENT_SHIFT) as i32
        ; mov esi, DOORBELL_GPA.0 as i32
        ;ring:
        ; mov [rsi], eax
        ; jmp <ring
    );
    ops.finalize()
        .expect("every label of fixed code is defined")
}

/// Registers: rdi control page, rax rounds.
pub(super) fn assemble_spin() -> Vec<u8> {
    let mut ops = VecAssembler::<X64Relocation>::new(0);
    dynasm!(ops
        ; .arch x64
        ; xor eax, eax
        ;next:
        ; inc rax
        ; mov [rdi + DONE as i32], rax
        ; jmp <next
    );
    ops.finalize()
        .expect("every label of fixed code is defined")
}
