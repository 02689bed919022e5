//! The A extension: AMOs, LR and SC, alone and between harts on threads.

use crate::support::hart::{CODE, DATA, Machine, NO_REQUEST, Page, RAM, Ram, TestBus, asm::*};
use pageferry_hypervisor::hart::{Hart, HartExit, Reservations};
use pageferry_testkit::LIMIT;
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Instant;

const MIN_W: u64 = i32::MIN as i64 as u64;

/// Does one AMO on `memory` with `operand`. Returns the register's value and memory's new value.
fn amo(funct5: u32, width: u32, memory: u64, operand: u64) -> (u64, u64) {
    let mut machine = Machine::new(&[atomic(funct5, width, A0, A1, A2)]);
    machine.ram().set(DATA + 8, memory);
    machine.hart.set_x(11, DATA + 8);
    machine.hart.set_x(12, operand);
    machine.step();
    (machine.hart.x(10), machine.ram().get(DATA + 8))
}

#[test]
fn amos_on_doublewords() {
    const NEG: u64 = (-5_i64) as u64;
    for (name, funct5, memory, operand, stored) in [
        ("swap", AMOSWAP, 1, 2, 2),
        ("add wraps", AMOADD, u64::MAX, 2, 1),
        ("xor", AMOXOR, 0xff00, 0x0ff0, 0xf0f0),
        ("and", AMOAND, 0xff00, 0x0ff0, 0x0f00),
        ("or", AMOOR, 0xff00, 0x0ff0, 0xfff0),
        ("min is signed", AMOMIN, 3, NEG, NEG),
        ("min keeps", AMOMIN, NEG, 3, NEG),
        ("max is signed", AMOMAX, NEG, 3, 3),
        ("max keeps", AMOMAX, 3, NEG, 3),
        ("minu is unsigned", AMOMINU, 3, NEG, 3),
        ("minu", AMOMINU, NEG, 3, 3),
        ("maxu is unsigned", AMOMAXU, 3, NEG, NEG),
        ("maxu keeps", AMOMAXU, NEG, 3, NEG),
    ] {
        assert_eq!(amo(funct5, D, memory, operand), (memory, stored), "{name}");
    }
}

/// Word forms ignore the operand's upper half, sign-extend the result, and do not change the next
/// word.
#[test]
fn amos_on_words() {
    const REST: u64 = 0x1111_2222_0000_0000;
    for (name, funct5, memory, operand, stored) in [
        ("swap", AMOSWAP, 0x8000_0000, 0xffff_ffff_0000_0007, 7),
        ("add wraps", AMOADD, 0xffff_ffff, 2, 1),
        ("xor", AMOXOR, 0xff00, 0x0ff0, 0xf0f0),
        ("and", AMOAND, 0xff00, 0x0ff0, 0x0f00),
        ("or", AMOOR, 0xff00, 0x0ff0, 0xfff0),
        ("min is signed", AMOMIN, 3, 0x8000_0000, 0x8000_0000),
        (
            "min ignores the upper half",
            AMOMIN,
            3,
            0xffff_ffff_0000_0004,
            3,
        ),
        ("max is signed", AMOMAX, 0x8000_0000, 3, 3),
        ("minu is unsigned", AMOMINU, 0x8000_0000, 3, 3),
        ("maxu is unsigned", AMOMAXU, 3, 0x8000_0000, 0x8000_0000),
        ("maxu ignores the upper half", AMOMAXU, 3, 0x1_0000_0002, 3),
    ] {
        let (old, after) = amo(funct5, W, REST | memory, operand);
        assert_eq!(old, i64::from(memory as u32 as i32) as u64, "{name}");
        assert_eq!(after, REST | stored, "{name}");
    }
}

