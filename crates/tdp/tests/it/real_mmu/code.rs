#![expect(
    unsafe_code,
    reason = "the guest's code is put together by the assembler, between symbols"
)]
//! The guest's code: position-independent, and copied into its memory.

use super::layout::PROGRAM_GVA;
use std::arch::global_asm;

/// The port on which the stub reports a page fault.
pub(crate) const FAULT_PORT: u16 = 0x10;
/// The port on which it reports any other exception.
pub(crate) const OTHER_PORT: u16 = 0x11;

/// Words of a report, from the start of the ring-0 stack's page on.
pub(crate) mod report {
    pub(crate) const CR2: u64 = 0;
    pub(crate) const ERROR: u64 = 8;
    pub(crate) const RIP: u64 = 16;
    /// The address at which the program continues if the access is given up, or 0.
    pub(crate) const RESUME: u64 = 24;
}

/// Words of a command.
pub(crate) mod command {
    pub(crate) const ROUTINE: u64 = 0;
    pub(crate) const START: u64 = 8;
    pub(crate) const END: u64 = 16;
    pub(crate) const STRIDE: u64 = 24;
    pub(crate) const VALUE: u64 = 32;
    pub(crate) const STACK: u64 = 40;
    /// `spin` ends if this is not 0.
    pub(crate) const STOP: u64 = 48;
    /// The number of rounds that `spin` has made.
    pub(crate) const ROUNDS: u64 = 56;
}

// The stub reports CR2, the error code and the instruction to the VMM. It then returns to the
// instruction, or to the VMM's address.
//
// The program: r15 is the doorbell, rbp its command. Each routine visits the addresses from rdi up
// to rsi, rdx bytes apart. rbx is its value. rax is its result, which `top` stores to the doorbell.
global_asm!(
    ".pushsection .rodata.real_mmu_guest, \"a\"",
    // Global, since a user of a label may be compiled into another object than this one. Hidden, as
    // no label leaves the program.
    ".globl real_mmu_fault, real_mmu_fault_end, real_mmu_other, real_mmu_other_end, real_mmu_program",
    ".globl real_mmu_next, real_mmu_load, real_mmu_store, real_mmu_verify, real_mmu_call",
    ".globl real_mmu_add, real_mmu_spin, real_mmu_callee, real_mmu_callee_end",
    ".hidden real_mmu_fault, real_mmu_fault_end, real_mmu_other, real_mmu_other_end",
    ".hidden real_mmu_program, real_mmu_next, real_mmu_load, real_mmu_store, real_mmu_verify",
    ".hidden real_mmu_call, real_mmu_add, real_mmu_spin, real_mmu_callee, real_mmu_callee_end",
    "real_mmu_fault:",
    "push rax",
    "push rcx",
    "mov rcx, rsp",
    "and rcx, -4096",
    "mov rax, cr2",
    "mov [rcx], rax",
    "mov rax, [rsp + 16]",
    "mov [rcx + 8], rax",
    "mov rax, [rsp + 24]",
    "mov [rcx + 16], rax",
    "out 0x10, al",
    "mov rax, [rcx + 24]",
    "test rax, rax",
    "jz 2f",
    "mov [rsp + 24], rax",
    "mov qword ptr [rcx + 24], 0",
    "2:",
    "pop rcx",
    "pop rax",
    "add rsp, 8",
    "iretq",
    "real_mmu_fault_end:",
    "real_mmu_other:",
    "out 0x11, al",
    "hlt",
    "real_mmu_other_end:",
    "real_mmu_program:",
    "mov [r15], rax",
    "real_mmu_next:",
    "mov rdi, [rbp + 8]",
    "mov rsi, [rbp + 16]",
    "mov rdx, [rbp + 24]",
    "mov rbx, [rbp + 32]",
    "mov rsp, [rbp + 40]",
    "xor eax, eax",
    "mov rcx, [rbp]",
    "jmp rcx",
    // Returns the sum of the words.
    "real_mmu_load:",
    "add rax, [rdi]",
    "add rdi, rdx",
    "cmp rdi, rsi",
    "jb real_mmu_load",
    "jmp real_mmu_program",
    // Each word becomes its address + rbx.
    "real_mmu_store:",
    "lea rcx, [rdi + rbx]",
    "mov [rdi], rcx",
    "add rdi, rdx",
    "cmp rdi, rsi",
    "jb real_mmu_store",
    "jmp real_mmu_program",
    // Returns the number of words that are not their address + rbx.
    "real_mmu_verify:",
    "lea rcx, [rdi + rbx]",
    "cmp [rdi], rcx",
    "je 2f",
    "inc rax",
    "2:",
    "add rdi, rdx",
    "cmp rdi, rsi",
    "jb real_mmu_verify",
    "jmp real_mmu_program",
    // Calls each address. The code there adds to rax and returns.
    "real_mmu_call:",
    "call rdi",
    "add rdi, rdx",
    "cmp rdi, rsi",
    "jb real_mmu_call",
    "jmp real_mmu_program",
    // Adds rbx to each word, atomically.
    "real_mmu_add:",
    "lock add [rdi], rbx",
    "add rdi, rdx",
    "cmp rdi, rsi",
    "jb real_mmu_add",
    "jmp real_mmu_program",
    // Stores the number of the round to each word, round after round, until told to stop.
    "real_mmu_spin:",
    "inc rax",
    "mov rcx, rdi",
    "3:",
    "mov [rcx], rax",
    "add rcx, rdx",
    "cmp rcx, rsi",
    "jb 3b",
    "mov [rbp + 56], rax",
    "cmp qword ptr [rbp + 48], 0",
    "je real_mmu_spin",
    "jmp real_mmu_program",
    // inc rax; ret
    "real_mmu_callee:",
    "inc rax",
    "ret",
    "real_mmu_callee_end:",
    ".popsection",
);

