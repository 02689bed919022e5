//! Programs that go over pages. They store a value to one word of each page, which no other program
//! stores there, and check it.

use super::fleet::{T3, set};
use crate::support::vm::{HostRam, PAGE, asm::*};
use pageferry_hypervisor::VcpuCore;
use std::sync::Arc;

/// The address of the program that stores. The value is the page's address plus the tag, in the
/// first word of each page.
pub(crate) const STORE: u64 = 0;
/// The address of a program that does nothing.
pub(crate) const HALT: u64 = STORE + 16;
/// The address of the program that loads and compares. It leaves by `ECALL` at a wrong value.
pub(crate) const CHECK: u64 = 64;
/// The address for a program of the test.
pub(crate) const OWN: u64 = 128;

/// A page with these programs.
pub(crate) fn code() -> Arc<HostRam> {
    let code = HostRam::new(1);
    let store = [
        add(T2, A0, A1),
        sd(T2, A1, 0),
        add(A1, A1, T1),
        bltu(A1, A2, -12),
        WFI,
    ];
    let check = [
        add(T2, A0, A1),
        ld(T3, A1, 0),
        bne(T2, T3, 16),
        add(A1, A1, T1),
        bltu(A1, A2, -16),
        WFI,
        ECALL,
    ];
    code.code(STORE, &store);
    code.code(CHECK, &check);
    code
}

/// Makes `vcpu` begin `program` over the pages from address `first` to `end`.
pub(crate) fn begin(vcpu: &mut VcpuCore, program: u64, tag: u64, first: u64, end: u64) {
    let registers = [(A0, tag), (A1, first), (A2, end), (T1, PAGE)];
    set(vcpu, program, &registers);
}