proptest! {
    #[test]
    fn amos_match_their_formulas(memory in any::<u64>(), operand in any::<u64>(), near in -2_i64..3) {
        for operand in [operand, memory.wrapping_add(near as u64)] {
            let (m, o) = (memory as i64, operand as i64);
            let low = memory as u32;
            let (mw, ow) = (low as i32, operand as i32);
            for (funct5, wide, word) in [
                (AMOSWAP, operand, operand as u32),
                (AMOADD, memory.wrapping_add(operand), low.wrapping_add(operand as u32)),
                (AMOXOR, memory ^ operand, low ^ operand as u32),
                (AMOAND, memory & operand, low & operand as u32),
                (AMOOR, memory | operand, low | operand as u32),
                (AMOMIN, if m < o { memory } else { operand }, if mw < ow { mw } else { ow } as u32),
                (AMOMAX, if m > o { memory } else { operand }, if mw > ow { mw } else { ow } as u32),
                (AMOMINU, memory.min(operand), low.min(operand as u32)),
                (AMOMAXU, memory.max(operand), low.max(operand as u32)),
            ] {
                prop_assert_eq!(amo(funct5, D, memory, operand), (memory, wide));
                let upper = memory & !0xffff_ffff;
                let returned = i64::from(mw) as u64;
                prop_assert_eq!(amo(funct5, W, memory, operand), (returned, upper | u64::from(word)));
            }
        }
    }
}

#[test]
fn aq_and_rl_change_no_result() {
    for bits in 0..4 {
        let mut machine = Machine::new(&[
            atomic(AMOADD, D, A0, A1, A2) | bits << 25,
            atomic(LR, W, A0, A1, 0) | bits << 25,
            atomic(SC, W, A3, A1, A2) | bits << 25,
        ]);
        machine.hart.set_x(11, DATA);
        machine.hart.set_x(12, 3);
        for _ in 0..3 {
            machine.step();
        }
        assert_eq!((machine.hart.x(10), machine.hart.x(13)), (3, 0));
    }
}

#[test]
fn misaligned_atomics_are_exceptions() {
    for (width, offsets) in [(W, &[1, 2, 3][..]), (D, &[1, 2, 4, 6])] {
        for &offset in offsets {
            for (instruction, cause) in [
                (atomic(LR, width, A0, A1, 0), 4),
                (atomic(SC, width, A0, A1, A2), 6),
                (atomic(AMOSWAP, width, A0, A1, A2), 6),
                (atomic(AMOMAXU, width, A0, A1, A2), 6),
            ] {
                let mut machine = Machine::new(&[instruction]);
                machine.hart.set_x(11, DATA + offset);
                assert_eq!(machine.trap(), (cause, DATA + offset));
            }
        }
    }
}

/// Machines with both ways to decide on an SC: by comparison and by [`Reservations`].
fn machines(code: &[u32]) -> [Machine; 2] {
    let mut watched = Machine::new(code);
    let reservations = Arc::new(Reservations::new());
    reservations.announce(DATA);
    reservations.confirm(DATA);
    watched.bus = TestBus::with_reservations(Arc::clone(&watched.bus.ram), &reservations);
    let mut both = [Machine::new(code), watched];
    for machine in &mut both {
        machine.hart.set_x(11, DATA);
        machine.hart.set_x(12, 77);
        machine.hart.set_x(13, DATA + 8);
    }
    both
}

#[test]
fn sc_stores_after_its_lr() {
    for width in [W, D] {
        let code = [atomic(LR, width, T0, A1, 0), atomic(SC, width, A0, A1, A2)];
        for mut machine in machines(&code) {
            machine.ram().set(DATA, 0x1111_1111_8000_0000_u64);
            machine.hart.set_x(10, 9);
            machine.step();
            let loaded = if width == W {
                MIN_W
            } else {
                0x1111_1111_8000_0000
            };
            assert_eq!(machine.hart.x(5), loaded, "LR.W sign-extends");
            machine.step();
            assert_eq!(machine.hart.x(10), 0);
            let stored = if width == W {
                0x1111_1111_0000_004d
            } else {
                77
            };
            assert_eq!(machine.ram().get::<u64>(DATA), stored);
        }
    }
}

