//! Permissions that are taken and restored, and the dirty log that uses them.

use super::code::{Routine, callee};
use super::layout::DATA_PFN;
use super::slot::{DirtyLog, Linear};
use super::space::{Faults, MmuSpace};
use super::tables::vm_and_mmu;
use super::vcpu::{Command, Outcome, PageFault};
use pageferry_addr::Gfn;
use pageferry_tdp::Target;
use pageferry_tdp::format::{Access, Writes};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const PAGES: u64 = 512;
const DENIED_STORE: u64 = PageFault::USER | PageFault::PRESENT | PageFault::WRITE;

/// Every page whose number has a common divisor with 6.
fn some_pages() -> Vec<u64> {
    (0..PAGES)
        .filter(|page| page % 2 == 0 || page % 3 == 0)
        .collect()
}

#[test]
fn a_store_to_a_write_protected_page_faults_and_is_logged_and_then_goes_through() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    let mut vcpu = vm.vcpu(0);
    let linear = Linear::new(0x7_0000, PAGES, DATA_PFN, 1);
    // Dirty equals writable, though the format has a dirty bit.
    let slot = |gfn: Gfn, access: Access| {
        let target = linear.everything(gfn)?;
        Some(Target {
            writes: Writes::AllowedLoggedByFault,
            access,
            ..target
        })
    };
    let log = DirtyLog::new(linear.range);
    let mut space = MmuSpace::new(&mmu, &slot, &log);
    let loads = Command::pages(Routine::Load, linear.gva(), PAGES);
    vcpu.complete(loads, &mut space);
    assert!(log.take().is_empty(), "loads are not logged");
    space.take_faults();
    for round in 1..=3 {
        let stored = some_pages();
        for &page in &stored {
            let store = Command::at(Routine::Store, linear.gva() + page * 4096).with(round);
            vcpu.complete(store, &mut space);
        }
        let count = stored.len() as u64;
        let expected = Faults {
            upgraded: count,
            fast: count,
            ..Faults::default()
        };
        assert_eq!(space.take_faults(), expected, "one fast fault a page");
        // Writable pages cause no more faults, and no more reports to the log.
        for &page in &stored {
            let store = Command::at(Routine::Store, linear.gva() + page * 4096 + 8);
            vcpu.complete(store, &mut space);
        }
        assert_eq!(space.take_faults(), Faults::default());
        assert_eq!(log.take(), stored);
        assert_eq!(space.worker.write_protect(linear.range, &()), count);
    }
    assert_eq!(space.worker.write_protect(linear.range, &()), 0);
}

#[test]
fn a_large_page_that_is_logged_by_faults_is_split_by_the_first_store() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    let mut vcpu = vm.vcpu(0);
    let linear = Linear::new(0x7_0000, 2 * PAGES, DATA_PFN, 2);
    let mut unlogged = MmuSpace::new(&mmu, &linear, &());
    let stores = Command::pages(Routine::Store, linear.gva(), 2 * PAGES);
    vcpu.complete(stores, &mut unlogged);
    assert_eq!(mmu.stats().leaves[1], 2);

    // The log continues, by write protection from now on.
    let log = DirtyLog::new(linear.range);
    let worker = &mut unlogged.worker;
    let changed = worker.deferred(|worker| {
        worker.set_writes(linear.range, Writes::AllowedLoggedByFault, &log);
        worker.write_protect(linear.range, &())
    });
    assert_eq!(changed, 2 * PAGES);
    log.take();
    let slot = |gfn: Gfn, access: Access| {
        let target = linear.everything(gfn)?;
        Some(Target {
            writes: Writes::AllowedLoggedByFault,
            level: if access.write { 1 } else { target.level },
            access: Access {
                write: access.write,
                ..Access::ALL
            },
            ..target
        })
    };
    let mut space = MmuSpace::new(&mmu, &slot, &log);
    let loads = Command::pages(Routine::Load, linear.gva(), 2 * PAGES);
    vcpu.complete(loads, &mut space);
    assert_eq!(
        space.take_faults(),
        Faults::default(),
        "loads need no fault"
    );
    let store = Command::at(Routine::Store, linear.gva() + 700 * 4096);
    vcpu.complete(store, &mut space);
    assert_eq!(log.take(), [700]);
    let stats = mmu.stats();
    assert_eq!(stats.leaves[1], 1, "the first is whole still");
    let verify = Command {
        routine: Routine::Verify,
        ..stores
    };
    assert_eq!(vcpu.complete(verify, &mut space), 0);
}

