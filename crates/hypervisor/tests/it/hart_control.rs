//! Jumps and branches, and the ways to stop a hart: budget, requests, halting.

use crate::support::hart::{CODE, DATA, Machine, NO_REQUEST, TestBus, asm::*};
use pageferry_hypervisor::hart::{Hart, HartExit};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

type Branch = fn(u32, u32, i32) -> u32;
type Condition = fn(u64, u64) -> bool;

#[test]
fn branches_compare_as_they_say() {
    let values = [0, 1, 5, i64::MAX as u64, i64::MIN as u64, u64::MAX];
    let table: [(&str, Branch, Condition); 6] = [
        ("beq", beq, |a, b| a == b),
        ("bne", bne, |a, b| a != b),
        ("blt", blt, |a, b| (a as i64) < b as i64),
        ("bge", bge, |a, b| a as i64 >= b as i64),
        ("bltu", bltu, |a, b| a < b),
        ("bgeu", bgeu, |a, b| a >= b),
    ];
    for (name, branch, taken) in table {
        for a in values {
            for b in values {
                for distance in [-8, 16, 2000, -4096, 4092] {
                    let mut machine = Machine::new(&[]);
                    let pc = CODE + 0x2000;
                    machine.ram().code(pc, &[branch(A0, A1, distance)]);
                    machine.hart.set_pc(pc).unwrap();
                    machine.hart.set_x(10, a);
                    machine.hart.set_x(11, b);
                    machine.step();
                    let target = if taken(a, b) {
                        pc.wrapping_add_signed(distance.into())
                    } else {
                        pc + 4
                    };
                    assert_eq!(machine.hart.pc(), target, "{name} {a:#x} {b:#x} {distance}");

                    // A target that is not a multiple of 4: only a taken branch raises the
                    // exception.
                    machine.ram().code(CODE + 0x1000, &[branch(A0, A1, 6)]);
                    machine.hart.set_pc(CODE + 0x1000).unwrap();
                    if taken(a, b) {
                        assert_eq!(machine.trap(), (0, CODE + 0x1006));
                    } else {
                        machine.step();
                        assert_eq!(machine.hart.pc(), CODE + 0x1004);
                    }
                }
            }
        }
    }
}

#[test]
fn jal_links_and_jumps_both_ways() {
    for distance in [4, -4, 8, 0x1000, -0x1000, 0xffffc, -0x100000, 0x7f8, 0x800] {
        let pc = CODE + 0x2000;
        let mut machine = Machine::new(&[]);
        machine.ram().code(pc, &[jal(RA, distance)]);
        machine.hart.set_pc(pc).unwrap();
        machine.step();
        assert_eq!(machine.hart.x(1), pc + 4);
        assert_eq!(machine.hart.pc(), pc.wrapping_add_signed(distance.into()));
    }
    let mut machine = Machine::new(&[jal(RA, 6)]);
    assert_eq!(machine.trap(), (0, CODE + 6), "x1 is unchanged");
}

#[test]
fn jalr_clears_the_lowest_bit() {
    for (base, offset, target) in [
        (DATA, 0, DATA),
        (DATA, 1, DATA),
        (DATA + 1, 4, DATA + 4),
        (DATA, -4, DATA - 4),
        (CODE + 9, 0, CODE + 8),
        (3, -3, 0),
        (0, -4, u64::MAX - 3),
    ] {
        let mut machine = Machine::new(&[jalr(RA, A1, offset)]);
        machine.hart.set_x(11, base);
        machine.step();
        assert_eq!((machine.hart.pc(), machine.hart.x(1)), (target, CODE + 4));
    }
    let mut machine = Machine::new(&[jalr(RA, A1, 1)]);
    machine.hart.set_x(11, DATA + 1);
    assert_eq!(machine.trap(), (0, DATA + 2));
}

#[test]
fn jalr_through_its_own_link_register() {
    let mut machine = Machine::new(&[jalr(RA, RA, 8)]);
    machine.hart.set_x(1, DATA);
    machine.step();
    assert_eq!((machine.hart.pc(), machine.hart.x(1)), (DATA + 8, CODE + 4));
}

