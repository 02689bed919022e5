//! The demo workload in x86-64 machine code.
//!
//! Registers that keep their contents from visit to visit:
//!
//! | register | contents |
//! |---|---|
//! | rdi | control page |
//! | r8, r9, r15 | pass, pages done, visits left in this pass |
//! | r10, r11 | order generator's state, its increment |
//! | r12, r13 | tag, first page |
//! | rbp | fill multiplier |
//!
//! In a visit, rdx is the page index and rsi the page address; rax, rbx, rcx and r14 are scratch.

use crate::ErrorKind;
use crate::address_space::{DOORBELL_GPA, HOLE_BYTES, HOLE_PAGE};
use crate::control::{
    DONE, ERROR_EXPECTED, ERROR_FOUND, ERROR_KIND, ERROR_PAGE, ERROR_PASS, ERRORS, FIRST,
    IN_PROGRESS, MAGIC, PASS, REST, STATE, VCPU,
};
use crate::event::{EVENT_ERROR, EVENT_SHIFT, KIND_SHIFT};
use crate::order::OrderParams;
use crate::params::{
    FILL_INCREMENT, FILL_MULTIPLIER, GOLDEN, HASH_MULTIPLIER, HASH_START, ORDER_MULTIPLIER,
    PAGE_MAGIC, UNROLL, WORD_CHECKSUM, WORD_INDEX, WORD_PAYLOAD, WORD_SEQUENCE, WORD_TAG, WORDS,
};
use dynasmrt::x64::X64Relocation;
use dynasmrt::{DynasmApi, DynasmLabelApi, VecAssembler, dynasm};

const FILL_INC: i32 = FILL_INCREMENT as i32;
const HASH_MUL: i32 = HASH_MULTIPLIER as i32;
const ORDER_MUL: i32 = ORDER_MULTIPLIER as i32;
const TAG: i32 = 8 * WORD_TAG as i32;
const INDEX: i32 = 8 * WORD_INDEX as i32;
const SEQUENCE: i32 = 8 * WORD_SEQUENCE as i32;
const PAYLOAD: i32 = 8 * WORD_PAYLOAD as i32;
const CHECKSUM: i32 = 8 * WORD_CHECKSUM as i32;
const PAGE_END: i32 = 8 * WORDS as i32;
const STRIDE: i32 = 8 * UNROLL as i32;

pub(super) fn assemble(share_pages: u64) -> Vec<u8> {
    let mut ops = VecAssembler::<X64Relocation>::new(0);
    start_and_choose(&mut ops, share_pages);
    verify(&mut ops);
    rewrite(&mut ops);
    classify(&mut ops);
    report(&mut ops);
    ops.finalize()
        .expect("every label of fixed code is defined")
}

/// Entry, start of a pass, choice of the next page, address of the page.
///
/// The share's size is built in. So a control page that has lost its contents does not lead the
/// program astray.
fn start_and_choose(ops: &mut VecAssembler<X64Relocation>, share_pages: u64) {
    let pages = i32::try_from(share_pages).expect("a map has at most 2^30 pages");
    let order = OrderParams::new(share_pages);
    let mask = i32::try_from(order.mask).expect("below the next power of two");
    dynasm!(ops
        ; .arch x64
        ; mov r12, QWORD PAGE_MAGIC as i64
        ; add r12, [rdi + VCPU as i32]
        ; mov r13, [rdi + FIRST as i32]
        ; mov rbp, QWORD FILL_MULTIPLIER as i64
        ; mov r8d, 1
        ; xor r9d, r9d
        ;->pass:
        ; mov [rdi + PASS as i32], r8
        ; mov r15, pages
        // seed = ((pass * GOLDEN + tag) mixed) * FILL_MULTIPLIER, mixed
        ; mov r10, QWORD GOLDEN as i64
        ; imul r10, r8
        ; add r10, r12
        ; mov rax, r10
        ; shr rax, 32
        ; xor r10, rax
        ; imul r10, rbp
        ; mov rax, r10
        ; shr rax, 29
        ; xor r10, rax
        ; mov r11, r10
        ; shr r11, 32
        ; or r11, 1
        ; and r10, mask
        ;->visit:
        ; imul r10, r10, ORDER_MUL
        ; add r10, r11
        ; and r10, mask
        ; mov rdx, r10
        ; shr rdx, order.shift as i8
        ; xor rdx, r10
        ; cmp rdx, pages
        ; jae ->visit
        ; mov [rdi + STATE as i32], r10
        ; add rdx, r13
        ; mov rsi, rdx
        ; shl rsi, 12
        ; cmp rdx, HOLE_PAGE as i32
        ; jb >low
        ; add rsi, HOLE_BYTES as i32
        ;low:
    );
}

