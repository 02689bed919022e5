//! What each hart runs, and what it must find.

use super::host::{MEMORY, page_of};
use crate::support::fleet::{A4, A5, A6, T3, T4, set as set_registers};
use crate::support::vm::{PAGE, asm::*};
use pageferry_hypervisor::VcpuCore;
use std::ops::RangeInclusive;

pub(crate) const HARTS: usize = 8;
/// A power of two.
pub(crate) const PAGES: u64 = 2048;
/// Over each block of pages.
pub(crate) const ROUNDS: u64 = 32;
const BLOCK: i32 = 64;
/// The bits of a word that are its address; the number of the round is above.
const ADDRESS_BITS: i32 = 36;

const S2: u32 = 18;
const S3: u32 = 19;
const S4: u32 = 20;
const S5: u32 = 21;

/// The offset of a hart's word in a page: lines of their own.
pub(crate) const fn word(id: u64) -> u64 {
    64 + id * 64
}

/// Where a hart says how many rounds it has made.
pub(crate) const fn rounds(id: u64) -> u64 {
    PAGE + id * 64
}

/// What a hart's round `round` leaves in its word of a page: which nobody else stores, there or
/// elsewhere.
pub(crate) const fn value(id: u64, page: u64, round: u64) -> u64 {
    (round << ADDRESS_BITS) + MEMORY + page * PAGE + word(id)
}

/// For ever: goes over all pages in its own order, in blocks, and some rounds over each block, so
/// that pages are found in the TLB that were put there long ago. In each page it finds what its
/// last round left, and another hart's word, which must be of that address; stores what this round
/// leaves, and finds that.
///
/// a0: the last pass's last round; each pass has the same rounds in all blocks. s4: round. s2:
/// pages before the block. s5: the block's first page. t0: pages of the round. a4: page. a1: the
/// word of page 0. a2: mask of page numbers. a3: pages from one to the next; odd. a5: where it says
/// how many rounds it has made. a6: from its word to the other hart's.
pub(crate) fn program() -> Vec<u32> {
    let back = |code: &Vec<u32>, to: usize| -4 * (code.len() - to) as i32;
    let mut wrong = Vec::new();
    let mut code = vec![add(S2, X0, X0)];
    let block = code.len();
    code.extend([addi(S4, A0, 1), add(S3, X0, X0)]);
    let round = code.len();
    code.extend([add(A4, S5, X0), add(T0, X0, X0)]);
    let page = code.len();
    code.extend([
        and(A4, A4, A2),
        slli(T1, A4, 12),
        add(T1, T1, A1),
        addi(T2, S4, -1),
        slli(T2, T2, ADDRESS_BITS),
        add(T2, T2, T1),
        ld(T3, T1, 0),
    ]);
    wrong.push((code.len(), T2));
    code.extend([
        0,
        slli(T2, S4, ADDRESS_BITS),
        add(T2, T2, T1),
        sd(T2, T1, 0),
        add(T4, T1, A6),
        ld(T3, T4, 0),
        slli(T3, T3, 64 - ADDRESS_BITS),
        srli(T3, T3, 64 - ADDRESS_BITS),
    ]);
    wrong.push((code.len(), T4));
    code.extend([0, ld(T3, T1, 0)]);
    wrong.push((code.len(), T2));
    code.extend([0, add(A4, A4, A3), addi(T0, T0, 1), addi(T4, X0, BLOCK)]);
    code.push(bltu(T0, T4, back(&code, page)));
    code.extend([
        addi(S4, S4, 1),
        addi(S3, S3, 1),
        addi(T4, X0, ROUNDS as i32),
    ]);
    code.push(bltu(S3, T4, back(&code, round)));
    code.extend([add(S5, A4, X0), addi(S2, S2, BLOCK)]);
    code.push(bgeu(A2, S2, back(&code, block)));
    code.extend([addi(A0, A0, ROUNDS as i32), sd(A0, A5, 0)]);
    code.push(jal(X0, back(&code, 0)));
    for (at, expected) in wrong {
        code[at] = bne(T3, expected, 4 * (code.len() - at) as i32);
    }
    code.push(ECALL);
    code
}

/// Lets a hart begin its first pass over memory as round 0 left it.
pub(crate) fn set(vcpu: &mut VcpuCore, id: u64) {
    let other = word((id + 1) % HARTS as u64);
    let registers = [
        (A1, MEMORY + word(id)),
        (A2, PAGES - 1),
        (A3, 2 * (37 * id % PAGES) + 1),
        (S5, id * PAGES / HARTS as u64),
        (A5, rounds(id)),
        (A6, other.wrapping_sub(word(id))),
    ];
    set_registers(vcpu, 0, &registers);
}

/// The rounds of which a hart's words can be now.
pub(crate) fn rounds_now(vcpu: &VcpuCore) -> RangeInclusive<u64> {
    let last = vcpu.hart().x(A0 as u8);
    last..=last + ROUNDS
}

/// What a hart has found that it should not have.
pub(crate) fn describe(vcpu: &VcpuCore) -> String {
    let x = |register: u32| vcpu.hart().x(register as u8);
    format!(
        "hart {}, round {}, {} pages of it done, {}: {:#x} is there; own {:#x}, expected {:#x}; other {:#x}",
        vcpu.id(),
        x(S4),
        x(T0),
        page_of(x(T1)),
        x(T3),
        x(T1),
        x(T2),
        x(T4),
    )
}
