//! Faults: pages of all sizes appear when they are touched, each once, with the contents of their
//! frames. Then they are removed.

use super::code::Routine;
use super::layout::{DATA_PFN, GIB_PFN};
use super::slot::Linear;
use super::space::{Faults, MmuSpace};
use super::tables::{leaves, vm_and_mmu};
use super::vcpu::{Command, Outcome, PageFault};
use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::Target;
use pageferry_tdp::format::{Access, MemoryType, Writes};
use pageferry_testkit::skip;
use std::sync::atomic::Ordering;

const PAGES: u64 = 2048;
/// A guest frame far from all table boundaries.
const FIRST: u64 = 0x1_2345_6785;

#[test]
fn each_page_is_faulted_in_once_and_has_its_own_frame() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    // Neighbouring guest pages have distant host frames.
    let frame = |page: u64| DATA_PFN + page * 577 % PAGES;
    let slot = |gfn: Gfn, _: Access| {
        let page = gfn
            .checked_offset_from(Gfn(FIRST))
            .filter(|&page| page < PAGES)?;
        Some(Target {
            pfn: Pfn(frame(page)),
            level: 1,
            access: Access::READ_WRITE,
            writes: Writes::Allowed,
            memory: MemoryType::WriteBack,
        })
    };
    let mut vcpu = vm.vcpu(0);
    let mut space = MmuSpace::new(&mmu, &slot, &());
    let gva = FIRST << 12;
    for page in 0..PAGES {
        vm.ram
            .word(frame(page) << 12)
            .store(page, Ordering::Relaxed);
    }
    let loads = Command::pages(Routine::Load, gva, PAGES / 2);
    let sum = vcpu.complete(loads, &mut space);
    assert_eq!(sum, (0..PAGES / 2).sum::<u64>());
    let expected = Faults {
        installed: PAGES / 2,
        ..Faults::default()
    };
    assert_eq!(space.take_faults(), expected);
    assert_eq!(leaves(&mmu, true), [PAGES / 2, 0, 0]);

    let stores = Command::pages(Routine::Store, gva, PAGES).with(7);
    vcpu.complete(stores, &mut space);
    assert_eq!(
        space.take_faults(),
        expected,
        "loads have left writable pages"
    );
    assert_eq!(leaves(&mmu, true), [PAGES, 0, 0]);
    for page in 0..PAGES {
        let word = vm.ram.word(frame(page) << 12).load(Ordering::Relaxed);
        assert_eq!(word, gva + page * 4096 + 7);
    }
    for page in 0..PAGES {
        let found = space.worker.walk(Gfn(FIRST + page)).expect("mapped");
        assert!(found.leaf.dirty && found.leaf.accessed);
        assert_eq!(found.leaf.pfn, Pfn(frame(page)));
    }

    // There is no memory beyond the slot.
    let beyond = gva + PAGES * 4096;
    let outcome = vcpu.run(Command::at(Routine::Load, beyond), &mut space);
    let fault = PageFault {
        gva: beyond,
        error: PageFault::USER,
    };
    assert_eq!(outcome, Outcome::Faulted(fault));
    // No instruction may be fetched.
    let outcome = vcpu.run(Command::at(Routine::Call, gva), &mut space);
    let fault = PageFault {
        gva,
        error: PageFault::USER | PageFault::PRESENT | PageFault::FETCH,
    };
    assert_eq!(outcome, Outcome::Faulted(fault));
}

#[test]
fn large_pages_come_whole_where_slot_and_backing_allow() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    let mut vcpu = vm.vcpu(0);
    // Six large pages, with 16 small ones before and 32 behind.
    let first = FIRST & !511;
    let slot = Linear::new(first - 16, 16 + 6 * 512 + 32, DATA_PFN + 512 - 16, 3);
    let mut space = MmuSpace::new(&mmu, &slot, &());
    let stores = Command::pages(Routine::Store, slot.gva(), slot.range.pages()).with(1);
    vcpu.complete(stores, &mut space);
    assert_eq!(space.take_faults().installed, 16 + 6 + 32);
    assert_eq!(leaves(&mmu, true), [48, 6, 0]);
    for page in 0..slot.range.pages() {
        let word = vm
            .ram
            .word(slot.gpa() + page * 4096)
            .load(Ordering::Relaxed);
        assert_eq!(word, slot.gva() + page * 4096 + 1);
    }
    let verify = Command {
        routine: Routine::Verify,
        ..stores
    };
    assert_eq!(vcpu.complete(verify, &mut space), 0);
    assert_eq!(space.take_faults(), Faults::default());
}

