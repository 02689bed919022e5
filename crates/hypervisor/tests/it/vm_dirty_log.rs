//! The behaviour of Linux's `tools/testing/selftests/kvm/dirty_log_test.c`: vCPUs store to random
//! pages while the test reads and clears the log, in all of its modes. Each stored word has the
//! number of the host's iteration and a count, so that every store changes memory. The test
//! compares the log with the changes of memory, page by page.

use crate::support::fleet::{A4, A5, A6, Fleet, T3, dirty_log, named, set};
use crate::support::vm::{HostRam, PAGE, asm::*};
use pageferry_addr::Hva;
use pageferry_hypervisor::{
    DirtyBy, DirtyProtect, Exit, Harvester, LrSc, SlotFlags, VcpuCore, Vm, VmConfig,
};
use pageferry_testkit::{LIMIT, Random};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const VCPUS: u64 = 4;
/// The address of the memory under test.
const MEMORY: u64 = 0x4000_0000;
/// The number of pages that guests use, a power of two. They are neither the first nor the last
/// pages of the log.
const USED: u64 = 1024;
const FIRST: u64 = 20;
const PAGES: u64 = FIRST + USED + 17;
const WORDS: usize = (PAGES as usize).div_ceil(64);
/// The addresses of the iteration's number and the vCPUs' counts of stores, in the page after the
/// code.
const ITERATION: u64 = PAGE;
const COUNTS: u64 = PAGE + 64;

/// An endless loop. It stores iteration << 32 | count to its word of a random page, and loads it
/// back. Then it loads its word of another random page, which must not have a later count.
///
/// t0: random state. a0: count. a1: first page. a2: mask of page numbers. a3: address of the
/// iteration. a4: the word's offset. a5: address for the count.
fn program() -> Vec<u32> {
    let mut code = vec![
        // xorshift64.
        slli(T1, T0, 13),
        xor(T0, T0, T1),
        srli(T1, T0, 7),
        xor(T0, T0, T1),
        slli(T1, T0, 17),
        xor(T0, T0, T1),
        ld(T2, A3, 0),
        slli(T2, T2, 32),
        addi(A0, A0, 1),
        add(T2, T2, A0),
    ];
    let page_of = |code: &mut Vec<u32>, shift| {
        code.extend([
            srli(T1, T0, shift),
            and(T1, T1, A2),
            slli(T1, T1, 12),
            add(T1, T1, A1),
            add(T1, T1, A4),
        ]);
    };
    page_of(&mut code, 11);
    code.extend([sd(T2, T1, 0), ld(T3, T1, 0), bne(T3, T2, 48)]);
    page_of(&mut code, 37);
    code.extend([
        ld(T3, T1, 0),
        slli(T3, T3, 32),
        srli(T3, T3, 32),
        bltu(A0, T3, 12),
        sd(A0, A5, 0),
    ]);
    let back = -4 * code.len() as i32;
    code.extend([jal(X0, back), ECALL]);
    code
}

/// The offset of a vCPU's word in a page. vCPUs share no cache line.
const fn word_of(id: u64) -> u64 {
    64 + id * 64
}

type Words = [u64; VCPUS as usize];

/// One VM, and the state of a reader of its log.
struct Test {
    vm: Vm,
    control: Arc<HostRam>,
    ram: Arc<HostRam>,
    rings: Vec<Harvester>,
    random: Random,
    /// A copy of memory that is updated from the log alone, like that of a migration.
    copy: Vec<Words>,
    /// Memory at the last pause.
    last: Vec<Words>,
    /// Whether each page was in a log since the last pause.
    named: Vec<bool>,
    harvests: u64,
    iteration: u64,
}

