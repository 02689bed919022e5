//! Host memory of 2 MiB pages: the VM maps it by large pages, splits these for logs and userfault
//! bits, and joins them afterwards. The behaviours are those of Linux's
//! `tools/testing/selftests/kvm/x86/dirty_log_page_splitting_test.c` and
//! `access_tracking_perf_test.c`.

use crate::support::fleet::{
    A4, A5, Fleet, LARGE, LargeRam, T3, dirty_log, named, no_exit, run_until_halted, set,
};
use crate::support::programs::{self, CHECK, HALT, STORE};
use crate::support::vm::{HostRam, PAGE, asm::*};
use pageferry_addr::{Gpa, Hva, RamPage};
use pageferry_hypervisor::{
    DirtyBy, DirtyProtect, Exit, Region, SlotFlags, UserfaultBits, VcpuCore, Vm, VmConfig,
};
use pageferry_testkit::{LIMIT, Random};
use pageferry_userfault::PageBitmap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const VCPUS: u64 = 4;
/// The number of 2 MiB pages.
const LARGES: u64 = 8;
const PAGES: u64 = LARGES * LARGE;
const MEMORY: u64 = 0x4000_0000;
/// The number of 4 KiB pages that are always mapped: the code.
const CODE: u64 = 1;
/// The program in [`Test::new`].
const SWEEP: u64 = programs::OWN;

const SPLIT: [u64; 3] = [CODE + PAGES, 0, 0];
const WHOLE: [u64; 3] = [CODE, LARGES, 0];

/// A VM whose slot 1 is large memory, and its vCPUs.
struct Test {
    vm: Vm,
    vcpus: Vec<VcpuCore>,
    code: Arc<HostRam>,
    ram: Arc<LargeRam>,
}

impl Test {
    fn new(config: VmConfig) -> Self {
        let code = programs::code();
        // An endless loop. It counts in a0, stores a0 to word a4 of pages a1 to a2 and loads it
        // back. After each round it stores a0 to a5.
        let sweep = [
            addi(A0, A0, 1),
            add(T0, A1, A4),
            sd(A0, T0, 0),
            ld(T3, T0, 0),
            bne(T3, A0, 20),
            add(T0, T0, T1),
            bltu(T0, A2, -16),
            sd(A0, A5, 0),
            jal(X0, -32),
            ECALL,
        ];
        code.code(SWEEP, &sweep);
        let ram = LargeRam::new(LARGES);
        let vm = Vm::new(config);
        vm.set_user_memory_region2(code.region(0, 0, 0, CODE))
            .unwrap();
        vm.set_user_memory_region2(ram.region(1, MEMORY, SlotFlags::EMPTY))
            .unwrap();
        let vcpus = (0..VCPUS as u32)
            .map(|id| vm.create_vcpu(id).unwrap())
            .collect();
        Self {
            vm,
            vcpus,
            code,
            ram,
        }
    }

    fn flags(&self, flags: SlotFlags) {
        self.vm
            .set_user_memory_region2(self.ram.region(1, MEMORY, flags))
            .unwrap();
    }

    /// Runs `program` on each vCPU, over the vCPU's part of the memory.
    fn all(&mut self, program: u64, tag: u64) {
        for (id, vcpu) in (0..).zip(&mut self.vcpus) {
            let first = MEMORY + id * PAGES / VCPUS * PAGE;
            let end = first + PAGES / VCPUS * PAGE;
            programs::begin(vcpu, program, tag, first, end);
        }
        run_until_halted(&mut self.vcpus, no_exit);
    }

    /// Runs `program` on one vCPU, over some pages.
    fn one(&mut self, program: u64, tag: u64, pages: impl IntoIterator<Item = u64>) {
        for page in pages {
            let first = MEMORY + page * PAGE;
            programs::begin(&mut self.vcpus[0], program, tag, first, first + PAGE);
            assert_eq!(self.vcpus[0].run(), Exit::Halted, "page {page}");
        }
    }

    fn fetch(&self) -> Vec<u64> {
        named(&dirty_log(&self.vm, 1, PAGES)).collect()
    }

