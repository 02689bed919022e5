//! Pages change their size, their permissions and their place while vCPUs use them.

use super::code::{Routine, command};
use super::layout::{DATA_PFN, Seat};
use super::slot::{DirtyLog, Linear};
use super::space::{Faults, MmuSpace};
use super::tables::{GuestMmu, GuestWorker, leaves, vm_and_mmu};
use super::vcpu::Command;
use super::vm::Vm;
use pageferry_addr::Gfn;
use pageferry_tdp::Target;
use pageferry_tdp::format::Writes;
use pageferry_testkit::LIMIT;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A guest that stores the number of its round to each page of a range until it is stopped.
struct Spinning<'v> {
    vm: &'v Vm,
    seat: Seat,
}

impl Spinning<'_> {
    fn rounds(&self) -> u64 {
        let at = self.vm.ram.word(self.seat.command() + command::ROUNDS);
        at.load(Ordering::Acquire)
    }

    /// Waits until the guest has made `count` more rounds, so that it has visited all pages in
    /// between.
    fn wait(&self, count: u64) {
        let (from, end) = (self.rounds(), Instant::now() + LIMIT);
        while self.rounds() < from + count {
            assert!(Instant::now() < end, "the guest gets nowhere");
            std::thread::yield_now();
        }
    }
}

/// Calls `meanwhile` while the guest spins over `linear`. Returns the result, and the faults since
/// all pages were mapped.
fn while_spinning<R>(
    vm: &Arc<Vm>,
    mmu: &Arc<GuestMmu>,
    linear: &Linear,
    log: &DirtyLog,
    meanwhile: impl FnOnce(&Spinning<'_>) -> R,
) -> (R, Faults) {
    let mut vcpu = vm.vcpu(0);
    let mut space = MmuSpace::new(mmu, linear, log);
    let stores = Command::pages(Routine::Store, linear.gva(), linear.range.pages());
    vcpu.complete(stores, &mut space);
    space.take_faults();
    let seat = Seat(0);
    let stop = vm.ram.word(seat.command() + command::STOP);
    let spin = Command {
        routine: Routine::Spin,
        ..stores
    };
    std::thread::scope(|scope| {
        let guest = scope.spawn(move || {
            let rounds = vcpu.complete(spin, &mut space);
            (rounds, space.take_faults())
        });
        let result = {
            // Also if `meanwhile` panics.
            let _stop = Stop(stop);
            meanwhile(&Spinning { vm, seat })
        };
        let (rounds, faults) = guest.join().expect("the guest ends well");
        for page in 0..linear.range.pages() {
            let word = vm.ram.word(linear.gpa() + page * 4096);
            assert_eq!(word.load(Ordering::Relaxed), rounds, "page {page}");
        }
        (result, faults)
    })
}

struct Stop<'r>(&'r AtomicU64);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(1, Ordering::Release);
    }
}

fn recover(worker: &mut GuestWorker, linear: &Linear, log: &DirtyLog) -> u64 {
    worker.recover(linear.range, log, |gfn, level| {
        let target = linear.everything(gfn)?;
        Some(Target { level, ..target })
    })
}

#[test]
fn pages_are_split_under_a_guest_that_writes_them_without_a_flush_or_a_fault() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    let linear = Linear::new(0x4_0000, 2048, DATA_PFN, 2);
    let log = DirtyLog::off(linear.range);
    let ((), faults) = while_spinning(&vm, &mmu, &linear, &log, |guest| {
        let mut worker = mmu.worker();
        assert_eq!(leaves(&mmu, true), [0, 4, 0]);
        let before = vm.flushes.count();
        guest.wait(2);
        assert_eq!(worker.split(linear.range, 1, &log), Ok(4));
        guest.wait(2);
        assert_eq!(vm.flushes.count(), before);
        assert_eq!(leaves(&mmu, true), [2048, 0, 0]);
        worker.scan(linear.range, |gfn, found| {
            assert!(found.leaf.dirty, "{gfn:?} has lost its dirty bit");
            assert_eq!(found.leaf.pfn.0 - DATA_PFN, gfn.0 - 0x4_0000);
        });
        assert!(log.take().is_empty());
        // The flush removes the large pages from the TLB, and the guest uses the new tables.
        vm.flush();
        guest.wait(2);
    });
    assert_eq!(faults, Faults::default());
}