// SAFETY: the symbols above. Only their addresses are used.
unsafe extern "C" {
    static real_mmu_fault: u8;
    static real_mmu_fault_end: u8;
    static real_mmu_other: u8;
    static real_mmu_other_end: u8;
    static real_mmu_program: u8;
    static real_mmu_next: u8;
    static real_mmu_load: u8;
    static real_mmu_store: u8;
    static real_mmu_verify: u8;
    static real_mmu_call: u8;
    static real_mmu_add: u8;
    static real_mmu_spin: u8;
    static real_mmu_callee: u8;
    static real_mmu_callee_end: u8;
}

fn between(start: *const u8, end: *const u8) -> &'static [u8] {
    // SAFETY: two labels of one read-only section, in this order.
    unsafe { std::slice::from_raw_parts(start, end.offset_from_unsigned(start)) }
}

/// The handler of page faults.
pub(crate) fn fault_stub() -> &'static [u8] {
    between(&raw const real_mmu_fault, &raw const real_mmu_fault_end)
}

/// The handler of all other exceptions.
pub(crate) fn other_stub() -> &'static [u8] {
    between(&raw const real_mmu_other, &raw const real_mmu_other_end)
}

/// The ring-3 program.
pub(crate) fn program() -> &'static [u8] {
    between(&raw const real_mmu_program, &raw const real_mmu_callee)
}

/// The contents of data pages that are called: code that adds one to rax.
pub(crate) fn callee() -> &'static [u8] {
    between(&raw const real_mmu_callee, &raw const real_mmu_callee_end)
}

fn gva(label: *const u8) -> u64 {
    PROGRAM_GVA + (label as u64 - &raw const real_mmu_program as u64)
}

/// The operations of the program on a range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Routine {
    /// Returns the sum of the words.
    Load,
    /// Stores to each word its address plus a value.
    Store,
    /// Returns the number of words that differ from those that `Store` leaves.
    Verify,
    /// Calls each address, and returns the number of [callees](callee) that have run.
    Call,
    /// Adds a value to each word, atomically.
    Add,
    /// Stores to each word the number of the round, until it is told to stop. Returns the last
    /// number.
    Spin,
}

impl Routine {
    /// Its address.
    pub(crate) fn gva(self) -> u64 {
        gva(match self {
            Self::Load => &raw const real_mmu_load,
            Self::Store => &raw const real_mmu_store,
            Self::Verify => &raw const real_mmu_verify,
            Self::Call => &raw const real_mmu_call,
            Self::Add => &raw const real_mmu_add,
            Self::Spin => &raw const real_mmu_spin,
        })
    }
}

/// The address at which the program reports and then takes its next command.
pub(crate) fn top_gva() -> u64 {
    PROGRAM_GVA
}

/// The address at which it takes its first command.
pub(crate) fn next_gva() -> u64 {
    gva(&raw const real_mmu_next)
}