#[test]
fn straight_line_code_goes_on_in_the_next_page() {
    let mut machine = Machine::new(&[]);
    let code = [addi(A0, A0, 1); 2048 + 512];
    machine.ram().code(CODE, &code);
    assert_eq!(machine.run(code.len() as u64), HartExit::Budget);
    assert_eq!(machine.hart.x(10), code.len() as u64);
    assert_eq!(machine.hart.instret(), code.len() as u64);
    assert_eq!(machine.hart.pc(), CODE + 4 * code.len() as u64);
}

/// There are more code pages than the decoded-code cache holds.
#[test]
fn code_in_many_pages() {
    let ram = crate::support::hart::Ram::new(64);
    for page in 0..40 {
        let back = -39 * 0x1000;
        let next = if page == 39 { back } else { 0x1000 };
        ram.code(
            CODE + page * 0x1000,
            &[jal(X0, 8), 0, addi(A0, A0, 1), jal(X0, next - 12)],
        );
    }
    let mut hart = Hart::new();
    hart.set_pc(CODE).unwrap();
    let mut bus = TestBus::new(ram);
    assert_eq!(
        hart.run(&mut bus, &NO_REQUEST, Some(3 * 40 * 5)),
        HartExit::Budget
    );
    assert_eq!((hart.x(10), hart.pc()), (200, CODE));
}

proptest! {
    /// The budget is exact at any value, and instret counts it.
    #[test]
    fn the_budget_is_exact(length in 1_u64..2000, parts in prop::collection::vec(0_u64..3000, 1..8)) {
        // A loop of `length` additions.
        let mut machine = Machine::new(&[]);
        let mut code = vec![addi(A0, A0, 1); length as usize];
        code.push(jal(X0, -4 * length as i32));
        machine.ram().code(CODE, &code);
        let mut total = 0;
        for part in parts {
            prop_assert_eq!(machine.run(part), HartExit::Budget);
            total += part;
            prop_assert_eq!(machine.hart.instret(), total);
            prop_assert_eq!(machine.hart.pc(), CODE + 4 * (total % (length + 1)));
            let rounds = total / (length + 1);
            prop_assert_eq!(machine.hart.x(10), total - rounds);
        }
    }
}

/// If a guest's trap handler traps, the guest retires nothing, and the budget still ends it.
#[test]
fn the_budget_ends_a_trap_loop() {
    let mut machine = Machine::new(&[0]);
    let mut state = machine.hart.state();
    state.stvec = CODE;
    machine.hart.set_state(&state).unwrap();
    assert_eq!(machine.run(1000), HartExit::Budget);
    assert_eq!((machine.hart.instret(), machine.hart.pc()), (0, CODE));
}

#[test]
fn a_standing_request_keeps_the_guest_from_running() {
    let mut machine = Machine::new(&[addi(A0, A0, 1); 4]);
    let request = AtomicU32::new(1);
    for _ in 0..2 {
        assert_eq!(
            machine.hart.run(&mut machine.bus, &request, Some(4)),
            HartExit::Requested
        );
        assert_eq!((machine.hart.instret(), machine.hart.pc()), (0, CODE));
    }
    request.store(0, Ordering::Relaxed);
    assert_eq!(
        machine.hart.run(&mut machine.bus, &request, Some(4)),
        HartExit::Budget
    );
    assert_eq!(machine.hart.x(10), 4);
}

