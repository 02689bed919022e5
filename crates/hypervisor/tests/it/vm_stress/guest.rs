//! The program of each hart, and the words that it must find.

use super::host::{MEMORY, page_of};
use crate::support::fleet::{A4, A5, A6, T3, T4, set as set_registers};
use crate::support::vm::{PAGE, asm::*};
use pageferry_hypervisor::VcpuCore;
use std::ops::RangeInclusive;

pub(crate) const HARTS: usize = 8;
/// The number of pages, a power of two.
pub(crate) const PAGES: u64 = 2048;
/// The number of rounds over each block of pages.
pub(crate) const ROUNDS: u64 = 32;
const BLOCK: i32 = 64;
/// The number of low bits of a word that hold its address. The number of the round is above.
const ADDRESS_BITS: i32 = 36;

const S2: u32 = 18;
const S3: u32 = 19;
const S4: u32 = 20;
const S5: u32 = 21;

/// The offset of a hart's word in a page. Harts share no cache line.
pub(crate) const fn word(id: u64) -> u64 {
    64 + id * 64
}

/// The address for a hart's number of rounds.
pub(crate) const fn rounds(id: u64) -> u64 {
    PAGE + id * 64
}

/// The value of a hart's word in a page after round `round`. It is stored nowhere else.
pub(crate) const fn value(id: u64, page: u64, round: u64) -> u64 {
    (round << ADDRESS_BITS) + MEMORY + page * PAGE + word(id)
}

/// An endless loop over all pages in blocks, in the hart's order. It makes some rounds over each
/// block, so that it hits old TLB entries. In each page,
/// 1. it loads its word, which must have the value of the last round;
/// 2. it stores the value of this round;
/// 3. it loads another hart's word, which must have the address of that word;
/// 4. it loads its word again, which must have the value of this round.
///
/// a0: the last round of the last pass. Each pass has the same rounds in all blocks. s4: round. s2:
/// pages before the block. s5: the block's first page. t0: pages of the round. a4: page. a1: the
/// word of page 0. a2: mask of page numbers. a3: distance between pages, odd. a5: address for the
/// number of rounds. a6: distance from its word to the other hart's.
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

/// Makes a hart begin its first pass, over memory in the state of round 0.
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

/// The possible rounds of a hart's words now.
pub(crate) fn rounds_now(vcpu: &VcpuCore) -> RangeInclusive<u64> {
    let last = vcpu.hart().x(A0 as u8);
    last..=last + ROUNDS
}

/// Describes a wrong word that a hart has found.
pub(crate) fn describe(vcpu: &VcpuCore) -> String {
    let x = |register: u32| vcpu.hart().x(register as u8);
    format!(
        "hart {}, round {}, {} of its pages done, {}: found {:#x}; own {:#x}, expected {:#x}; other {:#x}",
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