    /// Makes all vCPUs drop their translations: it unmaps the code, and maps it again.
    fn flush_tlbs(&mut self) {
        let hva = self.code.hva();
        assert_eq!(self.vm.invalidate_hva(hva..Hva(hva.0 + 1)), 1);
        for vcpu in &mut self.vcpus {
            // The program does nothing.
            set(vcpu, HALT, &[]);
            assert_eq!(vcpu.run(), Exit::Halted);
        }
    }

    /// The number of used pages. A large page counts as 512.
    fn young(&self, clear: bool) -> u64 {
        self.vm.age_hva(self.ram.hvas(0, PAGES), clear)
    }
}

fn configs() -> impl Iterator<Item = VmConfig> {
    use DirtyProtect::{ByClear, ByGet, InitiallySet};
    let bys = [DirtyBy::WriteProtection, DirtyBy::Bits].into_iter();
    bys.flat_map(|dirty_by| {
        [ByGet, ByClear, InitiallySet].map(|dirty_protect| VmConfig {
            dirty_by,
            dirty_protect,
            ..VmConfig::default()
        })
    })
}

#[test]
fn logs_split_large_pages_and_make_them_large_again() {
    for config in configs() {
        let mut test = Test::new(config);
        test.all(STORE, 1);
        assert_eq!(test.vm.mapped_leaves(), WHOLE, "{config:?}");
        let bytes = test.vm.table_bytes();
        for round in 2..4 {
            test.flags(SlotFlags::LOG_DIRTY_PAGES);
            let all: Vec<_> = (0..PAGES).collect();
            let all_bits = [u64::MAX; (PAGES / 64) as usize];
            if config.dirty_protect == DirtyProtect::InitiallySet {
                assert_eq!(
                    test.vm.mapped_leaves(),
                    WHOLE,
                    "{config:?}: no page is split"
                );
                assert_eq!(test.fetch(), all);
                // Clearing a part splits the large pages around the part.
                assert_eq!(test.vm.clear_dirty_log(1, 64, &all_bits[..1]).unwrap(), 64);
                let second = [CODE + LARGE, LARGES - 1, 0];
                assert_eq!(test.vm.mapped_leaves(), second, "{config:?}");
                test.one(STORE, round, [0, 100]);
                let mut rest = all.clone();
                rest.retain(|page| !(64..128).contains(page) || *page == 100);
                assert_eq!(test.fetch(), rest, "{config:?}");
                test.vm.clear_dirty_log(1, 0, &all_bits).unwrap();
            }
            assert_eq!(test.vm.mapped_leaves(), SPLIT, "{config:?}");
            assert_eq!(test.vm.table_bytes(), bytes + LARGES * PAGE, "{config:?}");
            assert_eq!(test.fetch(), [0; 0], "{config:?}");
            // Memory is unchanged.
            test.one(CHECK, 1, [1, 99, PAGES - 1]);
            // Small pages are logged one by one.
            let some = [0, 3, LARGE - 1, LARGE, 5 * LARGE + 77, PAGES - 1];
            test.one(STORE, round, some);
            assert_eq!(test.fetch(), some, "{config:?}");
            if config.dirty_protect != DirtyProtect::ByGet {
                assert_eq!(test.vm.clear_dirty_log(1, 0, &all_bits).unwrap(), 6);
            }
            assert_eq!(test.fetch(), [0; 0], "{config:?}");
            assert_eq!(test.vm.mapped_leaves(), SPLIT, "{config:?}");
            test.all(STORE, round);
            assert_eq!(test.fetch(), all, "{config:?}");
            test.flags(SlotFlags::EMPTY);
            assert_eq!(test.vm.mapped_leaves(), WHOLE, "{config:?}: large again");
            assert_eq!(test.vm.table_bytes(), bytes, "{config:?}");
            test.all(CHECK, round);
            test.all(STORE, 1);
            assert_eq!(test.vm.mapped_leaves(), WHOLE, "{config:?}");
        }
    }
}