#[test]
fn sc_without_its_reservation_fails_and_stores_nothing() {
    let lr_w = atomic(LR, W, T0, A1, 0);
    let lr_d = atomic(LR, D, T0, A1, 0);
    let sc_w = atomic(SC, W, A0, A1, A2);
    let sc_d = atomic(SC, D, A0, A1, A2);
    let cases: &[(&str, &[u32])] = &[
        ("no LR at all", &[sc_d]),
        ("another address", &[atomic(LR, D, T0, A3, 0), sc_d]),
        ("another width", &[lr_d, sc_w]),
        ("another width, the other way round", &[lr_w, sc_d]),
        ("a second SC", &[lr_d, atomic(SC, D, T1, A3, A2), sc_d]),
        (
            "only the last LR counts",
            &[lr_d, atomic(LR, D, T0, A3, 0), sc_d],
        ),
        ("own store in between", &[lr_d, sd(T2, A1, 0), sc_d]),
        (
            "own AMO in between",
            &[lr_d, atomic(AMOADD, D, T0, A1, T2), sc_d],
        ),
    ];
    for (name, code) in cases {
        for mut machine in machines(code) {
            machine.ram().set(DATA, 5_u64);
            machine.hart.set_x(7, 5);
            if name.starts_with("own store") {
                machine.hart.set_x(7, 6);
            }
            for _ in 1..code.len() {
                machine.step();
            }
            let before: u64 = machine.ram().get(DATA);
            machine.step();
            assert_eq!(machine.hart.x(10), 1, "{name}");
            assert_eq!(machine.ram().get::<u64>(DATA), before, "{name}");
        }
    }
}

#[test]
fn sc_fails_after_an_sc_that_succeeded() {
    let sc = atomic(SC, D, A0, A1, A2);
    for mut machine in machines(&[atomic(LR, D, T0, A1, 0), sc, sc]) {
        machine.step();
        machine.step();
        assert_eq!(machine.hart.x(10), 0);
        machine.step();
        assert_eq!(machine.hart.x(10), 1);
    }
}

#[test]
fn a_reservation_outlives_a_memory_fault_of_its_sc_but_not_a_move() {
    let code = [atomic(LR, D, T0, A1, 0), atomic(SC, D, A0, A1, A2)];
    for moves in [false, true] {
        for mut machine in machines(&code) {
            machine.step();
            machine.ram().set_page(DATA, Page::Missing);
            machine.bus.flush();
            assert!(matches!(machine.run(1), HartExit::MemoryFault { .. }));
            machine.ram().set_page(DATA, Page::Present);
            if moves {
                let state = machine.hart.state();
                machine.hart.set_state(&state).unwrap();
            }
            machine.step();
            assert_eq!(machine.hart.x(10), u64::from(moves));
        }
    }
}

/// Two harts on one RAM with [`Reservations`].
fn pair(first: &[u32], second: &[u32]) -> [Machine; 2] {
    let reservations = Arc::new(Reservations::new());
    let mut one = Machine::new(first);
    let ram = Arc::clone(&one.bus.ram);
    one.bus = TestBus::with_reservations(Arc::clone(&ram), &reservations);
    ram.code(CODE + 0x1000, second);
    let mut other = Machine {
        hart: Hart::new(),
        bus: TestBus::with_reservations(ram, &reservations),
    };
    other.hart.set_pc(CODE + 0x1000).unwrap();
    for machine in [&mut one, &mut other] {
        machine.hart.set_x(11, DATA);
    }
    // The second hart has the page as writable in its TLB before the first LR.
    other.ram().code(CODE + 0x1800, &[sd(X0, A1, 0)]);
    let pc = other.hart.pc();
    other.hart.set_pc(CODE + 0x1800).unwrap();
    other.step();
    other.hart.set_pc(pc).unwrap();

    // The first LR leaves the guest, and the VMM makes the page watched.
    assert_eq!(one.run(1), HartExit::Requested);
    let page = one.bus.to_watch.take().unwrap();
    reservations.announce(page);
    one.bus.flush_writes();
    other.bus.flush_writes();
    reservations.confirm(page);
    [one, other]
}

