//! LR and SC between vCPUs, through the vCPUs' TLBs.

use crate::support::vm::{HostRam, PAGE, asm::*, vcpu, vm};
use pageferry_hypervisor::{Exit, VcpuCore};

const WORD: u64 = 2 * PAGE + 64;

fn run_from(vcpu: &mut VcpuCore, pc: u64) {
    vcpu.hart_mut().set_pc(pc).unwrap();
    assert_eq!(vcpu.run(), Exit::Halted);
}

/// The first vCPU reserves a word. The second vCPU stores another value and then the old value, by
/// one kind of store each time. The first vCPU's SC must fail, although the value is the same.
#[test]
fn a_store_by_another_vcpu_ends_a_reservation_whatever_it_stores() {
    let ram = HostRam::new(4);
    ram.code(
        0,
        &[
            atomic(LR, D, A0, A1, 0),
            WFI,
            atomic(SC, D, A3, A1, A2),
            WFI,
        ],
    );
    // a1: the word, x6: another value, x7: the old one.
    let ways: [(&str, &[u32]); 5] = [
        ("stores", &[sd(T1, A1, 0), sd(T2, A1, 0), WFI]),
        ("narrow stores", &[sb(T1, A1, 3), sb(X0, A1, 3), WFI]),
        ("misaligned stores", &[sw(T1, A1, -2), sw(X0, A1, -2), WFI]),
        (
            "atomics",
            &[
                atomic(AMOSWAP, D, X0, A1, T1),
                atomic(AMOSWAP, D, X0, A1, T2),
                WFI,
            ],
        ),
        (
            "SC",
            &[
                atomic(LR, D, X0, A1, 0),
                atomic(SC, D, X0, A1, T1),
                atomic(LR, D, X0, A1, 0),
                atomic(SC, D, X0, A1, T2),
                WFI,
            ],
        ),
    ];
    let vm = vm(&ram);
    let [mut first, mut second] = [0, 1].map(|id| {
        let mut vcpu = vcpu(&vm, id, 0);
        vcpu.hart_mut().set_x(11, WORD);
        vcpu.hart_mut().set_x(12, 99);
        vcpu.hart_mut().set_x(6, 0xff);
        vcpu
    });
    for (name, code) in ways {
        ram.code(PAGE, code);
        second.hart_mut().invalidate_code();
        // The TLB may have the page as writable before the first LR in it.
        run_from(&mut second, PAGE);
        assert_eq!(ram.get(WORD), 0, "{name}: the old value again");
        run_from(&mut first, 0);
        run_from(&mut second, PAGE);
        run_from(&mut first, 8);
        assert_eq!(first.hart().x(13), 1, "{name}: the SC did not see them");
        assert_eq!(ram.get(WORD), 0);
        // Without those stores, the SC succeeds.
        run_from(&mut first, 0);
        run_from(&mut first, 8);
        assert_eq!((first.hart().x(13), ram.get(WORD)), (0, 99), "{name}");
        ram.set(WORD, 0);
    }
}
