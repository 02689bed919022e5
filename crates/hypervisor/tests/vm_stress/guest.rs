//! What each hart runs, and what it must find.

use crate::host::{MEMORY, page_of};
use crate::vm_fleet::{A4, A5, A6, T3, T4, set as set_registers};
use crate::vm_support::{PAGE, asm::*};
use pageferry_hypervisor::VcpuCore;

pub(crate) const HARTS: usize = 8;
/// A power of two.
pub(crate) const PAGES: u64 = 2048;
/// The bits of a word that are its address; the number of the pass is above.
const ADDRESS_BITS: i32 = 36;

/// The offset of a hart's word in a page: lines of their own.
pub(crate) const fn word(id: u64) -> u64 {
    64 + id * 64
}

/// Where a hart says how often it has gone over its memory.
pub(crate) const fn passes(id: u64) -> u64 {
    PAGE + id * 64
}

/// What a hart's pass `pass` leaves in its word of a page: which nobody else stores, there or elsewhere.
pub(crate) const fn value(id: u64, page: u64, pass: u64) -> u64 {
    (pass << ADDRESS_BITS) + MEMORY + page * PAGE + word(id)
}

/// For ever: goes over all pages in its own order. In each it finds what its last pass left, and another hart's word, which
/// must be of that address; stores what this pass leaves, and finds that.
///
/// a0: pass. t0: pages of it. a1: its word of the first page. a2: mask of page numbers. a3: pages from one to the next; odd.
/// a4: page. a5: where it counts passes. a6: from its word to the other hart's.
pub(crate) fn program() -> Vec<u32> {
    let mut code = vec![
        addi(A0, A0, 1),
        add(T0, X0, X0),
        // Each page.
        add(A4, A4, A3),
        and(A4, A4, A2),
        slli(T1, A4, 12),
        add(T1, T1, A1),
        addi(T2, A0, -1),
        slli(T2, T2, ADDRESS_BITS),
        add(T2, T2, T1),
        ld(T3, T1, 0),
        bne(T3, T2, 60),
        slli(T2, A0, ADDRESS_BITS),
        add(T2, T2, T1),
        sd(T2, T1, 0),
        add(T4, T1, A6),
        ld(T3, T4, 0),
        slli(T3, T3, 64 - ADDRESS_BITS),
        srli(T3, T3, 64 - ADDRESS_BITS),
        bne(T3, T4, 28),
        ld(T3, T1, 0),
        bne(T3, T2, 20),
        addi(T0, T0, 1),
        bgeu(A2, T0, -80),
        sd(A0, A5, 0),
    ];
    let back = -4 * code.len() as i32;
    code.extend([jal(X0, back), ECALL]);
    code
}

/// Lets a hart begin its first pass over memory as pass 0 left it.
pub(crate) fn set(vcpu: &mut VcpuCore, id: u64) {
    let other = word((id + 1) % HARTS as u64);
    let registers = [
        (A1, MEMORY + word(id)),
        (A2, PAGES - 1),
        (A3, 2 * (37 * id % PAGES) + 1),
        (A4, id * PAGES / HARTS as u64),
        (A5, passes(id)),
        (A6, other.wrapping_sub(word(id))),
    ];
    set_registers(vcpu, 0, &registers);
}

/// The pass a hart is in.
pub(crate) fn pass(vcpu: &VcpuCore) -> u64 {
    vcpu.hart().x(A0 as u8)
}

/// What a hart has found that it should not have.
pub(crate) fn describe(vcpu: &VcpuCore) -> String {
    let x = |register: u32| vcpu.hart().x(register as u8);
    format!(
        "hart {}, pass {}, {} pages of it done, {}: {:#x} is there; own {:#x}, expected {:#x}; other {:#x}",
        vcpu.id(),
        x(A0),
        x(T0),
        page_of(x(T1)),
        x(T3),
        x(T1),
        x(T2),
        x(T4),
    )
}