#[test]
fn a_page_of_1_gib_takes_one_fault() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    if vm.host.leaf_levels().max() != Some(3) {
        skip(
            "gib-leaves",
            "this host's KVM gives guests no leaves of 1 GiB",
        );
        return;
    }
    let mut vcpu = vm.vcpu(0);
    let slot = Linear::new(0x40 << 18, 1 << 18, GIB_PFN, 3);
    let mut space = MmuSpace::new(&mmu, &slot, &());
    let every_4_mib = Command {
        stride: 4 << 20,
        ..Command::pages(Routine::Store, slot.gva(), 1 << 18)
    };
    vcpu.complete(every_4_mib, &mut space);
    assert_eq!(space.take_faults().installed, 1);
    assert_eq!(leaves(&mmu, true), [0, 0, 1]);
    for offset in (0..1 << 30).step_by(4 << 20) {
        let word = vm.ram.word(slot.gpa() + offset).load(Ordering::Relaxed);
        assert_eq!(word, slot.gva() + offset);
    }
}

#[test]
fn what_was_zapped_faults_again_and_has_kept_its_contents() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    for level in 1..=2 {
        let mut vcpu = vm.vcpu(u64::from(level) - 1);
        let pages = 4 * 512;
        let slot = Linear::new(u64::from(level) << 20, pages, DATA_PFN, level);
        let mut space = MmuSpace::new(&mmu, &slot, &());
        let stores = Command::pages(Routine::Store, slot.gva(), pages).with(level.into());
        let verify = Command {
            routine: Routine::Verify,
            ..stores
        };
        vcpu.complete(stores, &mut space);
        let unit = 1 << (9 * (level - 1));
        assert_eq!(space.take_faults().installed, pages / unit);
        mmu.platform().take_flushes();
        let before = vcpu.presence().reloads();

        // The third large page, a part of the second, and all mapped pages of the first.
        let part = pageferry_addr::GfnRange::new(slot.range.start(), 512 + 8).expect("a range");
        let third = Gfn(slot.range.start().0 + 1024);
        let third = pageferry_addr::GfnRange::new(third, 512).expect("a range");
        let zapped = space
            .worker
            .deferred(|worker| worker.zap(part, &()) + worker.zap(third, &()));
        let expected = if level == 1 { 1024 + 8 } else { 3 * 512 };
        assert_eq!(zapped, expected);
        assert!(!mmu.platform().take_flushes().is_empty());
        assert_eq!(vcpu.complete(verify, &mut space), 0);
        assert!(vcpu.presence().reloads() > before);
        assert_eq!(space.take_faults().installed, expected / unit);
        assert_eq!(leaves(&mmu, true)[level as usize - 1], pages / unit);

        let all = space.worker.zap(slot.range, &());
        assert_eq!(all, pages);
        space.worker.reclaim();
    }
}

#[test]
fn after_everything_was_zapped_the_vcpu_goes_on_under_a_new_root() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    let mut vcpu = vm.vcpu(0);
    let slot = Linear::new(FIRST & !511, 3 * 512, DATA_PFN, 2);
    let mut space = MmuSpace::new(&mmu, &slot, &());
    let stores = Command::pages(Routine::Store, slot.gva(), slot.range.pages());
    let verify = Command {
        routine: Routine::Verify,
        ..stores
    };
    vcpu.complete(stores, &mut space);
    for _ in 0..3 {
        let old = mmu.root();
        let mapped: u64 = leaves(&mmu, false)[0] + 3 * 512;
        assert_eq!(space.worker.zap_all(&()), Ok(mapped));
        assert_ne!(mmu.root(), old);
        assert_eq!(leaves(&mmu, false), [0; 3]);
        space.take_faults();
        assert_eq!(vcpu.complete(verify, &mut space), 0);
        assert_eq!(space.take_faults().installed, 3);
        assert_eq!(leaves(&mmu, true), [0, 3, 0]);
    }
    drop(space);
    // Only the tree's tables are in use.
    let stats = mmu.stats();
    assert_eq!(mmu.platform().in_use(), stats.tables + 1);
}
