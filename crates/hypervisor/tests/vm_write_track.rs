//! Write tracking, call by call: which stores leave the guest, what goes on, and what becomes of the tracked pages.

mod vm_fleet;
mod vm_support;

use pageferry_addr::{Gpa, RamPage};
use pageferry_hypervisor::hart::Access;
use pageferry_hypervisor::{
    DirtyBy, DirtyProtect, Exit, HostMemory, Region, SlotFlags, UserfaultBits, VcpuCore, Vm,
    VmConfig, VmError,
};
use pageferry_userfault::PageBitmap;
use std::sync::Arc;
use vm_fleet::{LARGE, LargeRam, dirty_log, named, set};
use vm_support::{HostRam, PAGE, asm::*};

const MEMORY: u64 = 0x4000_0000;
const ELSEWHERE: u64 = 0x8000_0000;
/// A page of zeros: each store below changes what it stores to.
const VALUE: u64 = 0x0101_0101_0101_0101;

const LOAD: u64 = 0;
/// Ways to store `VALUE`, in a0, to the address in a1.
const STORES: [(&str, u64); 6] = [
    ("sd", 64),
    ("sb", 128),
    ("amoswap.d", 192),
    ("amoor.w", 256),
    ("lr.d, sc.d", 320),
    ("misaligned sd", 384),
];
const SD: u64 = STORES[0].1;

fn code() -> Arc<HostRam> {
    let code = HostRam::new(1);
    code.code(LOAD, &[ld(A2, A1, 0), WFI]);
    let stores: [&[u32]; 6] = [
        &[sd(A0, A1, 0), WFI],
        &[sb(A0, A1, 5), WFI],
        &[atomic(AMOSWAP, D, A2, A1, A0), WFI],
        &[atomic(AMOOR, W, A2, A1, A0), WFI],
        &[
            atomic(LR, D, A2, A1, 0),
            atomic(SC, D, A3, A1, A0),
            bne(A3, X0, -8),
            WFI,
        ],
        &[sd(A0, A1, 3), WFI],
    ];
    for ((_, at), store) in STORES.iter().zip(stores) {
        code.code(*at, store);
    }
    code
}

/// One vCPU, and memory of `M` in slot 1.
struct One<M> {
    vm: Vm,
    vcpu: VcpuCore,
    ram: Arc<M>,
    region: Region,
}

impl<M: HostMemory + 'static> One<M> {
    fn of(config: VmConfig, ram: Arc<M>, region: Region) -> Self {
        let vm = Vm::new(config);
        vm.set_user_memory_region2(code().region(0, 0, 0, 1))
            .unwrap();
        vm.set_user_memory_region2(region.clone()).unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        Self {
            vm,
            vcpu,
            ram,
            region,
        }
    }

    /// Runs a program on an address of the memory.
    fn run(&mut self, program: u64, offset: u64) -> Exit {
        set(
            &mut self.vcpu,
            program,
            &[(A0, VALUE), (A1, self.region.gpa.0 + offset)],
        );
        self.vcpu.run()
    }

    fn store(&mut self, pages: impl IntoIterator<Item = u64>) {
        for page in pages {
            let exit = self.run(SD, page * PAGE);
            assert_eq!(exit, Exit::Halted, "page {page}");
        }
    }

    fn load(&mut self, pages: impl IntoIterator<Item = u64>) {
        for page in pages {
            let exit = self.run(LOAD, page * PAGE);
            assert_eq!(exit, Exit::Halted, "page {page}");
        }
    }

    /// A store to each leaves the guest.
    #[track_caller]
    fn refuses(&mut self, pages: impl IntoIterator<Item = u64>) {
        for page in pages {
            let exit = self.run(SD, page * PAGE);
            assert_eq!(exit, self.tracked(page), "page {page}");
        }
    }

    /// The exit of a store to the page.
    fn tracked(&self, page: u64) -> Exit {
        Exit::MemoryFault {
            gpa: Gpa(self.region.gpa.0 + page * PAGE),
            size: PAGE,
            access: Access::Store,
            userfault: false,
            write_tracked: true,
        }
    }

    fn track(&self, pages: std::ops::Range<u64>) -> u64 {
        self.vm.track_writes(1, pages).unwrap()
    }

    fn untrack(&self, pages: std::ops::Range<u64>) -> u64 {
        self.vm.untrack_writes(1, pages).unwrap()
    }

    fn set(&mut self, change: impl FnOnce(&mut Region)) {
        change(&mut self.region);
        self.vm
            .set_user_memory_region2(self.region.clone())
            .unwrap();
    }

    fn log(&mut self, on: bool) {
        let flags = if on {
            SlotFlags::LOG_DIRTY_PAGES
        } else {
            SlotFlags::EMPTY
        };
        self.set(|region| region.flags = flags);
    }

    fn fetch(&self) -> Vec<u64> {
        named(&dirty_log(&self.vm, 1, self.region.size / PAGE)).collect()
    }
}

