//! Background snapshots: the test tracks all memory while harts store to it. It copies and untracks
//! a page when a hart's store leaves the guest, or in the background. The copy must equal memory at
//! the moment at which tracking had begun.
//!
//! Each hart goes over its pages in a fixed order, and stores the number of its round to its word
//! of each page. So at every moment, its words are that number up to some page, and one less
//! behind. A copy with a later store is not of that form, nor is a copy that misses an earlier
//! store.
//!
//! In some rounds, the test untracks nothing until every hart waits at a tracked page. Then it
//! compares the copy with memory word by word. Meanwhile it unmaps, zaps and ages pages, and reads
//! the dirty log. It runs for `PAGEFERRY_STRESS_SECONDS` (4 by default).

use crate::support::fleet::{A4, Fleet, LARGE, LargeRam, T3, dirty_log, named, set};
use crate::support::vm::{HostRam, PAGE, asm::*};
use pageferry_hypervisor::{DirtyBy, Exit, SlotFlags, VcpuCore, Vm, VmConfig};
use pageferry_testkit::{LIMIT, Random, stress_time};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

const MEMORY: u64 = 0x4000_0000;
const PAGES: u64 = 2 * LARGE;

/// A hart's kind of store, and the place of its words. Each word of the last hart lies over the end
/// of a page.
struct Way {
    pages: Range<u64>,
    offset: u64,
    store: &'static [u32],
}

const HARTS: usize = 4;
const WAYS: [Way; HARTS] = [
    Way {
        pages: 0..PAGES,
        offset: 64,
        store: &[sd(A0, T0, 0)],
    },
    Way {
        pages: 0..PAGES,
        offset: 128,
        store: &[atomic(AMOADD, D, X0, T0, A4)],
    },
    // No store to a page with reservations hits the TLB, so only some pages have reservations.
    Way {
        pages: PAGES - PAGES / 8..PAGES,
        offset: 192,
        store: &[
            atomic(LR, D, T2, T0, 0),
            addi(T2, T2, 1),
            atomic(SC, D, T3, T0, T2),
            bne(T3, X0, -12),
        ],
    },
    Way {
        pages: 0..PAGES - 1,
        offset: PAGE - 4,
        store: &[slli(T2, A0, 32), add(T2, T2, A0), sd(T2, T0, 0)],
    },
];

impl Way {
    /// An endless loop: counts in a0 and stores it at t0, from a1 to a2. t1: size of a page. a4: 1.
    fn program(&self) -> Vec<u32> {
        let mut code = vec![addi(A0, A0, 1), add(T0, A1, X0)];
        code.extend(self.store);
        let back = 4 * (1 + self.store.len() as i32);
        code.extend([add(T0, T0, T1), bltu(T0, A2, -back), jal(X0, -back - 12)]);
        code
    }

    fn begin(&self, vcpu: &mut VcpuCore, pc: u64) {
        let address = |page: u64| MEMORY + page * PAGE + self.offset;
        let registers = [
            (A1, address(self.pages.start)),
            (A2, address(self.pages.end)),
            (A4, 1),
            (T1, PAGE),
        ];
        set(vcpu, pc, &registers);
    }

    /// The rounds in the hart's words. `get` reads a doubleword of memory.
    fn rounds(&self, get: impl Fn(u64) -> u64) -> Vec<u64> {
        let word = |page: u64| {
            let offset = page * PAGE + self.offset;
            if offset.is_multiple_of(8) {
                return get(offset);
            }
            let (low, high) = (get(offset - 4) >> 32, get(offset + 4) & 0xffff_ffff);
            assert_eq!(low, high, "a store over page {page} and the next is torn");
            low
        };
        self.pages.clone().map(word).collect()
    }
}

/// Checks that the words of each hart are those of one moment.
#[track_caller]
fn check_moment(get: impl Fn(u64) -> u64) {
    for (hart, way) in WAYS.iter().enumerate() {
        let rounds = way.rounds(&get);
        let (first, last) = (rounds[0], rounds[rounds.len() - 1]);
        let falls = rounds.is_sorted_by(|a, b| a >= b);
        assert!(falls && first - last <= 1, "hart {hart}: {rounds:?}");
    }
}

type Page = Box<[u64]>;

/// The copy of a snapshot, if there is one.
#[derive(Default)]
struct Snapshot {
    pages: Vec<Mutex<Option<Page>>>,
    left: AtomicU64,
}