/// A comparison of values would miss these stores.
#[test]
fn stores_that_restore_the_value_end_the_reservation() {
    let lr_sc = [atomic(LR, D, T0, A1, 0), atomic(SC, D, A0, A1, A2)];
    let cases: &[(&str, &[u32])] = &[
        ("the same value", &[sd(X0, A1, 0)]),
        ("another value and back", &[sd(A1, A1, 0), sd(X0, A1, 0)]),
        ("one byte of it", &[sb(X0, A1, 3)]),
        ("a misaligned store into it", &[sh(X0, A1, -1)]),
        ("a misaligned store over it", &[sd(X0, A1, 1)]),
        ("an AMO", &[atomic(AMOADD, W, T0, A1, X0)]),
        (
            "an SC",
            &[atomic(LR, D, T0, A1, 0), atomic(SC, D, T1, A1, X0)],
        ),
    ];
    for (name, code) in cases {
        let [mut one, mut other] = pair(&lr_sc, code);
        one.step();
        for _ in *code {
            other.step();
        }
        one.step();
        assert_eq!(one.hart.x(10), 1, "{name}");
    }
    // Loads, and stores to other words, do not end it.
    for code in [
        ld(T0, A1, 0),
        sd(X0, A1, 8),
        sd(X0, A1, 64),
        atomic(LR, D, T0, A1, 0),
    ] {
        let [mut one, mut other] = pair(&lr_sc, &[code]);
        one.step();
        other.step();
        one.step();
        assert_eq!(one.hart.x(10), 0, "{code:#x}");
    }
}

/// Runs harts on one thread each until they make an ECALL. `a0` is the hart's index.
fn run_threads(harts: u64, reservations: Option<&Arc<Reservations>>, ram: &Arc<Ram>) {
    std::thread::scope(|scope| {
        for index in 0..harts {
            scope.spawn(move || {
                let mut bus = match reservations {
                    Some(all) => TestBus::with_reservations(Arc::clone(ram), all),
                    None => TestBus::new(Arc::clone(ram)),
                };
                let mut hart = Hart::new();
                hart.set_pc(CODE).unwrap();
                hart.set_x(10, index);
                hart.set_x(11, DATA);
                let deadline = Instant::now() + LIMIT;
                loop {
                    match hart.run(&mut bus, &NO_REQUEST, Some(100_000)) {
                        // This hart may wait for a hart that has no CPU.
                        HartExit::Budget => std::thread::yield_now(),
                        HartExit::Ecall { .. } => break,
                        exit => panic!("hart {index}: {exit:?}"),
                    }
                    assert!(
                        Instant::now() < deadline,
                        "hart {index} makes no progress: {hart:x?}"
                    );
                }
            });
        }
    });
}

const ROUNDS: u64 = 20_000;

/// A loop that does `work` for 20000 rounds. `work` must not use `t2`, which counts them.
fn rounds(work: &[u32]) -> Vec<u32> {
    // 20000 is (5 << 12) - 480.
    let mut code = vec![lui(T2, 5), addiw(T2, T2, -480)];
    code.extend(work);
    code.push(addi(T2, T2, -1));
    code.push(bne(T2, X0, -4 * (work.len() as i32 + 1)));
    code.push(ECALL);
    code
}

#[test]
fn harts_count_together_by_lr_and_sc() {
    let reservations = Arc::new(Reservations::new());
    reservations.announce(DATA);
    reservations.confirm(DATA);
    for (width, reservations) in [
        (W, None),
        (D, None),
        (W, Some(&reservations)),
        (D, Some(&reservations)),
    ] {
        let ram = Ram::new(16);
        let code = rounds(&[
            atomic(LR, width, T0, A1, 0),
            addi(T0, T0, 1),
            atomic(SC, width, T1, A1, T0),
            bne(T1, X0, -12),
        ]);
        ram.code(CODE, &code);
        run_threads(2, reservations, &ram);
        assert_eq!(ram.get::<u64>(DATA), 2 * ROUNDS);
    }
}

#[test]
fn harts_count_together_by_amo_and_by_lock() {
    let amo = rounds(&[addi(T0, X0, 1), atomic(AMOADD, D, X0, A1, T0)]);
    // AMOSWAP.aq locks 8(a1). A plain increment counts at 0(a1). FENCE RW,W and a store unlock.
    let lock = rounds(&[
        addi(A2, A1, 8),
        addi(T0, X0, 1),
        atomic(AMOSWAP, W, T1, A2, T0) | 2 << 25,
        bne(T1, X0, -4),
        ld(T0, A1, 0),
        addi(T0, T0, 1),
        sd(T0, A1, 0),
        fence(3, 1),
        sw(X0, A2, 0),
    ]);
    for code in [amo, lock] {
        let ram = Ram::new(16);
        ram.code(CODE, &code);
        run_threads(2, None, &ram);
        assert_eq!(ram.get::<u64>(DATA), 2 * ROUNDS);
    }
}