fn one_of(config: VmConfig, pages: u64) -> One<HostRam> {
    let ram = HostRam::new(pages as usize);
    let region = ram.region(1, MEMORY, 0, pages);
    One::of(config, ram, region)
}

fn one(pages: u64) -> One<HostRam> {
    one_of(VmConfig::default(), pages)
}

/// Three pages of 2 MiB; the slot has all of them.
fn large() -> One<LargeRam> {
    let ram = LargeRam::new(3);
    let region = ram.region(1, MEMORY, SlotFlags::EMPTY);
    One::of(VmConfig::default(), ram, region)
}

/// Of 4 KiB and of 2 MiB; the page of the code is one more.
fn leaves<M>(one: &One<M>) -> [u64; 2] {
    let [small, large, _] = one.vm.mapped_leaves();
    [small - 1, large]
}

#[test]
fn every_kind_of_store_leaves_the_guest_and_is_repeated() {
    for (name, program) in STORES {
        // Not mapped; mapped by a load; writable in the TLB.
        for before in [None, Some(LOAD), Some(program)] {
            let mut one = one(4);
            if let Some(before) = before {
                assert_eq!(one.run(before, PAGE), Exit::Halted);
                (0..PAGE / 8).for_each(|word| one.ram.set(PAGE + 8 * word, 0));
            }
            assert!(one.vm.capabilities().write_tracking);
            assert_eq!(one.track(1..2), 1);
            assert_eq!(one.run(program, PAGE), one.tracked(1), "{name}, {before:?}");
            let pc = one.vcpu.hart().pc();
            let retired = one.vcpu.hart().instret();
            for _ in 0..3 {
                assert_eq!(one.vcpu.run(), one.tracked(1), "{name}: again");
                assert_eq!(
                    (one.vcpu.hart().pc(), one.vcpu.hart().instret()),
                    (pc, retired)
                );
            }
            assert!((0..PAGE / 8).all(|word| one.ram.get(PAGE + 8 * word) == 0));
            assert_eq!(one.run(LOAD, PAGE), Exit::Halted, "loads go on");
            one.store([0, 2]);
            assert_eq!(
                one.run(program, PAGE),
                one.tracked(1),
                "{name}: after loads"
            );
            assert_eq!(one.untrack(1..2), 1);
            assert_eq!(one.vcpu.run(), Exit::Halted, "{name}");
            assert_ne!(one.ram.get(PAGE) | one.ram.get(PAGE + 8), 0, "{name}");
        }
    }
}

#[test]
fn a_store_over_two_pages_needs_both_untracked() {
    for tracked in [0..1, 1..2, 0..2] {
        let mut one = one(2);
        one.store([0, 1]);
        one.ram.set(0, 0);
        one.ram.set(PAGE, 0);
        one.track(tracked.clone());
        for page in tracked {
            assert_eq!(one.run(SD, PAGE - 3), one.tracked(page));
            assert_eq!(
                (one.ram.get(PAGE - 8), one.ram.get(PAGE)),
                (0, 0),
                "not a byte"
            );
            one.untrack(page..page + 1);
        }
        assert_eq!(one.vcpu.run(), Exit::Halted);
        assert_eq!(one.ram.get(PAGE - 8), VALUE << 40);
        assert_eq!(one.ram.get(PAGE), VALUE >> 24);
    }
}

#[test]
fn fetches_from_tracked_pages_go_on() {
    let mut one = one(1);
    one.vm.track_writes(0, 0..1).unwrap();
    one.load([0]);
    one.store([0]);
}

#[test]
fn calls_count_pages_and_refuse_what_is_not_there() {
    let mut one = one(100);
    assert_eq!(one.untrack(0..100), 0);
    assert_eq!(
        (one.track(10..70), one.track(0..20), one.track(5..5)),
        (60, 10, 0)
    );
    assert_eq!((one.untrack(60..80), one.untrack(60..80)), (10, 0));
    one.refuses([0, 59]);
    one.store([60, 99]);
    assert_eq!(one.vm.track_writes(2, 0..1), Err(VmError::NoSuchSlot(2)));
    assert_eq!(one.vm.untrack_writes(2, 0..1), Err(VmError::NoSuchSlot(2)));
    #[expect(clippy::reversed_empty_ranges, reason = "is refused")]
    for pages in [99..101, 101..101, 2..1, 0..u64::MAX, u64::MAX..u64::MAX] {
        let outside = VmError::PagesOutside {
            slot: 1,
            pages: pages.clone(),
            has: 100,
        };
        assert_eq!(one.vm.track_writes(1, pages.clone()), Err(outside.clone()));
        assert_eq!(one.vm.untrack_writes(1, pages), Err(outside));
    }
    one.store([99]);
    let mut region = HostRam::new(1).region(2, ELSEWHERE, 0, 1);
    region.flags = SlotFlags::READONLY;
    one.vm.set_user_memory_region2(region).unwrap();
    assert_eq!(one.vm.track_writes(2, 0..1), Err(VmError::ReadOnlySlot(2)));
    assert_eq!(one.vm.untrack_writes(2, 0..1), Ok(0));
}