impl Snapshot {
    fn new() -> Self {
        Self {
            pages: (0..PAGES).map(|_| Mutex::default()).collect(),
            left: AtomicU64::new(PAGES),
        }
    }

    fn is_over(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }

    fn get(&self, offset: u64) -> u64 {
        let page = self.pages[(offset / PAGE) as usize].lock();
        let page = page.unwrap_or_else(PoisonError::into_inner);
        page.as_ref().expect("no page is left")[(offset % PAGE / 8) as usize]
    }
}

struct Test {
    vm: Vm,
    ram: Arc<LargeRam>,
    /// The thread that tracks the memory holds it for writing. So no thread untracks a page for an
    /// older copy.
    snapshot: RwLock<Snapshot>,
    /// The number of harts that wait for it, at a tracked page.
    waiting: AtomicU64,
    /// The numbers of pages that were saved by harts, and in the background.
    saved: [AtomicU64; 2],
}

impl Test {
    fn new(dirty_by: DirtyBy) -> (Self, Vec<VcpuCore>) {
        let vm = Vm::new(VmConfig {
            dirty_by,
            ..VmConfig::default()
        });
        let code = HostRam::new(1);
        vm.set_user_memory_region2(code.region(0, 0, 0, 1)).unwrap();
        let ram = LargeRam::new(PAGES / LARGE);
        let vcpus = (0..).zip(&WAYS).map(|(id, way)| {
            let mut vcpu = vm.create_vcpu(id).unwrap();
            code.code(u64::from(id) * 64, &way.program());
            way.begin(&mut vcpu, u64::from(id) * 64);
            vcpu
        });
        let vcpus = vcpus.collect();
        let test = Self {
            vm,
            ram,
            snapshot: RwLock::default(),
            waiting: AtomicU64::new(0),
            saved: Default::default(),
        };
        test.log(false);
        (test, vcpus)
    }

    fn log(&self, on: bool) {
        let flags = if on {
            SlotFlags::LOG_DIRTY_PAGES
        } else {
            SlotFlags::EMPTY
        };
        let region = self.ram.region(1, MEMORY, flags);
        self.vm.set_user_memory_region2(region).unwrap();
    }

    fn page(&self, page: u64) -> Page {
        let words = (0..PAGE).step_by(8);
        words.map(|at| self.ram.get(page * PAGE + at)).collect()
    }

    fn memory(&self) -> Vec<Page> {
        (0..PAGES).map(|page| self.page(page)).collect()
    }

    fn snapshot(&self) -> RwLockReadGuard<'_, Snapshot> {
        self.snapshot.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies a page and untracks it.
    fn save(&self, snapshot: &Snapshot, page: u64, by: usize) {
        let copy = self.page(page);
        if self.vm.untrack_writes(1, page..page + 1).unwrap() == 1 {
            let mut place = snapshot.pages[page as usize].lock().unwrap();
            assert!(place.replace(copy).is_none(), "page {page} twice");
            snapshot.left.fetch_sub(1, Ordering::AcqRel);
            self.saved[by].fetch_add(1, Ordering::Relaxed);
        }
    }

    fn exit(&self, vcpu: &VcpuCore, exit: Exit) {
        let Exit::MemoryFault {
            gpa,
            write_tracked: true,
            ..
        } = exit
        else {
            panic!("{exit:?}: {vcpu:?}");
        };
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let snapshot = self.snapshot();
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        self.save(&snapshot, (gpa.0 - MEMORY) / PAGE, 0);
    }

    fn save_in_background(&self, fleet: &Fleet) {
        let mut random = Random::new(21);
        while !fleet.is_stopped() {
            let snapshot = self.snapshot();
            if !snapshot.is_over() {
                let first = random.next() % PAGES;
                for page in first..(first + 64).min(PAGES) {
                    self.save(&snapshot, page, 1);
                }
            }
            drop(snapshot);
            std::thread::yield_now();
        }
    }

    fn churn(&self, fleet: &Fleet) {
        let mut random = Random::new(22);
        while !fleet.is_stopped() {
            let first = random.next() % PAGES;
            let pages = (1 + random.next() % 64).min(PAGES - first);
            let hvas = self.ram.hvas(first, pages);
            match random.next() % 8 {
                0 => self.vm.zap_all(),
                1 => self.vm.age_hva(hvas, true),
                _ => self.vm.invalidate_hva(hvas),
            };
            std::thread::sleep(Duration::from_micros(random.next() % 500));
        }
    }

