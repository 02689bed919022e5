//! Two vCPUs add to the same pages. Meanwhile other threads maintain the tables, and the host moves
//! the memory behind the pages.
//!
//! Each addition is a load and a store. An addition to a frame that the host has already taken away
//! is missing in the end.

use super::code::Routine;
use super::layout::DATA_PFN;
use super::slot::Linear;
use super::space::{Faults, MmuSpace};
use super::tables::{GuestWorker, leaves, vm_and_mmu};
use super::vcpu::Command;
use super::vm::Vm;
use pageferry_addr::{Gfn, GfnRange, Pfn};
use pageferry_tdp::Target;
use pageferry_tdp::format::{Access, MemoryType, Writes};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// One large page.
const PAGES: u64 = 512;
const FIRST: Gfn = Gfn(0x5_0000);
/// The time for which the vCPUs add.
const TIME: Duration = Duration::from_millis(1200);
/// The pause between two rounds of a maintaining thread, so that the vCPUs use the pages that they
/// map.
const PAUSE: Duration = Duration::from_millis(2);

fn all() -> GfnRange {
    GfnRange::new(FIRST, PAGES).expect("a range")
}

#[test]
fn two_vcpus_fault_the_same_pages_in_at_once() {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    let linear = Linear::new(0x6_0000, 4096, DATA_PFN, 1);
    let barrier = std::sync::Barrier::new(2);
    let faults = std::thread::scope(|scope| {
        let guests = [0, 1].map(|number| {
            let (mut vcpu, mmu, linear, barrier) = (vm.vcpu(number), &mmu, &linear, &barrier);
            scope.spawn(move || {
                let mut space = MmuSpace::new(mmu, linear, &());
                barrier.wait();
                let add = Command::pages(Routine::Add, linear.gva(), 4096).with(number + 1);
                vcpu.complete(add, &mut space);
                space.take_faults()
            })
        });
        guests.map(|guest| guest.join().expect("the guest ends well"))
    });
    println!("{faults:?}");
    assert_eq!(
        faults[0].installed + faults[1].installed,
        4096,
        "each page once"
    );
    assert_eq!(leaves(&mmu, true), [4096, 0, 0]);
    for page in 0..4096 {
        let word = vm.ram.word(linear.gpa() + page * 4096);
        assert_eq!(word.load(Ordering::Relaxed), 3, "page {page}");
    }
}

/// The host's frames behind the pages: one of two frames for each.
struct Host {
    frames: Vec<AtomicU64>,
    /// The frames are those of one large page.
    large: AtomicBool,
    /// Notifiers of one range run one after the other, as under the host's locks.
    moving: Mutex<()>,
    /// The number of pages that were mapped when they were moved.
    moved: AtomicU64,
}

impl Host {
    fn new() -> Self {
        Self {
            frames: (0..PAGES)
                .map(|page| AtomicU64::new(DATA_PFN + page))
                .collect(),
            large: AtomicBool::new(false),
            moving: Mutex::new(()),
            moved: AtomicU64::new(0),
        }
    }

    fn target(&self, gfn: Gfn, _: Access) -> Option<Target> {
        let page = gfn.checked_offset_from(FIRST)?;
        let pfn = self.frames.get(page as usize)?;
        let large = self.large.load(Ordering::Acquire);
        Some(Target {
            pfn: Pfn(pfn.load(Ordering::Acquire)),
            level: if large { 2 } else { 1 },
            access: Access::READ_WRITE,
            writes: Writes::Allowed,
            memory: MemoryType::WriteBack,
        })
    }

    /// Moves `pages` pages from `first` on as `to` says: invalidates, copies and wipes them, and
    /// ends the invalidation. `large`: the frames are one large page afterwards.
    fn migrate(
        &self,
        vm: &Vm,
        worker: &mut GuestWorker,
        (first, pages): (u64, u64),
        to: impl Fn(u64) -> u64,
        large: bool,
    ) {
        let _one = self.moving.lock().unwrap_or_else(PoisonError::into_inner);
        let range = GfnRange::new(Gfn(FIRST.0 + first), pages).expect("a range");
        let invalidating = worker.invalidate(&[range], &());
        // A fault still gets the old frames here.
        std::thread::yield_now();
        for page in first..first + pages {
            let from = self.frames[page as usize].load(Ordering::Relaxed);
            let to = to(from - DATA_PFN) + DATA_PFN;
            if from != to {
                let word = vm.ram.word(from << 12).swap(u64::MAX / 2, Ordering::AcqRel);
                vm.ram.word(to << 12).store(word, Ordering::Release);
                self.frames[page as usize].store(to, Ordering::Release);
            }
        }
        self.large.store(large, Ordering::Release);
        self.moved
            .fetch_add(invalidating.zapped(), Ordering::Relaxed);
        drop(invalidating);
    }

    /// Moves some pages to their other frames.
    fn scatter(&self, vm: &Vm, worker: &mut GuestWorker, round: u64) {
        let first = round * 37 % PAGES;
        let pages = (PAGES - first).min(round % 64 + 1);
        self.migrate(
            vm,
            worker,
            (first, pages),
            |frame| (frame + PAGES) % (2 * PAGES),
            false,
        );
    }