#[test]
fn tracking_goes_with_a_deleted_slot() {
    let mut one = one(4);
    one.track(0..4);
    one.vm.set_user_memory_region2(Region::delete(1)).unwrap();
    one.set(|_| ());
    one.store(0..4);
    assert_eq!(one.untrack(0..4), 0);
}

#[test]
fn tracking_stays_with_a_moved_slot_and_through_changes_of_flags() {
    let mut one = one(4);
    one.store(0..4);
    one.track(1..3);
    for (gpa, log) in [
        (ELSEWHERE, false),
        (ELSEWHERE, true),
        (MEMORY, true),
        (MEMORY, false),
    ] {
        one.set(|region| {
            region.gpa = Gpa(gpa);
            region.flags = if log {
                SlotFlags::LOG_DIRTY_PAGES
            } else {
                SlotFlags::EMPTY
            };
        });
        one.refuses([1, 2]);
        one.store([0, 3]);
        one.load(0..4);
        one.refuses([1, 2]);
    }
    // What is untracked now was tracked when the slot was another record.
    assert_eq!(one.untrack(0..4), 2);
    one.store(0..4);
    // And the other way round.
    one.log(true);
    one.track(3..4);
    one.log(false);
    one.refuses([3]);
    one.untrack(3..4);
    one.log(true);
    one.store(0..4);
}

#[test]
fn a_tracked_page_that_is_unmapped_is_tracked_still() {
    let mut one = one(4);
    let unmap: [fn(&One<HostRam>); 2] = [
        |one| {
            one.vm.invalidate_hva(one.ram.hva_range());
        },
        |one| {
            one.vm.zap_all();
        },
    ];
    one.store(0..4);
    one.track(0..2);
    for unmap in unmap {
        unmap(&one);
        one.refuses([0]);
        one.load([1]);
        one.refuses([1]);
        one.store([2, 3]);
        one.vm.age_hva(one.ram.hva_range(), true);
        one.refuses([0, 1]);
    }
    // Untracked while it is not mapped.
    one.vm.zap_all();
    one.untrack(0..1);
    one.store([0]);
    one.refuses([1]);
}

fn configs() -> impl Iterator<Item = VmConfig> {
    let by = [DirtyBy::WriteProtection, DirtyBy::Bits];
    let protect = [
        DirtyProtect::ByGet,
        DirtyProtect::ByClear,
        DirtyProtect::InitiallySet,
    ];
    by.into_iter().flat_map(move |dirty_by| {
        protect.map(|dirty_protect| VmConfig {
            dirty_by,
            dirty_protect,
            ..VmConfig::default()
        })
    })
}

/// Pages 0 to 4 are stored to before; 1 to 3 are tracked before the log begins, or after.
#[test]
fn a_log_has_the_stores_that_went_through_and_no_other() {
    for config in configs() {
        for track_first in [true, false] {
            let what = format!("{config:?}, tracked first: {track_first}");
            let mut one = one_of(config, 8);
            one.store(0..5);
            if track_first {
                one.track(1..4);
            }
            one.log(true);
            let fetch = |one: &One<HostRam>| {
                let pages = one.fetch();
                if config.dirty_protect != DirtyProtect::ByGet {
                    one.vm.clear_dirty_log(1, 0, &[u64::MAX]).unwrap();
                }
                pages
            };
            // Where the log begins all set, its first clearing protects.
            fetch(&one);
            if !track_first {
                one.store([1, 4]);
                one.track(1..4);
                assert_eq!(
                    fetch(&one),
                    [1, 4],
                    "{what}: what was stored before is not lost"
                );
            }
            one.refuses([1, 2]);
            one.load([3]);
            one.refuses([3]);
            assert_eq!(fetch(&one), [0; 0], "{what}");
            one.untrack(1..3);
            one.load([1, 2]);
            assert_eq!(fetch(&one), [0; 0], "{what}: untracked, and not stored to");
            one.store([2]);
            one.refuses([3]);
            assert_eq!(fetch(&one), [2], "{what}");
            one.store([1, 2]);
            assert_eq!(fetch(&one), [1, 2], "{what}");
            one.store([2]);
            assert_eq!(fetch(&one), [2], "{what}");
            one.log(false);
            one.store([1, 2]);
            one.refuses([3]);
        }
    }
}

