//! LR and SC between vCPUs, through the vCPUs' TLBs; and watched pages that become unwatched.

use crate::support::vm::{HostRam, PAGE, StopOnDrop, asm::*, vcpu, vm};
use pageferry_hypervisor::{Exit, VcpuCore};
use pageferry_testkit::{Stop, stress_time};
use std::time::{Duration, Instant};

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

/// Stores a0 to the word at a1, a2 times.
const STORE: [u32; 4] = [sd(A0, A1, 0), addi(A2, A2, -1), bne(A2, X0, -8), WFI];
/// More slow stores than a vCPU makes before it unwatches all pages.
const MANY: u64 = 300_000;

fn store_many(vcpu: &mut VcpuCore, word: u64, count: u64) {
    vcpu.hart_mut().set_x(11, word);
    vcpu.hart_mut().set_x(12, count);
    run_from(vcpu, PAGE);
}

/// LRs in many pages, and then stores: no page stays watched for ever.
#[test]
fn the_set_of_watched_pages_shrinks() {
    const PAGES: u64 = 300;
    let ram = HostRam::new(2 + PAGES as usize);
    ram.code(0, &[atomic(LR, D, A0, A1, 0), WFI]);
    ram.code(PAGE, &STORE);
    let vm = vm(&ram);
    let mut vcpu = vcpu(&vm, 0, 0);
    for page in 2..2 + PAGES {
        vcpu.hart_mut().set_x(11, page * PAGE);
        run_from(&mut vcpu, 0);
    }
    let before = vm.watched_pages();
    assert!((PAGES / 2..=PAGES).contains(&before.into()), "{before}");
    store_many(&mut vcpu, 2 * PAGE, 1000);
    assert_eq!(vm.watched_pages(), before, "a few stores change nothing");
    store_many(&mut vcpu, 2 * PAGE, MANY);
    assert_eq!(vm.watched_pages(), 0);
    // The next LR watches its page again, and only that.
    vcpu.hart_mut().set_x(11, 5 * PAGE);
    run_from(&mut vcpu, 0);
    assert_eq!(vm.watched_pages(), 1);
}

/// A reservation from before the pages became unwatched fails, although nobody stored to its word:
/// stores in between went unseen.
#[test]
fn a_reservation_does_not_outlive_its_watch() {
    let ram = HostRam::new(5);
    ram.code(0, &[atomic(LR, D, A0, A1, 0), WFI]);
    ram.code(64, &[atomic(SC, D, A3, A1, A2), WFI]);
    ram.code(PAGE, &STORE);
    let vm = vm(&ram);
    let [mut first, mut second] = [0, 1].map(|id| vcpu(&vm, id, 0));
    for rewatch in [false, true] {
        first.hart_mut().set_x(11, WORD);
        first.hart_mut().set_x(12, 99);
        run_from(&mut first, 0);
        assert_eq!(vm.watched_pages(), 1);
        // Another word of the page.
        store_many(&mut second, WORD + 512, MANY);
        assert_eq!(vm.watched_pages(), 0);
        // The store, and one that puts the old value back.
        second.hart_mut().set_x(10, 1);
        store_many(&mut second, WORD, 1);
        second.hart_mut().set_x(10, 0);
        store_many(&mut second, WORD, 1);
        if rewatch {
            second.hart_mut().set_x(11, WORD);
            run_from(&mut second, 0);
            assert_eq!(vm.watched_pages(), 1);
        }
        run_from(&mut first, 64);
        assert_eq!(first.hart().x(13), 1);
        assert_eq!(ram.get(WORD), 0);
    }
}

/// vCPUs count by LR and SC, while others store to the same page so often that it becomes unwatched
/// again and again. No count is lost, and no value comes back.
#[test]
fn counts_by_lr_and_sc_are_exact_while_pages_become_unwatched() {
    const ROUNDS: u64 = 20_000;
    let ram = HostRam::new(3);
    // Adds 1 to the word at a1 by LR and SC, and stores to another word of the page, a2 times.
    let code = [
        atomic(LR, D, A0, A1, 0),
        addi(A0, A0, 1),
        atomic(SC, D, T0, A1, A0),
        bne(T0, X0, -12),
        sd(A0, A3, 0),
        addi(A2, A2, -1),
        bne(A2, X0, -24),
        WFI,
    ];
    ram.code(0, &code);
    ram.code(PAGE, &STORE);
    let vm = vm(&ram);
    let vcpus: Vec<_> = (0..4_u64).map(|id| (id, vcpu(&vm, id as u32, 0))).collect();
    std::thread::scope(|scope| {
        for (id, mut vcpu) in vcpus {
            scope.spawn(move || {
                vcpu.hart_mut().set_x(13, WORD + 256 + id * 64);
                if id < 2 {
                    vcpu.hart_mut().set_x(11, WORD);
                    vcpu.hart_mut().set_x(12, ROUNDS);
                    run_from(&mut vcpu, 0);
                } else {
                    store_many(&mut vcpu, WORD + 512 + id * 64, 4 * MANY);
                }
            });
        }
    });
    assert_eq!(ram.get(WORD), 2 * ROUNDS);
}

/// A misaligned access covers aligned halves of words. Each of them is one access, with all of the
/// bits of one store.
#[test]
fn a_misaligned_access_tears_no_aligned_part() {
    const COPY: u64 = WORD + 64;
    let ram = HostRam::new(4);
    // Stores 0 and all ones in turn. a1: the middle of WORD, a2: all ones.
    ram.code(0, &[sd(X0, A1, 0), sd(A2, A1, 0), beq(X0, X0, -8)]);
    // Loads there, and stores what it has loaded to COPY, aligned.
    ram.code(PAGE, &[ld(A0, A1, 0), sd(A0, A3, 0), beq(X0, X0, -8)]);
    let whole = |half: u32| half == 0 || half == u32::MAX;
    let halves = |offset| [ram.get(offset) as u32, (ram.get(offset) >> 32) as u32];
    let check_stores = |_| {
        let (first, second) = (halves(WORD)[1], halves(WORD + 8)[0]);
        assert!(whole(first) && whole(second), "{first:#x}, {second:#x}");
    };
    let check_loads = |turn: u32| {
        let word = if turn.is_multiple_of(2) { 0 } else { u64::MAX };
        ram.set(WORD, word);
        ram.set(WORD + 8, word);
        let [first, second] = halves(COPY);
        assert!(whole(first) && whole(second), "{first:#x}, {second:#x}");
    };
    let vm = vm(&ram);
    let checks: [(u64, &dyn Fn(u32)); 2] = [(0, &check_stores), (PAGE, &check_loads)];
    for (id, (pc, check)) in (0..).zip(checks) {
        let mut vcpu = vcpu(&vm, id, pc);
        vcpu.hart_mut().set_x(11, WORD + 4);
        vcpu.hart_mut().set_x(12, u64::MAX);
        vcpu.hart_mut().set_x(13, COPY);
        let stop = Stop::new();
        std::thread::scope(|scope| {
            let _stop = StopOnDrop(&stop, vec![vcpu.kick_handle()]);
            scope.spawn(move || assert_eq!(vcpu.run(), Exit::Kicked));
            let until = Instant::now() + stress_time(Duration::from_millis(200));
            let mut turn = 0;
            while Instant::now() < until {
                (turn..turn + 100).for_each(check);
                turn += 100;
            }
        });
    }
}