/// Every kind of endless loop notices a request from another thread.
#[test]
fn a_request_ends_any_loop() {
    let loops: &[(&str, &[u32])] = &[
        ("branch", &[addi(A0, A0, 1), beq(X0, X0, -4)]),
        ("forward branch", &[beq(X0, X0, 8), 0, jal(X0, -8)]),
        ("jal to itself", &[jal(X0, 0)]),
        ("jalr in a page", &[auipc(T0, 0), jalr(X0, T0, 0)]),
        (
            "over a page edge",
            &[
                lui(T0, 0x1),
                auipc(T1, 0),
                add(T0, T0, T1),
                jalr(RA, T0, -4),
            ],
        ),
        ("csr", &[csrrs(A0, 0xc02, X0), jal(X0, -4)]),
        ("traps", &[0]),
    ];
    for (name, code) in loops {
        let mut machine = Machine::new(code);
        machine.ram().code(CODE + 0x1000, &[jalr(X0, RA, -16)]);
        let mut state = machine.hart.state();
        state.stvec = CODE;
        machine.hart.set_state(&state).unwrap();
        let request = Arc::new(AtomicU32::new(0));
        let kicker = std::thread::spawn({
            let request = Arc::clone(&request);
            move || {
                std::thread::sleep(Duration::from_millis(2));
                request.store(1, Ordering::Relaxed);
            }
        });
        // With a budget, a hart that misses the request fails the test and does not hang it.
        let exit = machine
            .hart
            .run(&mut machine.bus, &request, Some(2_000_000_000));
        assert_eq!(exit, HartExit::Requested, "{name}");
        kicker.join().unwrap();
        // The hart stops between two instructions, and continues there.
        let retired = machine.hart.instret();
        assert_eq!(machine.run(100), HartExit::Budget);
        assert!(machine.hart.instret() > retired || *name == "traps");
    }
}

#[test]
fn ecall_leaves_the_guest_behind_itself() {
    let mut machine = Machine::new(&[ECALL, add(A2, A0, A1)]);
    for (x, value) in (10..18).zip(100..) {
        machine.hart.set_x(x, value);
    }
    let args = [100, 101, 102, 103, 104, 105, 106, 107];
    assert_eq!(machine.run(10), HartExit::Ecall { args });
    // The manual, 3.3.1: ECALL is not considered to retire.
    assert_eq!((machine.hart.pc(), machine.hart.instret()), (CODE + 4, 0));
    machine.hart.set_x(10, 40);
    machine.hart.set_x(11, 2);
    machine.step();
    assert_eq!(machine.hart.x(12), 42);
}

#[test]
fn wfi_halts_behind_itself() {
    let mut machine = Machine::new(&[WFI, addi(A0, A0, 1)]);
    assert_eq!(machine.run(10), HartExit::Halted);
    assert_eq!((machine.hart.pc(), machine.hart.instret()), (CODE + 4, 1));
    machine.step();
    assert_eq!(machine.hart.x(10), 1);
}

#[test]
fn fence_i_makes_stored_code_run() {
    let new = addi(A0, X0, 2);
    let code = |fence| {
        [
            addi(A0, X0, 1),
            sw(A1, A2, 0),
            fence,
            beq(A3, X0, 8),
            ECALL,
            addi(A3, X0, 1),
            jal(X0, -24),
        ]
    };
    for (fence, expected) in [(FENCE_I, 2), (addi(X0, X0, 0), 1)] {
        let mut machine = Machine::new(&code(fence));
        machine.hart.set_x(11, new.into());
        machine.hart.set_x(12, CODE);
        assert!(matches!(machine.run(100), HartExit::Ecall { .. }));
        // Without the fence both results are legal. This hart keeps its decoded code.
        assert_eq!(machine.hart.x(10), expected);
    }
}

#[test]
fn the_vmm_can_invalidate_code() {
    let mut machine = Machine::new(&[addi(A0, X0, 1), jal(X0, -4)]);
    machine.run(2);
    machine.ram().code(CODE, &[addi(A0, X0, 2)]);
    machine.run(2);
    assert_eq!(machine.hart.x(10), 1, "decoded before");
    machine.hart.invalidate_code_page(CODE + 0x1000);
    machine.run(2);
    assert_eq!(machine.hart.x(10), 1, "another page");
    machine.hart.invalidate_code_page(CODE + 0xffc);
    machine.run(2);
    assert_eq!(machine.hart.x(10), 2);
    machine.ram().code(CODE, &[addi(A0, X0, 3)]);
    machine.hart.invalidate_code();
    machine.run(2);
    assert_eq!(machine.hart.x(10), 3);
}
