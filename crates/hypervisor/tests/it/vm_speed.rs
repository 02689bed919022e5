//! Measurements of the fault path. Run them by
//! `cargo test --release -p pageferry-hypervisor --test it -- --ignored --nocapture vm_speed::`.

use crate::support::vm::{HostRam, PAGE, asm::*, vcpu, vm};
use pageferry_addr::{Hva, RamPage};
use pageferry_hypervisor::{Exit, SlotFlags, UserfaultBits, VcpuCore, Vm, VmConfig};
use pageferry_userfault::PageBitmap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// The best of five runs.
fn best(mut run: impl FnMut() -> Duration) -> Duration {
    (0..5).map(|_| run()).min().unwrap()
}

/// Stores to each page, from the second on.
const STORE_TO_EACH: [u32; 4] = [sd(A1, A1, 0), add(A1, A1, T1), bltu(A1, A2, -8), WFI];

/// Makes the vCPU begin [`STORE_TO_EACH`], for `pages` pages.
fn begin(vcpu: &mut VcpuCore, pages: u64) {
    let hart = vcpu.hart_mut();
    hart.set_pc(0).unwrap();
    for (register, value) in [(11, PAGE), (12, (1 + pages) * PAGE), (6, PAGE)] {
        hart.set_x(register, value);
    }
}

/// Nanoseconds a page.
fn per_page(time: Duration, pages: u64) -> f64 {
    time.as_nanos() as f64 / pages as f64
}

#[test]
#[ignore = "measures: nanoseconds on the fault path"]
fn loads_and_stores_through_the_tlb() {
    const PAGES: u64 = 64;
    const ROUNDS: u64 = 2_000;
    let ram = HostRam::new(1 + PAGES as usize);
    // Adds 1 to each doubleword of the pages, a2 times.
    let code = [
        add(T0, A1, X0),
        ld(A0, T0, 0),
        addi(A0, A0, 1),
        sd(A0, T0, 0),
        addi(T0, T0, 8),
        bltu(T0, A3, -16),
        addi(A2, A2, -1),
        bne(A2, X0, -28),
        WFI,
    ];
    ram.code(0, &code);
    let vm = vm(&ram);
    let mut vcpu = vcpu(&vm, 0, 0);
    let mut instructions = 0;
    let time = best(|| {
        vcpu.hart_mut().set_pc(0).unwrap();
        vcpu.hart_mut().set_x(11, PAGE);
        vcpu.hart_mut().set_x(12, ROUNDS);
        vcpu.hart_mut().set_x(13, (1 + PAGES) * PAGE);
        let before = vcpu.hart().instret();
        let start = Instant::now();
        assert_eq!(vcpu.run(), Exit::Halted);
        let time = start.elapsed();
        instructions = vcpu.hart().instret() - before;
        time
    });
    let rate = instructions as f64 / time.as_secs_f64() / 1e6;
    println!("load/store loop: {rate:.0} M instructions/s");
}

/// Stores to random doublewords of a small memory and of one that the first level of the TLB does
/// not reach. The large one does not fit into the host's caches either.
#[test]
#[ignore = "measures: nanoseconds on the fault path"]
fn random_stores() {
    const STORES: u64 = 4_000_000;
    const MIB: u64 = 1 << 20;
    let ram = HostRam::new(((64 * MIB) / PAGE) as usize + 1);
    let code = [
        mul(A0, A0, A3),
        addi(A0, A0, 13),
        srli(T0, A0, 20),
        and(T0, T0, T2),
        add(T0, T0, A1),
        sd(A0, T0, 0),
        addi(A2, A2, -1),
        bne(A2, X0, -28),
        WFI,
    ];
    ram.code(0, &code);
    let vm = vm(&ram);
    let mut vcpu = vcpu(&vm, 0, 0);
    let mut measure = |bytes: u64| {
        best(|| {
            let hart = vcpu.hart_mut();
            hart.set_pc(0).unwrap();
            for (register, value) in [
                (10, 1),
                (11, PAGE),
                (12, STORES),
                (13, 0x5851_f42d_4c95_7f2d),
                (7, bytes - 8),
            ] {
                hart.set_x(register, value);
            }
            let start = Instant::now();
            assert_eq!(vcpu.run(), Exit::Halted);
            start.elapsed()
        })
    };
    let per_store = |time| per_page(time, STORES);
    // The first run over the large memory maps it.
    let [large, small] = [64 * MIB, MIB].map(|bytes| per_store(measure(bytes)));
    println!(
        "random stores over 1 MiB: {small:.1} ns each; over 64 MiB: {large:.1} ns; ratio: {:.2}",
        small / large
    );
}

