//! The hardware's reports: accessed and dirty bits, read as ages and as a dirty log.

use super::code::Routine;
use super::layout::DATA_PFN;
use super::slot::{DirtyLog, Linear};
use super::space::{Faults, MmuSpace};
use super::tables::{GuestWorker, vm_and_mmu};
use super::vcpu::Command;
use pageferry_addr::Gfn;
use pageferry_tdp::format::Writes;

const PAGES: u64 = 1024;

/// Different pages every round.
fn pages_of(round: u64) -> Vec<u64> {
    let chosen = |page: u64| (page + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> round & 7 == 0;
    (0..PAGES).filter(|&page| chosen(page)).collect()
}

#[test]
fn dirty_bits_are_exactly_the_pages_the_program_wrote() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    let mut vcpu = vm.vcpu(0);
    let slot = Linear::new(0x3_3333_3333, PAGES, DATA_PFN, 1);
    let log = DirtyLog::new(slot.range);
    let mut space = MmuSpace::new(&mmu, &slot, &log);
    vcpu.complete(Command::pages(Routine::Load, slot.gva(), PAGES), &mut space);
    assert_eq!(
        space.worker.clear_dirty(slot.range, &log),
        0,
        "loads make nothing dirty"
    );
    space.take_faults();
    for round in 1..=8 {
        let written = pages_of(round);
        // The guest reads all of them. It also writes the first and the last word of each chosen
        // page.
        vcpu.complete(Command::pages(Routine::Load, slot.gva(), PAGES), &mut space);
        for &page in &written {
            let gva = slot.gva() + page * 4096;
            let routine = if page % 2 == 0 {
                Routine::Store
            } else {
                Routine::Add
            };
            let at = if page % 3 == 0 { gva } else { gva + 4088 };
            vcpu.complete(Command::at(routine, at).with(round), &mut space);
        }
        assert!(log.take().is_empty(), "nobody has looked yet");
        let cleaned = space.worker.clear_dirty(slot.range, &log);
        assert_eq!(cleaned, written.len() as u64);
        assert_eq!(log.take(), written, "round {round}");
    }
    assert_eq!(
        space.take_faults(),
        Faults::default(),
        "the hardware does it without faults"
    );
}

#[test]
fn the_dirty_bit_of_a_large_page_stands_for_all_of_it() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    let mut vcpu = vm.vcpu(0);
    let slot = Linear::new(0x3_3333_3200, PAGES, DATA_PFN, 2);
    let log = DirtyLog::new(slot.range);
    let mut space = MmuSpace::new(&mmu, &slot, &());
    vcpu.complete(Command::pages(Routine::Load, slot.gva(), PAGES), &mut space);
    space.worker.clear_dirty(slot.range, &log);
    assert!(log.take().is_empty());
    let at = slot.gva() + 600 * 4096;
    vcpu.complete(Command::at(Routine::Store, at), &mut space);
    assert_eq!(space.worker.clear_dirty(slot.range, &log), 512);
    assert_eq!(log.take(), (512..1024).collect::<Vec<_>>());
    // A dirty page that is split is dirty in all its parts. A clean one is dirty in none.
    vcpu.complete(Command::at(Routine::Store, at), &mut space);
    assert_eq!(space.worker.split(slot.range, 1, &log), Ok(2));
    vcpu.complete(Command::at(Routine::Store, slot.gva() + 4096), &mut space);
    space.worker.clear_dirty(slot.range, &log);
    let expected: Vec<_> = [1].into_iter().chain(512..1024).collect();
    assert_eq!(log.take(), expected);
}

#[test]
fn a_dirty_bit_that_is_lost_is_told_to_the_log() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    let mut vcpu = vm.vcpu(0);
    let slot = Linear::new(0x3_0000, PAGES, DATA_PFN, 1);
    let log = DirtyLog::new(slot.range);
    let mut space = MmuSpace::new(&mmu, &slot, &log);
    let each = |routine| Command::pages(routine, slot.gva(), PAGES);
    type Loss = (&'static str, fn(&mut GuestWorker, &Linear, &DirtyLog));
    let losses: [Loss; 5] = [
        ("zap", |worker, slot, log| {
            worker.zap(slot.range, log);
        }),
        ("zap_all", |worker, _, log| {
            worker.zap_all(log).expect("a frame for the root");
        }),
        ("invalidate", |worker, slot, log| {
            drop(worker.invalidate(&[slot.range], log));
        }),
        ("recover", |worker, slot, log| {
            let recovered = worker.recover(slot.range, log, |gfn, level| {
                let target = slot.everything(gfn)?;
                Some(pageferry_tdp::Target { level, ..target })
            });
            assert_eq!(recovered, 2);
            worker.split(slot.range, 1, log).expect("frames for tables");
        }),
        ("set_writes", |worker, slot, log| {
            worker.set_writes(slot.range, Writes::MmuForbids, log);
            worker.set_writes(slot.range, Writes::Allowed, log);
        }),
    ];
    for (number, (what, lose)) in (1..).zip(losses) {
        vcpu.complete(each(Routine::Load), &mut space);
        space.worker.clear_dirty(slot.range, &log);
        log.take();
        let written = pages_of(number);
        for &page in &written {
            let store = Command::at(Routine::Store, slot.gva() + page * 4096);
            vcpu.complete(store, &mut space);
        }
        lose(&mut space.worker, &slot, &log);
        space.worker.clear_dirty(slot.range, &log);
        assert_eq!(log.take(), written, "{what}");
    }
}

#[test]
fn accessed_bits_are_the_pages_the_program_used() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    let mut vcpu = vm.vcpu(0);
    let slot = Linear::new(0x3_3333_3333, PAGES, DATA_PFN, 1);
    let mut space = MmuSpace::new(&mmu, &slot, &());
    vcpu.complete(Command::pages(Routine::Load, slot.gva(), PAGES), &mut space);
    for round in 1..=8 {
        assert!(space.worker.age(slot.range, true, &()) > 0);
        assert_eq!(space.worker.age(slot.range, false, &()), 0);
        // Aging does not flush. Without a flush, nobody knows when the TLB drops a translation.
        vm.flush();
        let used = pages_of(round);
        for &page in &used {
            let routine = if page % 2 == 0 {
                Routine::Store
            } else {
                Routine::Load
            };
            vcpu.complete(Command::at(routine, slot.gva() + page * 4096), &mut space);
        }
        let start = slot.range.start().0;
        let mut young = Vec::new();
        space.worker.scan(slot.range, |gfn, found| {
            if found.leaf.accessed {
                young.push(gfn.0 - start);
            }
        });
        if vm.host.speculates() {
            assert!(
                used.iter().all(|page| young.contains(page)),
                "round {round}"
            );
            println!("{} used, {} accessed", used.len(), young.len());
        } else {
            assert_eq!(young, used, "round {round}");
        }
        assert_eq!(space.worker.age(slot.range, false, &()), young.len() as u64);
        let first = Gfn(start + used[0]);
        assert!(
            space
                .worker
                .walk(first)
                .is_some_and(|found| found.leaf.accessed)
        );
    }
    assert_eq!(
        space.take_faults().installed,
        PAGES,
        "aging takes no rights away"
    );
}