#[test]
fn a_read_only_slot_takes_loads_and_fetches_only() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    let mut vcpu = vm.vcpu(0);
    for level in 1..=2 {
        let linear = Linear::new(u64::from(level) << 20, 512, DATA_PFN, level);
        let slot = |gfn: Gfn, _: Access| {
            let target = linear.everything(gfn)?;
            Some(Target {
                access: Access::READ_EXECUTE,
                writes: Writes::HostForbids,
                ..target
            })
        };
        let at = linear.gpa() + 5 * 4096;
        vm.ram.word(at).store(0x5555, Ordering::Relaxed);
        vm.ram.write(at + 0x100, callee());
        let mut space = MmuSpace::new(&mmu, &slot, &());
        let gva = linear.gva() + 5 * 4096;
        // Whether it is mapped or not.
        for error in [PageFault::USER | PageFault::WRITE, DENIED_STORE] {
            let outcome = vcpu.run(Command::at(Routine::Store, gva), &mut space);
            assert_eq!(outcome, Outcome::Faulted(PageFault { gva, error }));
            let loaded = vcpu.complete(Command::at(Routine::Load, gva), &mut space);
            assert_eq!(loaded, 0x5555);
        }
        let called = vcpu.complete(Command::at(Routine::Call, gva + 0x100), &mut space);
        assert_eq!(called, 1);
        space.worker.zap(linear.range, &());
    }
}

#[test]
fn a_tracked_page_faults_at_every_store_until_it_is_let_go() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    let mut vcpu = vm.vcpu(0);
    let linear = Linear::new(0x7_0000, 16, DATA_PFN, 1);
    let tracked = AtomicBool::new(false);
    let seen = AtomicU64::new(0);
    let slot = |gfn: Gfn, access: Access| {
        let target = linear.everything(gfn)?;
        if !tracked.load(Ordering::Relaxed) {
            return Some(target);
        }
        seen.fetch_add(u64::from(access.write), Ordering::Relaxed);
        Some(Target {
            access: Access::READ_EXECUTE,
            writes: Writes::MmuForbids,
            ..target
        })
    };
    let mut space = MmuSpace::new(&mmu, &slot, &());
    let store = Command::at(Routine::Store, linear.gva()).with(1);
    vcpu.complete(store, &mut space);
    let log = DirtyLog::new(linear.range);
    tracked.store(true, Ordering::Relaxed);
    assert_eq!(
        space
            .worker
            .set_writes(linear.range, Writes::MmuForbids, &log),
        1
    );
    assert_eq!(log.take(), [0], "a dirty bit that goes is told");
    for times in 1..=5 {
        let outcome = vcpu.run(store.with(100 + times), &mut space);
        let fault = PageFault {
            gva: linear.gva(),
            error: DENIED_STORE,
        };
        assert_eq!(outcome, Outcome::Faulted(fault));
        assert_eq!(seen.load(Ordering::Relaxed), times);
    }
    let word = vm.ram.word(linear.gpa());
    assert_eq!(word.load(Ordering::Relaxed), linear.gva() + 1);
    tracked.store(false, Ordering::Relaxed);
    assert_eq!(
        space.worker.set_writes(linear.range, Writes::Allowed, &log),
        1
    );
    vcpu.complete(store.with(9), &mut space);
    assert_eq!(word.load(Ordering::Relaxed), linear.gva() + 9);
    assert_eq!(
        space.take_faults().fast,
        1,
        "the leaf itself says that stores are allowed again"
    );
}

#[test]
fn fetches_need_their_own_permission() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    let mut vcpu = vm.vcpu(0);
    for level in 1..=2 {
        let linear = Linear::new(u64::from(level) << 20, 512, DATA_PFN, level);
        // No page is executable before it is executed.
        let slot = |gfn: Gfn, access: Access| {
            let target = linear.everything(gfn)?;
            let write = true;
            Some(Target {
                access: Access { write, ..access },
                ..target
            })
        };
        let mut space = MmuSpace::new(&mmu, &slot, &());
        for page in 0..512 {
            vm.ram.write(linear.gpa() + page * 4096, callee());
        }
        let each = |routine| Command::pages(routine, linear.gva(), 512);
        vcpu.complete(each(Routine::Load), &mut space);
        let leaves = 512 >> (9 * (level - 1));
        assert_eq!(space.take_faults().installed, leaves);
        assert_eq!(vcpu.complete(each(Routine::Call), &mut space), 512);
        let expected = Faults {
            upgraded: leaves,
            ..Faults::default()
        };
        assert_eq!(
            space.take_faults(),
            expected,
            "each leaf once more, to be fetched from"
        );
        assert_eq!(vcpu.complete(each(Routine::Call), &mut space), 512);
        assert_eq!(space.take_faults(), Faults::default());
        space.worker.zap(linear.range, &());
    }
}