/// One hart does plain stores, the other LR/SC: an increment by SC never overwrites a store that it
/// did not see.
#[test]
fn an_sc_never_overwrites_a_store_in_between() {
    let reservations = Arc::new(Reservations::new());
    reservations.announce(DATA);
    reservations.confirm(DATA);
    let ram = Ram::new(16);
    // Hart 0 stores round << 32 (a new upper half, and 0 in the lower half) and loads it back. Hart
    // 1 increments by LR/SC. Every value that hart 0 loads has the upper half that it stored.
    let store = rounds(&[
        slli(T0, T2, 32),
        sd(T0, A1, 0),
        ld(T1, A1, 0),
        srli(T1, T1, 32),
        beq(T1, T2, 8),
        WFI, // another upper half: halts, and the test fails
    ]);
    let count = rounds(&[
        atomic(LR, D, T0, A1, 0),
        addi(T0, T0, 1),
        atomic(SC, D, T1, A1, T0),
        bne(T1, X0, -12),
    ]);
    let start = [beq(A0, X0, 8), jal(X0, 0x800 - 4)];
    ram.code(CODE, &start);
    ram.code(CODE + 8, &store);
    ram.code(CODE + 0x800, &count);
    run_threads(2, Some(&reservations), &ram);
    let end: u64 = ram.get(DATA);
    assert!(end >> 32 == 1 && end as u32 as u64 <= ROUNDS, "{end:#x}");
}

/// Dekker's protocol with FENCE: two harts each store a flag and then load the other's flag. At
/// least one of them sees it.
#[test]
fn fence_orders_stores_before_loads() {
    const FLAGS: u64 = DATA + 0x2000;
    const RESULTS: u64 = DATA + 0x28_0000;
    const FLAG: u32 = A3;
    const RESULT: u32 = 14;
    const ARRIVALS: u32 = 15;
    let round = [
        // The addresses of this round's flags: FLAGS + round * 128 + index * 64.
        slli(T0, A0, 6),
        xori(A2, T0, 64),
        add(T0, T0, FLAG),
        add(A2, A2, FLAG),
        addi(T1, X0, 1),
        sd(T1, T0, 0),
        fence(0b0011, 0b0011),
        ld(T1, A2, 0),
        // Take the cache line of the other's next flag: the next load is then fast, and the
        // other's next store slow.
        sd(X0, A2, 128 + 8),
        // The result goes to RESULTS + round * 16 + index * 8.
        slli(T0, A0, 3),
        add(T0, T0, RESULT),
        sd(T1, T0, 0),
        addi(FLAG, FLAG, 128),
        addi(RESULT, RESULT, 16),
        // A barrier before the next round: both harts count at DATA + 32.
        addi(T1, X0, 1),
        addi(T0, A1, 32),
        atomic(AMOADD, D, X0, T0, T1),
        addi(ARRIVALS, ARRIVALS, 2),
        ld(T1, T0, 0),
        blt(T1, ARRIVALS, -4),
    ];
    let mut code = vec![
        lui(FLAG, ((FLAGS - DATA) >> 12) as u32),
        add(FLAG, FLAG, A1),
        lui(RESULT, ((RESULTS - DATA) >> 12) as u32),
        add(RESULT, RESULT, A1),
        // The same constant as in `rounds`.
        lui(T2, 5),
        addiw(T2, T2, -480),
    ];
    code.extend(round);
    code.push(addi(T2, T2, -1));
    code.push(bne(T2, X0, -4 * (round.len() as i32 + 1)));
    code.push(ECALL);
    const { assert!(FLAGS + ROUNDS * 128 + 128 <= RESULTS) };
    let ram = Ram::new((RESULTS + ROUNDS * 16 - RAM).div_ceil(4096) as usize);
    ram.code(CODE, &code);
    run_threads(2, None, &ram);
    for round in 0..ROUNDS {
        let at = RESULTS + round * 16;
        let seen = (ram.get::<u64>(at), ram.get::<u64>(at + 8));
        assert_ne!(seen, (0, 0), "round {round}");
    }
}