impl Test {
    fn new(config: VmConfig) -> (Self, Vec<VcpuCore>) {
        let control = HostRam::new(2);
        control.code(0, &program());
        let ram = HostRam::new(PAGES as usize);
        let vm = Vm::new(config);
        vm.set_user_memory_region2(control.region(0, 0, 0, 2))
            .unwrap();
        vm.set_user_memory_region2(ram.region(1, MEMORY, 0, PAGES))
            .unwrap();
        let mut vcpus: Vec<_> = (0..VCPUS)
            .map(|id| {
                let mut vcpu = vm.create_vcpu(id as u32).unwrap();
                let registers = [
                    (T0, 0x9e37_79b9_7f4a_7c15 ^ (id + 1)),
                    (A1, MEMORY + FIRST * PAGE),
                    (A2, USED - 1),
                    (A3, ITERATION),
                    (A4, word_of(id)),
                    (A5, COUNTS + id * 64),
                ];
                set(&mut vcpu, 0, &registers);
                vcpu
            })
            .collect();
        let rings = if config.dirty_ring.is_some() {
            vcpus
                .iter_mut()
                .map(|vcpu| vcpu.take_dirty_ring().unwrap())
                .collect()
        } else {
            Vec::new()
        };
        let test = Self {
            vm,
            control,
            ram,
            rings,
            random: Random::new(41),
            copy: vec![Words::default(); PAGES as usize],
            last: Vec::new(),
            named: vec![false; PAGES as usize],
            harvests: 0,
            iteration: 0,
        };
        (test, vcpus)
    }

    fn log(&self, on: bool) {
        let mut region = self.ram.region(1, MEMORY, 0, PAGES);
        if on {
            region.flags = SlotFlags::LOG_DIRTY_PAGES;
        }
        self.vm.set_user_memory_region2(region).unwrap();
    }

    fn words(&self, page: u64) -> Words {
        std::array::from_fn(|id| self.ram.get(page * PAGE + word_of(id as u64)))
    }

    fn memory(&self) -> Vec<Words> {
        (0..PAGES).map(|page| self.words(page)).collect()
    }

    /// The number of stores of each vCPU.
    fn counts(&self) -> Words {
        std::array::from_fn(|id| self.control.get(COUNTS + id as u64 * 64))
    }

    fn stores(&self) -> u64 {
        self.counts().iter().sum()
    }

    /// Whether each vCPU has stored since `before`, and all together `stores` times.
    fn has_stored(&self, before: Words, stores: u64) -> bool {
        let now = self.counts();
        let all = now
            .iter()
            .zip(before)
            .all(|(now, before)| *now >= before + 2);
        all && now.iter().sum::<u64>() >= before.iter().sum::<u64>() + stores
    }

    fn take(&mut self, page: u64) {
        self.copy[page as usize] = self.words(page);
        self.named[page as usize] = true;
    }

    /// Reads and clears the log, and copies the pages in it.
    fn harvest(&mut self) {
        self.harvests += 1;
        if !self.rings.is_empty() {
            let mut pages = Vec::new();
            for ring in &mut self.rings {
                while let Some(page) = ring.harvest() {
                    assert_eq!(page.slot, 1);
                    pages.push(page.offset);
                }
            }
            assert_eq!(self.vm.reset_dirty_rings(), pages.len() as u64);
            pages.into_iter().for_each(|page| self.take(page));
        }
        let log = dirty_log(&self.vm, 1, PAGES);
        if self.vm.config().dirty_protect == DirtyProtect::ByGet {
            named(&log).for_each(|page| self.take(page));
            return;
        }
        // In parts, like a migration that copies in between.
        let mut first = 0;
        while first < WORDS {
            let words = 1 + self.random.next() as usize % (WORDS - first);
            let part = &log[first..first + words];
            let cleared = self.vm.clear_dirty_log(1, first as u64 * 64, part).unwrap();
            assert_eq!(cleared as usize, named(part).count(), "one thread clears");
            named(part).for_each(|page| self.take(first as u64 * 64 + page));
            first += words;
        }
    }