#[test]
fn a_ring_has_the_stores_that_went_through_and_no_other() {
    let config = VmConfig {
        dirty_ring: Some(1024),
        ..VmConfig::default()
    };
    let mut one = one_of(config, 8);
    let mut ring = one.vcpu.take_dirty_ring().unwrap();
    let mut harvest = || -> Vec<_> {
        std::iter::from_fn(|| ring.harvest())
            .map(|page| page.offset)
            .collect()
    };
    one.log(true);
    one.store([1, 2]);
    one.track(1..4);
    assert_eq!(harvest(), [1, 2]);
    assert_eq!(one.vm.reset_dirty_rings(), 2);
    one.refuses([1, 2, 3]);
    assert_eq!(harvest(), [0; 0]);
    one.untrack(1..3);
    one.store([2, 1, 2, 1]);
    one.refuses([3]);
    assert_eq!(harvest(), [2, 1]);
    assert_eq!(one.vm.reset_dirty_rings(), 2);
    one.store([1]);
    assert_eq!(harvest(), [1]);
    assert_eq!(one.fetch(), [0; 0]);
}

#[test]
fn a_missing_page_is_brought_before_it_is_copied() {
    let mut one = one(3);
    one.store([0]);
    one.track(0..2);
    let bitmap = Arc::new(PageBitmap::new(3));
    bitmap.set_range(0..3);
    one.set(|region| {
        region.flags = SlotFlags::USERFAULT;
        region.userfault = Some(UserfaultBits {
            bitmap: Arc::clone(&bitmap),
            first: RamPage(0),
        });
    });
    let missing = |page: u64, access| Exit::MemoryFault {
        gpa: Gpa(MEMORY + page * PAGE),
        size: PAGE,
        access,
        userfault: true,
        write_tracked: false,
    };
    for page in [0, 1] {
        assert_eq!(one.run(SD, page * PAGE), missing(page, Access::Store));
        assert_eq!(one.run(LOAD, page * PAGE), missing(page, Access::Load));
        bitmap.clear(RamPage(page));
        one.refuses([page]);
        one.load([page]);
        one.refuses([page]);
        one.untrack(page..page + 1);
        one.store([page]);
    }
    // The bits are independent of each other.
    one.track(2..3);
    one.untrack(2..3);
    assert_eq!(one.run(SD, 2 * PAGE), missing(2, Access::Store));
}

#[test]
fn large_pages_are_split_where_a_page_is_tracked_and_large_again_afterwards() {
    let mut one = large();
    one.store([0, LARGE, 2 * LARGE]);
    assert_eq!(leaves(&one), [0, 3]);
    one.track(LARGE + 7..LARGE + 9);
    assert_eq!(leaves(&one), [LARGE, 2], "the others stay");
    one.refuses([LARGE + 7, LARGE + 8]);
    one.store([0, LARGE, LARGE + 6, LARGE + 9, 2 * LARGE]);
    // By faults too.
    one.vm.zap_all();
    one.store([3, LARGE + 3]);
    one.load([LARGE + 7]);
    assert_eq!(leaves(&one), [2, 1]);
    one.refuses([LARGE + 7]);
    one.untrack(LARGE + 7..LARGE + 8);
    one.store([LARGE + 7]);
    one.refuses([LARGE + 8]);
    assert_eq!(leaves(&one), [2, 1]);
    one.untrack(LARGE + 8..LARGE + 9);
    assert_eq!(leaves(&one), [0, 2], "large again");
    one.store([LARGE + 8]);
    one.store(0..3 * LARGE);
    assert_eq!(leaves(&one), [0, 3]);
}

#[test]
fn a_log_that_ends_leaves_pages_small_that_are_tracked() {
    let mut one = large();
    one.store([0, LARGE, 2 * LARGE]);
    one.track(5..6);
    one.log(true);
    assert_eq!(leaves(&one), [3 * LARGE, 0]);
    one.store([6]);
    one.log(false);
    assert_eq!(leaves(&one), [LARGE, 2]);
    one.refuses([5]);
    // While a log goes on nothing becomes large.
    one.log(true);
    one.untrack(5..6);
    assert_eq!(leaves(&one), [3 * LARGE, 0]);
    one.store([5]);
    one.log(false);
    assert_eq!(leaves(&one), [0, 3]);
}

/// What is tracked piece by piece is large again as a whole.
#[test]
fn all_that_was_tracked_is_large_again_when_the_last_page_is_untracked() {
    let mut one = large();
    one.store([0, LARGE, 2 * LARGE]);
    for page in [2 * LARGE + 511, 0, LARGE + 1] {
        one.track(page..page + 1);
    }
    for page in [0, 2 * LARGE + 511] {
        one.untrack(page..page + 1);
        assert_eq!(leaves(&one), [3 * LARGE, 0]);
    }
    one.untrack(0..3 * LARGE);
    assert_eq!(leaves(&one), [0, 3]);
}