    /// Moves all pages together as one large page.
    fn collapse(&self, vm: &Vm, worker: &mut GuestWorker) {
        self.migrate(vm, worker, (0, PAGES), |frame| frame % PAGES, true);
    }
}

/// The repeated work of a thread.
type Maintain<'m> = &'m (dyn Fn(&Vm, &mut GuestWorker, u64) + Sync);

/// Sets a flag when it is dropped, also by a panic.
struct Stop<'f>(&'f AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Two vCPUs add 1 to every page, pass after pass, while each of `maintain` has a thread. In the
/// end each page must have every addition. Does nothing without KVM.
fn two_vcpus_add(host: &Host, maintain: &[Maintain<'_>]) {
    let Some((vm, mmu)) = vm_and_mmu() else {
        return;
    };
    mmu.platform().flush_roots_late();
    let slot = |gfn: Gfn, access: Access| host.target(gfn, access);
    let stop = AtomicBool::new(false);
    let stop = &stop;
    let passes = std::thread::scope(|scope| {
        let guests = [0, 1].map(|number| {
            let (mut vcpu, mmu, slot) = (vm.vcpu(number), &mmu, &slot);
            scope.spawn(move || -> (u64, Faults) {
                let _stop = Stop(stop);
                let mut space = MmuSpace::new(mmu, slot, &());
                let add = Command::pages(Routine::Add, FIRST.gpa().0, PAGES).with(1);
                let mut passes = 0;
                while passes == 0 || !stop.load(Ordering::Acquire) {
                    vcpu.complete(add, &mut space);
                    passes += 1;
                }
                (passes, space.take_faults())
            })
        });
        let maintaining: Vec<_> = maintain
            .iter()
            .map(|maintain| {
                let (vm, mmu) = (&vm, &mmu);
                scope.spawn(move || {
                    let _stop = Stop(stop);
                    let (mut worker, mut round) = (mmu.worker(), 0_u64);
                    while round == 0 || !stop.load(Ordering::Acquire) {
                        maintain(vm, &mut worker, round);
                        worker.reclaim();
                        round += 1;
                        std::thread::sleep(PAUSE);
                    }
                    round
                })
            })
            .collect();
        std::thread::sleep(TIME);
        stop.store(true, Ordering::Release);
        let rounds = maintaining
            .into_iter()
            .map(|thread| thread.join().expect("maintained"));
        let rounds: Vec<_> = rounds.collect();
        let guests = guests.map(|guest| guest.join().expect("the guest ends well"));
        println!(
            "{guests:?}; {rounds:?} rounds, {} flushes",
            vm.flushes.count()
        );
        guests[0].0 + guests[1].0
    });
    for (page, pfn) in host.frames.iter().enumerate() {
        let word = vm.ram.word(pfn.load(Ordering::Relaxed) << 12);
        assert_eq!(word.load(Ordering::Relaxed), passes, "page {page}");
    }
    let stats = mmu.stats();
    let used = mmu.platform().in_use();
    assert_eq!(used, stats.tables + 1, "a table is lost");
}

#[test]
fn pages_that_the_host_moves() {
    let host = Host::new();
    two_vcpus_add(
        &host,
        &[&|vm, worker, round| host.scatter(vm, worker, round)],
    );
}

#[test]
fn pages_that_the_host_moves_and_puts_together() {
    let host = Host::new();
    two_vcpus_add(
        &host,
        &[
            &|vm, worker, round| match round % 2 {
                0 => host.collapse(vm, worker),
                _ => host.scatter(vm, worker, round),
            },
            &|_, worker, round| {
                if round % 2 == 0 {
                    worker.split(all(), 1, &()).expect("frames for tables");
                } else {
                    worker.recover(all(), &(), |gfn, level| {
                        let target = host.target(gfn, Access::READ_WRITE)?;
                        Some(target).filter(|target| target.level >= level)
                    });
                }
            },
        ],
    );
}

#[test]
fn pages_that_the_host_moves_while_everything_is_zapped() {
    let host = Host::new();
    two_vcpus_add(
        &host,
        &[
            &|vm, worker, round| host.scatter(vm, worker, round),
            &|_, worker, round| {
                if round % 3 == 2 {
                    worker.zap(all(), &());
                } else {
                    worker.zap_all(&()).expect("a frame for the root");
                }
            },
        ],
    );
}

#[test]
fn pages_that_are_protected_and_aged_and_harvested() {
    let host = Host::new();
    two_vcpus_add(
        &host,
        &[
            &|vm, worker, round| host.scatter(vm, worker, round),
            &|_, worker, round| {
                match round % 3 {
                    0 => worker.clear_dirty(all(), &()),
                    1 => worker.age(all(), true, &()),
                    _ => {
                        worker.set_writes(all(), Writes::MmuForbids, &());
                        worker.set_writes(all(), Writes::Allowed, &())
                    }
                };
            },
        ],
    );
}