/// Checks header and checksum of the page against the previous pass. In the first pass, checks that
/// the page is zero.
fn verify(ops: &mut VecAssembler<X64Relocation>) {
    dynasm!(ops
        ; .arch x64
        ; cmp r8, 1
        ; je ->first_pass
        ; mov rax, QWORD HASH_START as i64
    );
    for word in 0..PAYLOAD / 8 {
        dynasm!(ops ; .arch x64 ; imul rax, rax, HASH_MUL ; add rax, [rsi + 8 * word]);
    }
    dynasm!(ops
        ; .arch x64
        ; lea r14, [rsi + PAYLOAD]
        ; lea rcx, [rsi + CHECKSUM]
        ;next:
    );
    for word in 0..UNROLL as i32 {
        dynasm!(ops ; .arch x64 ; imul rax, rax, HASH_MUL ; add rax, [r14 + 8 * word]);
    }
    dynasm!(ops
        ; .arch x64
        ; add r14, STRIDE
        ; cmp r14, rcx
        ; jne <next
        ; cmp rax, [rsi + CHECKSUM]
        ; jne ->bad
        ; cmp r12, [rsi + TAG]
        ; jne ->bad
        ; cmp rdx, [rsi + INDEX]
        ; jne ->bad
        ; lea rax, [r8 - 1]
        ; cmp rax, [rsi + SEQUENCE]
        ; jne ->bad
    );
}

/// Rewrites the page in ascending order, between the two stores that publish it as in progress.
/// Then counts it, and asks for a rest if the control page says so.
fn rewrite(ops: &mut VecAssembler<X64Relocation>) {
    dynasm!(ops
        ; .arch x64
        ;->write:
        ; lea rcx, [rdx + 1]
        ; mov [rdi + IN_PROGRESS as i32], rcx
        // seed of the fill generator, as in the model
        ; mov r14, QWORD GOLDEN as i64
        ; mov rbx, rdx
        ; imul rbx, r14
        ; add rbx, r12
        ; imul rbx, rbp
        ; add rbx, r8
        ; imul rbx, r14
        ; mov rcx, rbx
        ; shr rcx, 32
        ; xor rbx, rcx
        ; mov rax, QWORD HASH_START as i64
        ; mov [rsi + TAG], r12
        ; imul rax, rax, HASH_MUL
        ; add rax, r12
        ; mov [rsi + INDEX], rdx
        ; imul rax, rax, HASH_MUL
        ; add rax, rdx
        ; mov [rsi + SEQUENCE], r8
        ; imul rax, rax, HASH_MUL
        ; add rax, r8
        ; lea r14, [rsi + PAYLOAD]
        ; lea rcx, [rsi + CHECKSUM]
        ;next:
    );
    for word in 0..UNROLL as i32 {
        dynasm!(ops
            ; .arch x64
            ; imul rbx, rbp
            ; add rbx, FILL_INC
            ; mov [r14 + 8 * word], rbx
            ; imul rax, rax, HASH_MUL
            ; add rax, rbx
        );
    }
    dynasm!(ops
        ; .arch x64
        ; add r14, STRIDE
        ; cmp r14, rcx
        ; jne <next
        ; mov [rsi + CHECKSUM], rax
        // the control page is memory, too: it must still hold this vCPU's last store
        ; cmp r9, [rdi + DONE as i32]
        ; jne ->control_error
        ;->count:
        ; inc r9
        ; mov [rdi + DONE as i32], r9
        ; mov QWORD [rdi + IN_PROGRESS as i32], 0
        ; mov eax, [rdi + REST as i32]
        ; test eax, eax
        ; jz >on
        ; mov ecx, DOORBELL_GPA.0 as i32
        ; mov [rcx], eax
        ;on:
        ; dec r15
        ; jnz ->visit
        ; inc r8
        ; jmp ->pass
    );
}