    /// Checks that the log had exactly the changed pages. All vCPUs are outside their guests, and
    /// the log is read and cleared.
    fn check(&mut self) {
        let now = self.memory();
        for (page, words) in now.iter().enumerate() {
            assert_eq!(
                self.copy[page], *words,
                "iteration {}: page {page} has changed and is in no log",
                self.iteration
            );
            let changed = *words != self.last[page];
            assert_eq!(
                self.named[page], changed,
                "iteration {}: page {page} changed: {changed}",
                self.iteration
            );
            let newest = words.iter().map(|word| word >> 32).max();
            // A vCPU may have loaded the number before the last pause and stored it after that
            // pause, but not two pauses later.
            assert!(
                !changed || newest.is_some_and(|newest| newest + 1 >= self.iteration),
                "iteration {}: page {page} is of {newest:?}",
                self.iteration
            );
        }
        self.begin(now);
    }

    /// Begins an iteration. Its log is compared with changes since `memory`.
    fn begin(&mut self, memory: Vec<Words>) {
        self.last = memory;
        self.named.fill(false);
        self.iteration += 1;
        self.control.set(ITERATION, self.iteration);
    }
}

/// The number of checks of the log, and the number of times that a ring was full.
struct Outcome {
    iterations: u64,
    full: u64,
}

fn dirty_log_test(config: VmConfig) -> Outcome {
    let (mut test, mut vcpus) = Test::new(config);
    let fleet = Fleet::of(&vcpus);
    let full = AtomicU64::new(0);
    let notify = AtomicBool::new(false);
    let mut iterations = 0;
    std::thread::scope(|scope| {
        let _stop = fleet.stop_on_drop();
        let (fleet, full, notify) = (&fleet, &full, &notify);
        for vcpu in &mut vcpus {
            scope.spawn(move || {
                fleet.drive(vcpu, |vcpu, exit| match exit {
                    Exit::DirtyRingFull => {
                        full.fetch_add(1, Ordering::Relaxed);
                        std::thread::yield_now();
                    }
                    other => panic!("{other:?}: {vcpu:?}"),
                });
            });
        }
        let (vm, hva) = (test.vm.clone(), test.ram.hva().0);
        scope.spawn(move || {
            let mut random = Random::new(5);
            while !fleet.is_stopped() {
                if notify.load(Ordering::Relaxed) {
                    let from = hva + random.next() % PAGES * PAGE;
                    let some = Hva(from)..Hva(from + random.next() % (64 * PAGE));
                    vm.age_hva(some.clone(), random.next().is_multiple_of(2));
                    vm.invalidate_hva(some);
                }
                std::thread::yield_now();
            }
        });
        // Without and with a notifier. Logging starts again for the second run.
        for with_notifier in [false, true] {
            notify.store(with_notifier, Ordering::Relaxed);
            iterations += log_and_check(&mut test, fleet);
        }
    });
    let (harvests, stores) = (test.harvests, test.stores());
    let full = full.into_inner();
    println!("{iterations} iterations, {harvests} harvests, {stores} stores, {full} full rings");
    for id in 0..VCPUS {
        assert!(test.control.get(COUNTS + id * 64) > 100, "vCPU {id}");
    }
    Outcome { iterations, full }
}

/// Starts logging and reads the log while vCPUs run, and pauses them now and then for a check.
fn log_and_check(test: &mut Test, fleet: &Fleet) -> u64 {
    let before = test.counts();
    let stored = || test.has_stored(before, 2 * USED);
    fleet.until("stores before the log", stored);
    test.log(true);
    // The copy has the stores from before. Every later store must be in a log.
    test.copy = test.memory();
    {
        let _paused = fleet.pause();
        test.harvest();
        let all = test.named.iter().all(|&named| named);
        let initially = test.vm.config().dirty_protect == DirtyProtect::InitiallySet;
        assert_eq!(all, initially, "the initial contents of the log");
        let now = test.memory();
        assert!(
            test.copy == now,
            "a store after logging started is in no log"
        );
        test.begin(now);
    }
    let begin = Instant::now();
    let mut iterations = 0;
    while begin.elapsed() < Duration::from_millis(300) || iterations < 8 {
        assert!(begin.elapsed() < LIMIT, "only {iterations} iterations");
        let (before, enough) = (test.counts(), test.random.next() % 2048);
        fleet.until("stores", || {
            test.harvest();
            test.has_stored(before, enough)
        });
        let _paused = fleet.pause();
        test.harvest();
        test.check();
        iterations += 1;
    }
    test.log(false);
    iterations
}