    /// Makes a snapshot. Perhaps it keeps a log too, which begins before or after the tracking.
    fn round(&self, fleet: &Fleet, random: &mut Random) {
        let (held, mut log) = (random.next().is_multiple_of(2), None);
        let logged = random.next() % 3;
        if logged == 1 {
            log = Some(Log::begin(self));
        }
        let before = self.memory();
        let mut snapshot = self
            .snapshot
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        assert_eq!(self.vm.track_writes(1, 0..PAGES).unwrap(), PAGES);
        let moment = held.then(|| self.memory());
        *snapshot = Snapshot::new();
        if logged == 2 {
            log = Some(Log::begin(self));
        }
        if let Some(moment) = &moment {
            fleet.until("all harts to meet tracked pages", || {
                self.waiting.load(Ordering::Acquire) == HARTS as u64
            });
            assert!(self.memory() == *moment, "a store went through");
        }
        drop(snapshot);
        fleet.until("all pages to be saved", || {
            if let Some(log) = &mut log {
                log.harvest();
            }
            self.snapshot().is_over()
        });
        let snapshot = self.snapshot();
        check_moment(|offset| snapshot.get(offset));
        for (page, before) in (0..).zip(before) {
            let copied: Page = {
                let words = (0..PAGE).step_by(8);
                words.map(|at| snapshot.get(page * PAGE + at)).collect()
            };
            if let Some(moment) = &moment {
                assert_eq!(copied, moment[page as usize], "page {page}");
            }
            // Words that no hart uses are 0.
            let newer = copied
                .iter()
                .zip(&before)
                .all(|(now, before)| now >= before);
            assert!(newer, "page {page} is from before the call");
        }
        drop(snapshot);
        if let Some(log) = log {
            log.end(fleet);
        }
    }

    fn run(&self, vcpus: &mut [VcpuCore], time: Duration) -> u64 {
        let fleet = Fleet::of(vcpus);
        let mut rounds = 0;
        std::thread::scope(|scope| {
            let _stop = fleet.stop_on_drop();
            let fleet = &fleet;
            for vcpu in vcpus {
                scope.spawn(move || fleet.drive(vcpu, |vcpu, exit| self.exit(vcpu, exit)));
            }
            for other in [Self::churn, Self::save_in_background] {
                scope.spawn(move || {
                    let _stop = fleet.stop_on_drop();
                    other(self, fleet);
                });
            }
            let begin = Instant::now();
            let mut random = Random::new(20);
            let enough = || {
                let saved = self.saved.each_ref().map(|n| n.load(Ordering::Relaxed));
                saved.iter().all(|&pages| pages > 100)
            };
            while begin.elapsed() < time || rounds < 8 || !enough() {
                assert!(begin.elapsed() < time + LIMIT, "{:?}", self.saved);
                self.round(fleet, &mut random);
                rounds += 1;
                std::thread::sleep(Duration::from_micros(random.next() % 3000));
            }
        });
        check_moment(|offset| self.ram.get(offset));
        rounds
    }
}

/// A dirty log, and a copy of memory that is updated from the log.
struct Log<'a> {
    test: &'a Test,
    copy: Vec<Page>,
}

impl<'a> Log<'a> {
    fn begin(test: &'a Test) -> Self {
        test.log(true);
        let copy = test.memory();
        Self { test, copy }
    }

    fn harvest(&mut self) {
        for page in named(&dirty_log(&self.test.vm, 1, PAGES)) {
            self.copy[page as usize] = self.test.page(page);
        }
    }

    fn end(mut self, fleet: &Fleet) {
        {
            let _paused = fleet.pause();
            self.harvest();
            assert!(self.copy == self.test.memory(), "a store is in no log");
        }
        self.test.log(false);
    }
}

#[test]
fn a_snapshot_is_memory_at_one_moment() {
    let time = stress_time(Duration::from_secs(4));
    for dirty_by in [DirtyBy::WriteProtection, DirtyBy::Bits] {
        let (test, mut vcpus) = Test::new(dirty_by);
        let rounds = test.run(&mut vcpus, time / 2);
        let [harts, background] = test.saved;
        println!(
            "{dirty_by:?}: {rounds} snapshots; pages saved by harts {harts:?}, in the background {background:?}"
        );
    }
}