#[test]
fn pages_are_recovered_under_a_guest_that_writes_them() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    let linear = Linear::new(0x4_0000, 2048, DATA_PFN, 2);
    let log = DirtyLog::off(linear.range);
    while_spinning(&vm, &mmu, &linear, &log, |guest| {
        let mut worker = mmu.worker();
        for round in 0..20 {
            assert_eq!(worker.split(linear.range, 1, &log), Ok(4), "round {round}");
            guest.wait(1);
            assert_eq!(recover(&mut worker, &linear, &log), 4, "round {round}");
            assert_eq!(leaves(&mmu, true), [0, 4, 0]);
            guest.wait(1);
            assert_eq!(
                log.take().len(),
                2048,
                "the dirty bits that went with the tables"
            );
        }
        worker.reclaim();
    });
    // No table is lost: the tables in use are those of the tree and of the caches.
    let stats = mmu.stats();
    assert_eq!(mmu.platform().in_use(), stats.tables + 1);
}

/// A pre-copy: it copies the logged pages again and again, and stops the guest for the last round.
fn copy(vm: &Vm, linear: &Linear, copies: &mut [u64], pages: &[u64]) {
    for &page in pages {
        let word = vm.ram.word(linear.gpa() + page * 4096);
        copies[page as usize] = word.load(Ordering::Acquire);
    }
}

fn a_copy_made_by_the_log_is_complete(
    level: u32,
    mut disturb: impl FnMut(&mut GuestWorker, &Linear, &DirtyLog, u64),
) {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    let linear = Linear::new(0x4_0000, 1024, DATA_PFN, level);
    let log = DirtyLog::new(linear.range);
    let mut copies = vec![0; 1024];
    let mut worker = mmu.worker();
    let ((), faults) = while_spinning(&vm, &mmu, &linear, &log, |guest| {
        for round in 0..40 {
            worker.clear_dirty(linear.range, &log);
            copy(&vm, &linear, &mut copies, &log.take());
            disturb(&mut worker, &linear, &log, round);
            if round % 4 == 0 {
                guest.wait(1);
            }
        }
    });
    worker.clear_dirty(linear.range, &log);
    copy(&vm, &linear, &mut copies, &log.take());
    for page in 0..1024 {
        let word = vm.ram.word(linear.gpa() + page * 4096);
        let copied = copies[page as usize];
        assert_eq!(
            copied,
            word.load(Ordering::Relaxed),
            "page {page} was written unseen"
        );
    }
    println!("{faults:?}, {} flushes", vm.flushes.count());
}

#[test]
fn a_copy_made_by_dirty_bits_is_complete() {
    a_copy_made_by_the_log_is_complete(1, |_, _, _, _| {});
}

#[test]
fn a_copy_is_complete_though_pages_change_their_size() {
    a_copy_made_by_the_log_is_complete(2, |worker, linear, log, round| {
        if round % 2 == 0 {
            worker
                .split(linear.range, 1, log)
                .expect("frames for tables");
        } else {
            recover(worker, linear, log);
        }
    });
}

#[test]
fn a_copy_is_complete_though_pages_are_zapped_and_protected_and_rooted_anew() {
    a_copy_made_by_the_log_is_complete(2, |worker, linear, log, round| match round % 4 {
        0 => drop(worker.invalidate(&[linear.range], log)),
        1 => {
            worker.zap_all(log).expect("a frame for the root");
        }
        2 => {
            worker.zap(linear.range, log);
        }
        _ => {
            worker.set_writes(linear.range, Writes::MmuForbids, log);
            worker.set_writes(linear.range, Writes::Allowed, log);
        }
    });
}

#[test]
fn a_copy_made_by_write_protection_is_complete() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    let linear = Linear::new(0x4_0000, 1024, DATA_PFN, 1);
    let log = DirtyLog::new(linear.range);
    let mut copies = vec![0; 1024];
    let mut worker = mmu.worker();
    let ((), faults) = while_spinning(&vm, &mmu, &linear, &log, |guest| {
        worker.set_writes(linear.range, Writes::AllowedLoggedByFault, &log);
        for round in 0..40 {
            // First take the bits, then protect their pages, then flush.
            let dirty = log.take();
            worker.deferred(|worker| {
                for &page in &dirty {
                    worker.write_protect_mask(Gfn(linear.range.start().0 + page), 1, &());
                }
            });
            copy(&vm, &linear, &mut copies, &dirty);
            if round % 4 == 0 {
                guest.wait(1);
            }
        }
    });
    assert!(faults.fast > 0, "{faults:?}");
    worker.flush();
    copy(&vm, &linear, &mut copies, &log.take());
    for page in 0..1024 {
        let word = vm.ram.word(linear.gpa() + page * 4096);
        let copied = copies[page as usize];
        assert_eq!(
            copied,
            word.load(Ordering::Relaxed),
            "page {page} was written unseen"
        );
    }
    println!("{faults:?}, {} flushes", vm.flushes.count());
}