const PROTECTED: VmConfig = VmConfig {
    max_vcpus: 8,
    max_slots: 8,
    dirty_by: DirtyBy::WriteProtection,
    dirty_protect: DirtyProtect::ByGet,
    dirty_ring: None,
    lr_sc: LrSc::Exact,
};

#[test]
fn a_log_that_is_cleared_by_fetching_it_names_what_has_changed() {
    for dirty_by in [DirtyBy::WriteProtection, DirtyBy::Bits] {
        let outcome = dirty_log_test(VmConfig {
            dirty_by,
            ..PROTECTED
        });
        assert!(outcome.iterations >= 16);
    }
}

#[test]
fn a_log_that_is_cleared_by_hand_names_what_has_changed() {
    for dirty_by in [DirtyBy::WriteProtection, DirtyBy::Bits] {
        let outcome = dirty_log_test(VmConfig {
            dirty_by,
            dirty_protect: DirtyProtect::ByClear,
            ..PROTECTED
        });
        assert!(outcome.iterations >= 16);
    }
}

#[test]
fn a_log_that_begins_with_all_pages_names_what_has_changed_since() {
    for dirty_by in [DirtyBy::WriteProtection, DirtyBy::Bits] {
        let outcome = dirty_log_test(VmConfig {
            dirty_by,
            dirty_protect: DirtyProtect::InitiallySet,
            ..PROTECTED
        });
        assert!(outcome.iterations >= 16);
    }
}

#[test]
fn dirty_rings_name_what_has_changed() {
    // The smallest ring is full after 64 pages. The other has room for all pages.
    for entries in [128, 4096] {
        let outcome = dirty_log_test(VmConfig {
            dirty_ring: Some(entries),
            ..PROTECTED
        });
        assert!(outcome.iterations >= 16);
        assert_eq!(
            outcome.full > 0,
            entries == 128,
            "{} times full",
            outcome.full
        );
    }
}

/// Logs start while vCPUs fault everywhere. A fault that has looked the slot up before must not map
/// a page writable afterwards.
#[test]
fn a_log_that_starts_among_faults_misses_no_store() {
    for dirty_by in [DirtyBy::WriteProtection, DirtyBy::Bits] {
        let (mut test, mut vcpus) = Test::new(VmConfig {
            dirty_by,
            ..PROTECTED
        });
        for vcpu in &mut vcpus {
            // Few pages, so that a wrongly mapped page soon gets another store.
            vcpu.hart_mut().set_x(A2 as u8, 63);
        }
        let fleet = Fleet::of(&vcpus);
        let mut rounds = 0;
        std::thread::scope(|scope| {
            let _stop = fleet.stop_on_drop();
            let fleet = &fleet;
            for vcpu in &mut vcpus {
                scope.spawn(move || {
                    fleet.drive(vcpu, |vcpu, exit| panic!("{exit:?}: {vcpu:?}"));
                });
            }
            let begin = Instant::now();
            let all = test.ram.hva()..Hva(test.ram.hva().0 + PAGES * PAGE);
            while begin.elapsed() < Duration::from_millis(500) || rounds < 2 {
                assert!(begin.elapsed() < LIMIT, "only {rounds} rounds");
                let (before, enough) = (test.counts(), test.random.next() % 512);
                fleet.until("stores", || {
                    test.counts().iter().sum::<u64>() > before.iter().sum::<u64>() + enough
                });
                for _ in 0..16 {
                    test.vm.invalidate_hva(all.clone());
                    test.log(true);
                    test.copy = test.memory();
                    if test.random.next().is_multiple_of(4) {
                        test.harvest();
                    }
                    {
                        let _paused = fleet.pause();
                        test.harvest();
                        let now = test.memory();
                        let lost = (0..PAGES as usize).find(|&page| test.copy[page] != now[page]);
                        assert_eq!(lost, None, "{dirty_by:?}, round {rounds}: not in the log");
                    }
                    test.log(false);
                }
                rounds += 1;
            }
        });
        println!("{dirty_by:?}: {rounds} rounds");
    }
}

