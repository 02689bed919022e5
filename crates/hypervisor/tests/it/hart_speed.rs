//! Measurements of the guest instructions that one hart executes in a second. Run them by
//! `cargo test --release -p pageferry-hypervisor --test it -- --ignored --nocapture hart_speed::`.

use crate::support::hart::{DATA, Machine, asm::*};
use pageferry_hypervisor::hart::HartExit;
use std::time::Instant;

/// Runs `code`, an endless loop. Returns millions of instructions a second, the best of five runs.
fn measure(name: &str, code: &[u32]) -> f64 {
    let mut machine = Machine::new(code);
    machine.hart.set_x(8, DATA);
    machine.hart.set_x(9, 0x9e37_79b9_7f4a_7c15);
    let instructions = 40_000_000;
    let best = (0..5)
        .map(|_| {
            let start = Instant::now();
            assert_eq!(machine.run(instructions), HartExit::Budget);
            start.elapsed()
        })
        .min()
        .unwrap();
    let speed = instructions as f64 / best.as_secs_f64() / 1e6;
    println!("{name}: {speed:.0} M instructions/s");
    speed
}

#[test]
#[ignore = "measures: guest instructions per second"]
fn speed() {
    const S0: u32 = 8;
    const S1: u32 = 9;
    let mixed = measure(
        "load, mul, add, xor, store",
        &[
            ld(A0, S0, 0),
            mul(A0, A0, S1),
            addi(A1, A1, 1),
            xor(A0, A0, A1),
            sd(A0, S0, 0),
            jal(X0, -20),
        ],
    );
    // A pseudo-random walk that rewrites a page, like the demo's workload.
    let walk = measure(
        "page rewrite",
        &[
            mul(A0, A0, S1),
            addi(A0, A0, 13),
            andi(T0, A0, 0x7f8),
            add(T0, T0, S0),
            ld(A2, T0, 0),
            add(A3, A3, A2),
            xor(A2, A2, A0),
            sd(A2, T0, 0),
            addi(T1, T1, 1),
            bne(T1, X0, -36),
            jal(X0, -40),
        ],
    );
    let arithmetic = measure(
        "add and branch",
        &[addi(A0, A0, 1), addi(A1, A1, 1), bne(A0, X0, -8)],
    );
    let calls = measure(
        "call and return",
        &[
            jal(RA, 12),
            addi(A0, A0, 1),
            jal(X0, -8),
            addi(A1, A1, 1),
            jalr(X0, RA, 0),
        ],
    );
    let atomics = measure("AMO", &[atomic(AMOADD, D, A0, S0, S1), jal(X0, -4)]);
    let counting = measure("CSR read", &[csrrs(A0, 0xc02, X0), jal(X0, -4)]);
    if !cfg!(debug_assertions) {
        for hot in [mixed, walk, arithmetic, calls] {
            assert!(hot >= 60.0, "{hot:.0} M instructions/s is too slow");
        }
        assert!(atomics >= 10.0 && counting >= 10.0);
    }
}