/// vCPUs store everywhere while logs start, are read, and stop.
#[test]
fn logs_come_and_go_under_running_guests_on_large_pages() {
    for config in configs() {
        let Test {
            vm,
            mut vcpus,
            code,
            ram,
        } = Test::new(config);
        let progress = |id: u64| 512 + id * 64;
        for (id, vcpu) in (0..).zip(&mut vcpus) {
            let registers = [
                (A1, MEMORY),
                (A2, MEMORY + PAGES * PAGE),
                (A4, id * 64),
                (A5, progress(id)),
                (T1, PAGE),
            ];
            set(vcpu, SWEEP, &registers);
        }
        let fleet = Fleet::of(&vcpus);
        let swept = || (0..VCPUS).map(|id| code.get(progress(id))).min().unwrap();
        let sum = |page: u64| -> u64 { (0..VCPUS).map(|id| ram.get(page * PAGE + id * 64)).sum() };
        let all_bits = [u64::MAX; (PAGES / 64) as usize];
        let (mut rounds, mut large) = (0, 0);
        std::thread::scope(|scope| {
            let _stop = fleet.stop_on_drop();
            let fleet = &fleet;
            for vcpu in &mut vcpus {
                scope.spawn(move || {
                    fleet.drive(vcpu, |vcpu, exit| panic!("{exit:?}: {vcpu:?}"));
                });
            }
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_millis(250) || rounds < 3 {
                assert!(begin.elapsed() < LIMIT, "only {rounds} rounds");
                rounds += 1;
                let before = swept();
                fleet.until("the guests to use all pages", || swept() > before);
                let set_flags = |flags| {
                    vm.set_user_memory_region2(ram.region(1, MEMORY, flags))
                        .unwrap();
                };
                set_flags(SlotFlags::LOG_DIRTY_PAGES);
                let mut copy: Vec<_> = (0..PAGES).map(sum).collect();
                let mut harvest = || {
                    let log = dirty_log(&vm, 1, PAGES);
                    if config.dirty_protect != DirtyProtect::ByGet {
                        vm.clear_dirty_log(1, 0, &log).unwrap();
                    }
                    named(&log).for_each(|page| copy[page as usize] = sum(page));
                };
                let before = swept();
                fleet.until("the guests to dirty all pages", || {
                    harvest();
                    swept() > before
                });
                {
                    let _paused = fleet.pause();
                    harvest();
                    for page in 0..PAGES {
                        assert_eq!(copy[page as usize], sum(page), "{config:?}: page {page}");
                    }
                    if config.dirty_protect == DirtyProtect::InitiallySet {
                        vm.clear_dirty_log(1, 0, &all_bits).unwrap();
                    }
                    assert_eq!(vm.mapped_leaves(), SPLIT, "{config:?}");
                }
                set_flags(SlotFlags::EMPTY);
                let _paused = fleet.pause();
                assert_eq!(vm.mapped_leaves(), WHOLE, "{config:?}, round {rounds}");
                large += 1;
            }
        });
        assert_eq!(rounds, large);
        println!("{config:?}: {rounds} rounds");
    }
}