/// Loads and stores of two vCPUs meet at unmapped pages. The load's fault may map a page while the
/// store's fault is under way. That page is clean, and has to become dirty.
#[test]
fn a_store_whose_fault_a_load_has_answered_is_logged() {
    const TOUCHED: u64 = 512;
    let control = HostRam::new(2);
    let ram = HostRam::new(TOUCHED as usize);
    // The program writes round a4 to a5, waits a while for the other's round at a6, and accesses
    // pages a1 to a2, upwards.
    for (pc, touch) in [(0, ld(A0, T0, 0)), (256, sd(A4, T0, 0))] {
        let code = [
            sd(A4, A5, 0),
            lui(T3, 4),
            ld(T2, A6, 0),
            beq(T2, A4, 12),
            addi(T3, T3, -1),
            bne(T3, X0, -12),
            add(T0, A1, X0),
            touch,
            add(T0, T0, T1),
            bltu(T0, A2, -8),
            WFI,
        ];
        control.code(pc, &code);
    }
    for dirty_by in [DirtyBy::WriteProtection, DirtyBy::Bits] {
        let vm = Vm::new(VmConfig {
            dirty_by,
            ..PROTECTED
        });
        vm.set_user_memory_region2(control.region(0, 0, 0, 2))
            .unwrap();
        let mut region = ram.region(1, MEMORY, 0, TOUCHED);
        region.flags = SlotFlags::LOG_DIRTY_PAGES;
        vm.set_user_memory_region2(region).unwrap();
        let mut vcpus: Vec<_> = (0..2).map(|id| vm.create_vcpu(id).unwrap()).collect();
        let fleet = Fleet::of(&vcpus);
        let (go, done) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let _stop = fleet.stop_on_drop();
            let (fleet, go, done) = (&fleet, &go, &done);
            for (id, vcpu) in (0..).zip(&mut vcpus) {
                // The program first halts.
                set(vcpu, 40, &[]);
                let mut round = 0;
                scope.spawn(move || {
                    fleet.drive(vcpu, |vcpu, exit| {
                        assert_eq!(exit, Exit::Halted);
                        done.fetch_add(1, Ordering::Release);
                        while go.load(Ordering::Acquire) == round && !fleet.is_stopped() {
                            std::thread::yield_now();
                        }
                        round = go.load(Ordering::Acquire);
                        let registers = [
                            (T1, PAGE),
                            (A1, MEMORY),
                            (A2, MEMORY + TOUCHED * PAGE),
                            (A4, round),
                            (A5, COUNTS + id * 64),
                            (A6, COUNTS + (1 - id) * 64),
                        ];
                        set(vcpu, id * 256, &registers);
                    });
                });
            }
            let begin = Instant::now();
            let mut round = 0;
            while begin.elapsed() < Duration::from_millis(700) || round < 20 {
                assert!(begin.elapsed() < LIMIT, "only {round} rounds");
                fleet.until("both sweeps", || {
                    done.load(Ordering::Acquire) == 2 * (round + 1)
                });
                let log = dirty_log(&vm, 1, TOUCHED);
                let expected = if round == 0 { 0 } else { TOUCHED };
                let named = named(&log).count() as u64;
                assert_eq!(named, expected, "{dirty_by:?}, round {round}: {log:x?}");
                let all = ram.hva()..Hva(ram.hva().0 + TOUCHED * PAGE);
                vm.invalidate_hva(all);
                round += 1;
                go.store(round, Ordering::Release);
            }
            println!("{dirty_by:?}: {round} rounds");
        });
    }
}