/// Classifies the error: rbx becomes the kind, rcx the expected word, rax the word found.
fn classify(ops: &mut VecAssembler<X64Relocation>) {
    let kind = |kind: ErrorKind| kind.code() as i32;
    dynasm!(ops
        ; .arch x64
        ;->first_pass:
        ; xor eax, eax
        ; mov r14, rsi
        ; lea rcx, [rsi + PAGE_END]
        ;next:
    );
    for word in 0..UNROLL as i32 {
        dynasm!(ops ; .arch x64 ; or rax, [r14 + 8 * word]);
    }
    dynasm!(ops
        ; .arch x64
        ; add r14, STRIDE
        ; cmp r14, rcx
        ; jne <next
        ; test rax, rax
        ; jz ->write
        ;->bad:
        ; xor eax, eax
        ; mov r14, rsi
        ; lea rcx, [rsi + PAGE_END]
        ;next:
        ; or rax, [r14]
        ; add r14, 8
        ; cmp r14, rcx
        ; jne <next
        ; mov ebx, kind(ErrorKind::Lost)
        ; lea rcx, [r8 - 1]
        ; test rax, rax
        ; jz ->page_error
        ; mov rax, QWORD HASH_START as i64
        ; mov r14, rsi
        ; lea rcx, [rsi + CHECKSUM]
        ;next:
        ; imul rax, rax, HASH_MUL
        ; add rax, [r14]
        ; add r14, 8
        ; cmp r14, rcx
        ; jne <next
        ; mov rcx, rax
        ; mov rax, [rsi + CHECKSUM]
        ; mov ebx, kind(ErrorKind::Torn)
        ; cmp rcx, rax
        ; jne ->page_error
        ; mov ebx, kind(ErrorKind::Foreign)
        ; mov rcx, r12
        ; mov rax, [rsi + TAG]
        ; cmp rcx, rax
        ; jne ->page_error
        ; mov rcx, rdx
        ; mov rax, [rsi + INDEX]
        ; cmp rcx, rax
        ; jne ->page_error
        ; mov ebx, kind(ErrorKind::Stale)
        ; lea rcx, [r8 - 1]
        ; mov rax, [rsi + SEQUENCE]
        ;->page_error:
        ; mov r14, rdx
        ; jmp ->report
        ;->control_error:
        ; mov r14, rdi
        ; shr r14, 12
        ; mov rcx, r9
        ; mov rax, [rdi + DONE as i32]
        ; mov ebx, kind(ErrorKind::Lost)
        ; cmp QWORD [rdi + MAGIC as i32], 0
        ; je ->report
        ; mov ebx, kind(ErrorKind::Stale)
    );
}

/// Records the error (page in r14), stores to the doorbell, and continues after the failed check.
fn report(ops: &mut VecAssembler<X64Relocation>) {
    dynasm!(ops
        ; .arch x64
        ;->report:
        ; cmp QWORD [rdi + ERRORS as i32], 0
        ; jne >again
        ; mov [rdi + ERROR_KIND as i32], rbx
        ; mov [rdi + ERROR_PAGE as i32], r14
        ; mov [rdi + ERROR_EXPECTED as i32], rcx
        ; mov [rdi + ERROR_FOUND as i32], rax
        ; mov [rdi + ERROR_PASS as i32], r8
        ;again:
        ; inc QWORD [rdi + ERRORS as i32]
        ; shl ebx, KIND_SHIFT as i8
    );
    ring(ops, EVENT_ERROR);
    dynasm!(ops
        ; .arch x64
        ; cmp r14, rdx
        ; je ->write
        ; jmp ->count
    );
}

/// Stores an event to the doorbell, with the bits of ebx. Changes eax and ecx.
fn ring(ops: &mut VecAssembler<X64Relocation>, event: u32) {
    dynasm!(ops
        ; .arch x64
        ; movzx eax, r12w
        ; or eax, ebx
        ; or eax, (event << EVENT_SHIFT) as i32
        ; mov ecx, DOORBELL_GPA.0 as i32
        ; mov [rcx], eax
    );
}