#[test]
fn a_notifier_takes_large_pages_whole_and_they_come_back() {
    let mut test = Test::new(VmConfig::default());
    test.all(STORE, 1);
    assert_eq!(test.vm.mapped_leaves(), WHOLE);
    let bytes = test.vm.table_bytes();
    // One byte of one small page, then two bytes around the end of a large page.
    let hva = |page: u64, offset: u64| Hva(test.ram.hva(page).0 + offset);
    assert_eq!(test.vm.invalidate_hva(hva(700, 5)..hva(700, 6)), LARGE);
    assert_eq!(test.vm.mapped_leaves(), [CODE, LARGES - 1, 0]);
    let end = hva(4 * LARGE, 0);
    let around = Hva(end.0 - 1)..Hva(end.0 + 1);
    assert_eq!(test.vm.invalidate_hva(around.clone()), 2 * LARGE);
    assert_eq!(test.vm.invalidate_hva(around.clone()), 0);
    assert_eq!(test.vm.invalidate_hva(end..end), 0, "nothing");
    assert_eq!(test.vm.mapped_leaves(), [CODE, LARGES - 3, 0]);
    assert_eq!(test.vm.mapped_pages(), CODE + (LARGES - 3) * LARGE);
    // One access maps each large page again, with its old contents.
    test.one(CHECK, 1, [512]);
    assert_eq!(test.vm.mapped_leaves(), [CODE, LARGES - 2, 0]);
    test.all(CHECK, 1);
    assert_eq!(test.vm.mapped_leaves(), WHOLE);
    assert_eq!(test.vm.table_bytes(), bytes);

    // While the slot is logged, the notifier unmaps small pages, and the log gets their dirty bits.
    test.flags(SlotFlags::LOG_DIRTY_PAGES);
    test.one(STORE, 1, [513, 700, 1024]);
    let range = test.ram.hvas(600, 200);
    assert_eq!(test.vm.invalidate_hva(range), 200);
    assert_eq!(test.vm.mapped_leaves(), [SPLIT[0] - 200, 0, 0]);
    assert_eq!(test.fetch(), [513, 700, 1024]);
    test.one(CHECK, 1, [700]);
    assert_eq!(test.vm.mapped_leaves(), [SPLIT[0] - 199, 0, 0]);
    test.flags(SlotFlags::EMPTY);
    assert_eq!(test.vm.mapped_leaves(), WHOLE, "also unmapped pages");
    test.all(CHECK, 1);
}

#[test]
fn memory_out_of_step_is_mapped_by_small_pages() {
    let mut test = Test::new(VmConfig::default());
    test.vm.set_user_memory_region2(Region::delete(1)).unwrap();
    // First, guest frames whose alignment differs from the host's. Then a slot that begins and ends
    // inside large pages.
    let shifted = Region {
        gpa: Gpa(MEMORY + PAGE),
        ..test.ram.region(1, MEMORY, SlotFlags::EMPTY)
    };
    test.vm.set_user_memory_region2(shifted).unwrap();
    test.one(STORE, 0, [5]);
    assert_eq!(test.vm.mapped_leaves(), [CODE + 1, 0, 0]);
    test.vm.set_user_memory_region2(Region::delete(1)).unwrap();
    let inner = Region {
        gpa: Gpa(MEMORY + PAGE),
        hva: test.ram.hva(1),
        size: (PAGES - 2) * PAGE,
        ..test.ram.region(1, MEMORY, SlotFlags::EMPTY)
    };
    test.vm.set_user_memory_region2(inner).unwrap();
    test.one(STORE, 0, [1, LARGE, PAGES - 2]);
    assert_eq!(test.vm.mapped_leaves(), [CODE + 2, 1, 0]);
    // Recovery makes no page too large.
    let logged = Region {
        flags: SlotFlags::LOG_DIRTY_PAGES,
        gpa: Gpa(MEMORY + PAGE),
        hva: test.ram.hva(1),
        size: (PAGES - 2) * PAGE,
        ..test.ram.region(1, MEMORY, SlotFlags::EMPTY)
    };
    test.vm.set_user_memory_region2(logged.clone()).unwrap();
    assert_eq!(test.vm.mapped_leaves(), [CODE + 2 + LARGE, 0, 0]);
    let plain = Region {
        flags: SlotFlags::EMPTY,
        ..logged
    };
    test.vm.set_user_memory_region2(plain).unwrap();
    assert_eq!(test.vm.mapped_leaves(), [CODE + 2, 1, 0]);
}