/// Stores to a page in which there was an LR: while it is watched, and in the long run. Then pairs
/// of LR and SC.
#[test]
#[ignore = "measures: nanoseconds on the fault path"]
fn stores_beside_reservations() {
    const FEW: u64 = 100_000;
    const MANY: u64 = 10_000_000;
    let ram = HostRam::new(2);
    let store = [sd(A0, A1, 8), addi(A2, A2, -1), bne(A2, X0, -8), WFI];
    ram.code(0, &store);
    ram.code(64, &[atomic(LR, D, A0, A1, 0), WFI]);
    let pairs = [
        atomic(LR, D, A0, A1, 0),
        atomic(SC, D, A0, A1, A0),
        addi(A2, A2, -1),
        bne(A2, X0, -12),
        WFI,
    ];
    ram.code(128, &pairs);
    let vm = vm(&ram);
    let mut vcpu = vcpu(&vm, 0, 0);
    let mut run = |pc, count| {
        vcpu.hart_mut().set_pc(pc).unwrap();
        vcpu.hart_mut().set_x(11, PAGE);
        vcpu.hart_mut().set_x(12, count);
        let start = Instant::now();
        assert_eq!(vcpu.run(), Exit::Halted);
        per_page(start.elapsed(), count)
    };
    let before = run(0, MANY);
    run(64, 1);
    let watched = run(0, FEW);
    let long = run(0, MANY);
    let pair = run(128, MANY);
    println!(
        "a store and its loop: {before:.1} ns; watched: {watched:.1} ns; {MANY} of them: {long:.1} ns; LR and SC: {pair:.1} ns"
    );
}

#[test]
#[ignore = "measures: nanoseconds on the fault path"]
fn misses_and_memory_fault_exits() {
    const PAGES: u64 = 16 * 1024;
    let ram = HostRam::new(1 + PAGES as usize);
    ram.code(0, &STORE_TO_EACH);
    for page in 1..=PAGES {
        ram.set(page * PAGE + 8, 1);
    }
    let vm = vm(&ram);
    let mut vcpu = vcpu(&vm, 0, 0);
    let bitmap = Arc::new(PageBitmap::new(1 + PAGES as usize));
    let mut region = ram.region(0, 0, 0, 1 + PAGES);
    region.userfault = Some(UserfaultBits {
        bitmap: Arc::clone(&bitmap),
        first: RamPage(0),
    });
    let mut touch_all = |missing: bool, unmap: bool| {
        if unmap {
            region.flags = SlotFlags::EMPTY;
            vm.set_user_memory_region2(region.clone()).unwrap();
            region.flags = SlotFlags::USERFAULT;
            vm.set_user_memory_region2(region.clone()).unwrap();
        }
        if missing {
            bitmap.set_range(1..1 + PAGES as usize);
        }
        begin(&mut vcpu, PAGES);
        let start = Instant::now();
        loop {
            match vcpu.run() {
                Exit::MemoryFault { gpa, .. } => {
                    bitmap.clear(RamPage(gpa.0 / PAGE));
                }
                Exit::Halted => break,
                other => panic!("{other:?}"),
            }
        }
        start.elapsed()
    };
    let per_page = |time| per_page(time, PAGES);
    // The first run makes the tables.
    let exits = per_page(best(|| touch_all(true, true)));
    let faults = per_page(best(|| touch_all(false, true)));
    let refills = per_page(best(|| touch_all(false, false)));
    println!(
        "TLB miss, SPTE present: {refills:.0} ns a page; SPTE absent: {faults:.0} ns; memory fault, exit and resume: {exits:.0} ns"
    );
    println!("exit and resume alone: {:.0} ns", exits - faults);
}