#[test]
fn pages_with_userfault_bits_are_small_until_the_flag_goes() {
    for config in configs() {
        let mut test = Test::new(config);
        test.all(STORE, 1);
        let bytes = test.vm.table_bytes();
        let missing = Arc::new(PageBitmap::new(PAGES as usize));
        missing.set_range(0..PAGES as usize);
        let region = |flags| Region {
            userfault: Some(UserfaultBits {
                bitmap: Arc::clone(&missing),
                first: RamPage(0),
            }),
            ..test.ram.region(1, MEMORY, flags)
        };
        let (on, logged) = (
            region(SlotFlags::USERFAULT),
            region(SlotFlags::USERFAULT | SlotFlags::LOG_DIRTY_PAGES),
        );
        test.vm.set_user_memory_region2(on.clone()).unwrap();
        assert_eq!(
            test.vm.mapped_leaves(),
            [CODE, 0, 0],
            "no page of the slot is mapped"
        );
        assert_eq!(
            test.vm.table_bytes(),
            bytes,
            "the large leaves had no tables"
        );
        // The vCPU that misses a page brings it.
        let brought = AtomicU64::new(0);
        for (id, vcpu) in (0..).zip(&mut test.vcpus) {
            let first = MEMORY + id * PAGES / VCPUS * PAGE;
            let end = first + PAGES / VCPUS * PAGE;
            programs::begin(vcpu, CHECK, 1, first, end);
        }
        run_until_halted(&mut test.vcpus, |_, vcpu, exit| {
            let Exit::MemoryFault {
                gpa,
                size: PAGE,
                userfault: true,
                ..
            } = exit
            else {
                panic!("{exit:?}: {vcpu:?}");
            };
            assert!(missing.clear(RamPage((gpa.0 - MEMORY) / PAGE)), "once");
            brought.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(brought.into_inner(), PAGES);
        assert_eq!(test.vm.mapped_leaves(), SPLIT);
        assert_eq!(test.vm.table_bytes(), bytes + LARGES * PAGE);
        // While the slot has the flag, starting and stopping a log leaves pages small.
        test.vm.set_user_memory_region2(logged).unwrap();
        test.all(STORE, 2);
        test.vm.set_user_memory_region2(on).unwrap();
        assert_eq!(test.vm.mapped_leaves(), SPLIT, "{config:?}");
        assert_eq!(missing.count(), 0);
        test.flags(SlotFlags::EMPTY);
        assert_eq!(test.vm.mapped_leaves(), WHOLE, "{config:?}: large again");
        assert_eq!(test.vm.table_bytes(), bytes);
        test.all(CHECK, 2);
    }
}

#[test]
fn pages_are_young_until_they_are_aged_and_when_they_are_touched_again() {
    for logged in [false, true] {
        let mut test = Test::new(VmConfig::default());
        let unit = if logged {
            test.flags(SlotFlags::LOG_DIRTY_PAGES);
            1
        } else {
            LARGE
        };
        assert_eq!(test.young(true), 0, "no page is mapped");
        test.all(STORE, 1);
        for clear in [false, false, true] {
            assert_eq!(test.young(clear), PAGES, "all were accessed");
        }
        for clear in [false, true] {
            assert_eq!(test.young(clear), 0, "none since");
        }
        // The call does not see uses through TLB entries.
        test.one(CHECK, 1, [PAGES / VCPUS - 1]);
        assert_eq!(test.young(false), 0);
        test.flush_tlbs();
        assert_eq!(test.young(false), 0);
        // Loads and stores of one vCPU count.
        test.one(CHECK, 1, [0, 1, 2 * LARGE]);
        test.one(STORE, 1, [3, 5 * LARGE + 9]);
        let touched = if logged { 5 } else { 3 * LARGE };
        assert_eq!(test.young(false), touched);
        // Only overlapping pages count. Large pages count as a whole.
        let young = |first, pages| test.vm.age_hva(test.ram.hvas(first, pages), false);
        assert_eq!(young(0, 1), unit);
        assert_eq!(young(LARGE, LARGE), 0);
        assert_eq!(young(5 * LARGE + 9, 1), unit);
        assert_eq!(young(PAGES, 0), 0);
        // Aging a part leaves the other pages young.
        assert_eq!(
            test.vm.age_hva(test.ram.hvas(0, LARGE), true),
            if logged { 3 } else { LARGE }
        );
        assert_eq!(test.young(true), if logged { 2 } else { 2 * LARGE });
        assert_eq!(test.young(true), 0);
        // All vCPUs find their memory unchanged.
        test.flush_tlbs();
        test.all(CHECK, 1);
        assert_eq!(test.young(true), PAGES);
        // Unmapped pages are not young. Pages that are mapped again are young.
        assert_eq!(test.vm.invalidate_hva(test.ram.hvas(0, LARGE)), LARGE);
        test.one(CHECK, 1, [7]);
        assert_eq!(test.young(true), unit);
    }
}

/// Pages are aged while vCPUs use them. A page that no vCPU accesses never becomes young.
#[test]
fn pages_are_aged_under_running_guests() {
    let Test {
        vm,
        mut vcpus,
        code,
        ram,
    } = Test::new(VmConfig::default());
    vm.set_user_memory_region2(ram.region(1, MEMORY, SlotFlags::LOG_DIRTY_PAGES))
        .unwrap();
    // vCPUs access the second half once, and the first half all the time.
    for (id, vcpu) in (0..).zip(&mut vcpus) {
        programs::begin(vcpu, STORE, 1, MEMORY, MEMORY + PAGES * PAGE);
        assert_eq!(vcpu.run(), Exit::Halted, "vCPU {id}");
        let half = [
            (A2, MEMORY + PAGES / 2 * PAGE),
            (A1, MEMORY),
            (A4, id * 64),
            (A5, 512 + id * 64),
            (A0, 0),
        ];
        set(vcpu, SWEEP, &half);
    }
    let swept = || (0..VCPUS).map(|id| code.get(512 + id * 64)).min().unwrap();
    let fleet = Fleet::of(&vcpus);
    let halves = [ram.hvas(0, PAGES / 2), ram.hvas(PAGES / 2, PAGES / 2)];
    std::thread::scope(|scope| {
        let _stop = fleet.stop_on_drop();
        let fleet = &fleet;
        for vcpu in &mut vcpus {
            scope.spawn(move || fleet.drive(vcpu, |vcpu, exit| panic!("{exit:?}: {vcpu:?}")));
        }
        assert_eq!(vm.age_hva(halves[1].clone(), true), PAGES / 2);
        let begin = Instant::now();
        let mut rounds = 0;
        while begin.elapsed() < Duration::from_millis(500) || rounds < 5 {
            // Flushes every TLB.
            let hva = code.hva();
            vm.invalidate_hva(hva..Hva(hva.0 + 1));
            let before = swept();
            fleet.until("two sweeps", || swept() >= before + 2);
            let _paused = fleet.pause();
            // Since the flush, every page has needed a walk.
            assert_eq!(vm.age_hva(halves[0].clone(), true), PAGES / 2);
            assert_eq!(vm.age_hva(halves[0].clone(), true), 0);
            assert_eq!(vm.age_hva(halves[1].clone(), false), 0);
            rounds += 1;
        }
        println!("{rounds} rounds");
    });
}

#[test]
fn tables_go_when_what_they_map_goes() {
    let mut test = Test::new(VmConfig::default());
    // First, the root and the tables of the code. Then also the tables of the memory, without and
    // with tables of small pages.
    set(&mut test.vcpus[0], HALT, &[]);
    assert_eq!(test.vcpus[0].run(), Exit::Halted);
    let code = test.vm.table_bytes();
    test.all(STORE, 1);
    let large = test.vm.table_bytes();
    assert_eq!(large, code + PAGE, "one table of 512 large pages");
    test.flags(SlotFlags::LOG_DIRTY_PAGES);
    assert_eq!(test.vm.table_bytes(), large + LARGES * PAGE);
    // A notifier for all pages, a notifier for all pages but one, a deletion, a move.
    test.vm.invalidate_hva(test.ram.hvas(0, PAGES));
    assert_eq!(test.vm.table_bytes(), large);
    test.all(STORE, 1);
    assert_eq!(test.vm.table_bytes(), large + LARGES * PAGE);
    assert_eq!(
        test.vm.invalidate_hva(test.ram.hvas(1, PAGES - 1)),
        PAGES - 1
    );
    assert_eq!(
        test.vm.table_bytes(),
        large + PAGE,
        "one table is still used"
    );
    test.all(STORE, 1);
    test.vm.set_user_memory_region2(Region::delete(1)).unwrap();
    assert_eq!(test.vm.mapped_leaves(), [CODE, 0, 0]);
    assert_eq!(test.vm.table_bytes(), large);
    test.flags(SlotFlags::LOG_DIRTY_PAGES);
    test.all(STORE, 1);
    test.vm
        .set_user_memory_region2(test.ram.region(
            1,
            MEMORY + PAGES * PAGE,
            SlotFlags::LOG_DIRTY_PAGES,
        ))
        .unwrap();
    assert_eq!(test.vm.table_bytes(), large);
    // Repeating it does not add tables.
    for _ in 0..3 {
        test.flags(SlotFlags::LOG_DIRTY_PAGES);
        test.all(STORE, 1);
        assert_eq!(test.vm.table_bytes(), large + LARGES * PAGE);
        test.vm.set_user_memory_region2(Region::delete(1)).unwrap();
        assert_eq!(test.vm.table_bytes(), large);
    }
}

/// A slot of large pages is deleted while all vCPUs fault in it, and made again. After the
/// deletion, no store reaches its memory.
#[test]
fn a_large_slot_that_is_deleted_under_faults_is_out_of_reach() {
    const MARK: u64 = u64::MAX;
    let Test {
        vm,
        mut vcpus,
        code,
        ram,
    } = Test::new(VmConfig::default());
    for (id, vcpu) in (0..).zip(&mut vcpus) {
        let registers = [
            (A1, MEMORY + id * 64),
            (A2, MEMORY + PAGES * PAGE),
            (T1, 37 * PAGE),
            (A0, id),
        ];
        set(vcpu, STORE, &registers);
    }
    vm.set_user_memory_region2(Region::delete(1)).unwrap();
    for page in (0..PAGES).step_by(37) {
        (0..VCPUS).for_each(|id| ram.set(page * PAGE + id * 64, MARK));
    }
    let fleet = Fleet::of(&vcpus);
    let stored = AtomicU64::new(0);
    let (mut rounds, mut hits) = (0, 0);
    let mut random = Random::new(23);
    std::thread::scope(|scope| {
        let _stop = fleet.stop_on_drop();
        let (fleet, stored) = (&fleet, &stored);
        for (id, vcpu) in (0..).zip(&mut vcpus) {
            scope.spawn(move || {
                fleet.drive(vcpu, |vcpu, exit| match exit {
                    // There is no slot at the moment.
                    Exit::MmioWrite { .. } => {}
                    Exit::Halted => {
                        stored.fetch_add(1, Ordering::Relaxed);
                        set(vcpu, STORE, &[(A1, MEMORY + id * 64)]);
                    }
                    other => panic!("{other:?}: {vcpu:?}"),
                });
            });
        }
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(1) || rounds < 10 || hits == 0 {
            assert!(begin.elapsed() < LIMIT, "only {rounds} rounds");
            let flags = [SlotFlags::EMPTY, SlotFlags::LOG_DIRTY_PAGES][rounds % 2];
            vm.set_user_memory_region2(ram.region(1, MEMORY, flags))
                .unwrap();
            let is_touched =
                |page: u64| (0..VCPUS).any(|id| ram.get(page * PAGE + id * 64) != MARK);
            let reached = || (0..PAGES).step_by(37).any(is_touched);
            // Sometimes the deletion comes at once, during the first faults.
            if random.next().is_multiple_of(4) {
                fleet.until("a store to the slot", reached);
            }
            for _ in 0..random.next() % 2000 {
                std::hint::spin_loop();
            }
            vm.set_user_memory_region2(Region::delete(1)).unwrap();
            if reached() {
                hits += 1;
                for page in (0..PAGES).step_by(37) {
                    (0..VCPUS).for_each(|id| ram.set(page * PAGE + id * 64, MARK));
                }
                let before = stored.load(Ordering::Relaxed);
                fleet.until("vCPUs to find no slot", || {
                    stored.load(Ordering::Relaxed) > before
                });
                let late = (0..PAGES).step_by(37).find(|page| is_touched(*page));
                assert_eq!(
                    late, None,
                    "round {rounds}: written after its slot was deleted"
                );
            }
            let _paused = fleet.pause();
            // No page of it is mapped. The code may not be mapped yet either.
            assert!(vm.mapped_pages() <= CODE, "round {rounds}: {vm:?}");
            rounds += 1;
        }
    });
    drop(code);
    println!("{rounds} rounds, {hits} with stores");
    assert!(hits > 0);
}