/// Faults while a thread calls a notifier for other memory all the time.
#[test]
#[ignore = "measures: nanoseconds on the fault path"]
fn faults_beside_a_notifier() {
    const PAGES: u64 = 16 * 1024;
    let ram = HostRam::new(1 + PAGES as usize);
    ram.code(0, &STORE_TO_EACH);
    let vm = vm(&ram);
    // A slot that the guest never accesses.
    let other = HostRam::new(1);
    vm.set_user_memory_region2(other.region(1, 1 << 40, 0, 1))
        .unwrap();
    let (page, all) = (
        other.region(1, 0, 0, 1).hva,
        ram.region(0, 0, 0, 1 + PAGES).hva,
    );
    let mut vcpu = vcpu(&vm, 0, 0);
    let mut touch_all = || {
        vm.invalidate_hva(all..Hva(all.0 + (1 + PAGES) * PAGE));
        begin(&mut vcpu, PAGES);
        let start = Instant::now();
        assert_eq!(vcpu.run(), Exit::Halted);
        start.elapsed()
    };
    let per_page = |time| per_page(time, PAGES);
    let alone = per_page(best(&mut touch_all));
    let (stop, calls) = (AtomicBool::new(false), AtomicU64::new(0));
    let (beside, each) = thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                vm.invalidate_hva(page..Hva(page.0 + PAGE));
                calls.fetch_add(1, Relaxed);
            }
        });
        let (start, before) = (Instant::now(), calls.load(Relaxed));
        let beside = per_page(best(&mut touch_all));
        let each = start.elapsed().as_nanos() as f64 / (calls.load(Relaxed) - before) as f64;
        stop.store(true, Relaxed);
        (beside, each)
    });
    println!(
        "a fault alone: {alone:.0} ns; with a notifier: {beside:.0} ns; {each:.0} ns a call of the notifier"
    );
}

/// Loads from an address without a slot, in VMs with few slots and with many.
#[test]
#[ignore = "measures: nanoseconds on the fault path"]
fn mmio_exits() {
    const EXITS: u64 = 100_000;
    let ram = HostRam::new(1);
    ram.code(0, &[ld(A0, A1, 0), jal(X0, -4)]);
    for slots in [10, 32_764] {
        let vm = Vm::new(VmConfig::default());
        for slot in 0..slots {
            vm.set_user_memory_region2(ram.region(slot, u64::from(slot) * 2 * PAGE, 0, 1))
                .unwrap();
        }
        let mut vcpu = vcpu(&vm, 0, 0);
        vcpu.hart_mut().set_x(11, u64::from(slots) * PAGE + PAGE);
        let time = best(|| {
            let start = Instant::now();
            for _ in 0..EXITS {
                assert!(matches!(vcpu.run(), Exit::MmioRead { .. }));
            }
            start.elapsed()
        });
        let each = time.as_nanos() as f64 / EXITS as f64;
        println!("MMIO exit and resume with {slots} slots: {each:.0} ns");
    }
}

/// The cost of a background snapshot without the copying, for pages with and without a guest's
/// store.
#[test]
#[ignore = "measures: nanoseconds on the fault path"]
fn write_tracking() {
    const PAGES: u64 = 16 * 1024;
    let ram = HostRam::new(1 + PAGES as usize);
    ram.code(0, &STORE_TO_EACH);
    let vm = vm(&ram);
    let mut vcpu = vcpu(&vm, 0, 0);
    let mut store = |untracks: bool| {
        begin(&mut vcpu, PAGES);
        let start = Instant::now();
        loop {
            match vcpu.run() {
                Exit::MemoryFault { gpa, .. } if untracks => {
                    let page = gpa.0 / PAGE;
                    assert_eq!(vm.untrack_writes(0, page..page + 1), Ok(1));
                }
                Exit::Halted => return start.elapsed(),
                other => panic!("{other:?}"),
            }
        }
    };
    let track = || {
        let start = Instant::now();
        assert_eq!(vm.track_writes(0, 1..1 + PAGES), Ok(PAGES));
        start.elapsed()
    };
    let per_page = |time| per_page(time, PAGES);
    store(false);
    let (mut tracked, mut stored, mut untracked) = (Duration::MAX, Duration::MAX, Duration::MAX);
    for _ in 0..5 {
        tracked = tracked.min(track());
        stored = stored.min(store(true));
        track();
        let start = Instant::now();
        for page in 1..=PAGES {
            assert_eq!(vm.untrack_writes(0, page..page + 1), Ok(1));
        }
        untracked = untracked.min(start.elapsed());
        store(false);
    }
    println!(
        "tracking: {:.0} ns a page; untracking: {:.0} ns; exit, untracking and resume: {:.0} ns",
        per_page(tracked),
        per_page(untracked),
        per_page(stored)
    );
}
