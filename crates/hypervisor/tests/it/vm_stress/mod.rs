//! Many harts check their memory while the host makes all its calls to their VM at once, for
//! `PAGEFERRY_STRESS_SECONDS` (4 by default).
//!
//! - `guest` is the program. Each hart has a word in every page, and knows its value.
//! - `host` is the memory. The host takes a page in a notifier's call, or when it is missing. Until
//!   it gives the page back, the page has other contents. A hart that reaches the page reads a
//!   wrong word, or loses a store.
//! - `churn` has the threads that take pages.
//! - The main thread reads the log, updates a copy from it, and compares the copy with memory.
//!
//! `.ci/sanitize` runs it under ThreadSanitizer, with `--cfg pageferry_tsan`. The host then uses
//! plain loads and stores for the words of taken pages. So an access of a hart that the VM has not
//! ordered before or after them is a data race.

mod churn;
mod guest;
mod host;

use crate::support::fleet::{Fleet, dirty_log, named};
use crate::support::vm::HostRam;
use churn::{Counts, Done};
use guest::HARTS;
use host::{Host, LOGGED, Part, Words};
use pageferry_hypervisor::{DirtyBy, DirtyProtect, Exit, SlotFlags, VcpuCore, Vm, VmConfig};
use pageferry_testkit::{LIMIT, Random, stress_time};
use std::time::{Duration, Instant};

const WORDS: usize = LOGGED.pages as usize / 64;

struct Test {
    vm: Vm,
    host: Host,
    control: std::sync::Arc<HostRam>,
    counts: Counts,
}

impl Test {
    fn new(config: VmConfig) -> (Self, Vec<VcpuCore>) {
        let vm = Vm::new(config);
        let control = HostRam::new(2);
        control.code(0, &guest::program());
        vm.set_user_memory_region2(control.region(0, 0, 0, 2))
            .unwrap();
        let host = Host::new();
        for part in Part::ALL {
            host.set(&vm, part, SlotFlags::EMPTY);
        }
        let mut vcpus: Vec<_> = (0..HARTS)
            .map(|id| vm.create_vcpu(id as u32).unwrap())
            .collect();
        (0..).zip(&mut vcpus).for_each(|(id, v)| guest::set(v, id));
        let counts = Counts::default();
        let test = Self {
            vm,
            host,
            control,
            counts,
        };
        (test, vcpus)
    }

    /// Handles an exit, on the thread of the hart.
    fn exit(&self, vcpu: &mut VcpuCore, exit: Exit) {
        match exit {
            // The slot is deleted or moved: repeat the access until it is back.
            Exit::MmioRead { gpa, .. } | Exit::MmioWrite { gpa, .. } => {
                assert!(
                    [host::DELETED, host::MOVED].iter().any(|p| p.holds(gpa)),
                    "{gpa:?} is never away: {vcpu:?}"
                );
                let pc = vcpu.hart().pc() - 4;
                vcpu.hart_mut().set_pc(pc).unwrap();
                self.counts.add(Done::Retries, 1);
                std::thread::yield_now();
            }
            Exit::MemoryFault {
                gpa,
                userfault: true,
                ..
            } => {
                assert!(host::MISSING.holds(gpa), "{gpa:?} is never missing");
                let brought = self.host.bring(host::page(gpa));
                self.counts.add(Done::PagesBrought, u64::from(brought));
            }
            // Repeat the store until the page is untracked.
            Exit::MemoryFault {
                write_tracked: true,
                ..
            } => {
                self.counts.add(Done::Refusals, 1);
                std::thread::yield_now();
            }
            Exit::Ecall { .. } => panic!("a word is wrong: {}", guest::describe(vcpu)),
            other => panic!("{other:?}: {vcpu:?}"),
        }
    }

    fn rounds(&self) -> [u64; HARTS] {
        std::array::from_fn(|id| self.control.get(guest::rounds(id as u64)))
    }

    /// Runs all threads for `time`, and until every kind of event has been counted.
    fn run(&self, vcpus: &mut [VcpuCore], time: Duration) {
        let fleet = Fleet::of(vcpus);
        std::thread::scope(|scope| {
            let _stop = fleet.stop_on_drop();
            let fleet = &fleet;
            for vcpu in &mut *vcpus {
                scope.spawn(move || fleet.drive(vcpu, |vcpu, exit| self.exit(vcpu, exit)));
            }
            for churn in churn::ALL {
                scope.spawn(move || {
                    let _stop = fleet.stop_on_drop();
                    churn(&self.vm, &self.host, &self.counts, fleet);
                });
            }
            let begin = Instant::now();
            let mut log = Log::new(self);
            loop {
                log.round(fleet);
                let enough = self.rounds().iter().all(|&n| n >= 2 * guest::ROUNDS)
                    && self.counts.missing().is_empty();
                if enough && begin.elapsed() >= time {
                    break;
                }
                assert!(
                    begin.elapsed() < time + LIMIT,
                    "rounds {:?}, and no event of {:?}",
                    self.rounds(),
                    self.counts.missing()
                );
            }
        });
        self.host.check(vcpus);
    }
}

/// A reader of the log, and a copy of memory that it updates from the log.
struct Log<'a> {
    test: &'a Test,
    copy: Vec<Words>,
    random: Random,
}

impl<'a> Log<'a> {
    fn new(test: &'a Test) -> Self {
        Self {
            test,
            copy: Vec::new(),
            random: Random::new(7),
        }
    }

    /// Starts the log, reads it some times while harts run, once while they are paused, and ends
    /// it.
    fn round(&mut self, fleet: &Fleet) {
        let Test {
            vm, host, counts, ..
        } = self.test;
        host.set(vm, LOGGED, SlotFlags::LOG_DIRTY_PAGES);
        // The copy has the stores from before. Every later store must be in a log.
        self.copy = host.all(LOGGED);
        // Often it does not read while harts run: a later store to the same page would hide a store
        // that is in no log.
        for _ in 0..(self.random.next() % 8).saturating_sub(3) {
            churn::pause(&mut self.random, 3000);
            self.harvest();
        }
        {
            let _paused = fleet.pause();
            self.harvest();
            for (page, words) in (LOGGED.first..).zip(host.all(LOGGED)) {
                let copied = self.copy[(page - LOGGED.first) as usize];
                assert_eq!(copied, words, "page {page}: a store is in no log");
            }
        }
        counts.add(Done::Logs, 1);
        host.set(vm, LOGGED, SlotFlags::EMPTY);
        churn::pause(&mut self.random, 3000);
    }

    /// Reads and clears the log, and copies the pages in it.
    fn harvest(&mut self) {
        let test = self.test;
        let log = dirty_log(&test.vm, LOGGED.slot, LOGGED.pages);
        let mut first = 0;
        while first < WORDS {
            let words = 1 + self.random.next() as usize % (WORDS - first);
            let part = &log[first..first + words];
            if test.vm.config().dirty_protect != DirtyProtect::ByGet {
                let at = first as u64 * 64;
                test.vm.clear_dirty_log(LOGGED.slot, at, part).unwrap();
            }
            for page in named(part).map(|page| first as u64 * 64 + page) {
                self.copy[page as usize] = test.host.words(LOGGED.first + page);
                test.counts.add(Done::PagesLogged, 1);
            }
            first += words;
        }
    }
}

/// The modes run one after the other, since each uses all CPUs.
#[test]
fn guests_find_what_they_stored_whatever_the_host_does() {
    let time = stress_time(Duration::from_secs(4));
    let modes = [
        (DirtyBy::WriteProtection, DirtyProtect::ByClear),
        (DirtyBy::Bits, DirtyProtect::ByClear),
        (DirtyBy::WriteProtection, DirtyProtect::ByGet),
        (DirtyBy::Bits, DirtyProtect::InitiallySet),
    ];
    for (dirty_by, dirty_protect) in modes {
        let (test, mut vcpus) = Test::new(VmConfig {
            dirty_by,
            dirty_protect,
            ..VmConfig::default()
        });
        test.run(&mut vcpus, time / modes.len() as u32);
        println!("{dirty_by:?}, {dirty_protect:?}: {}", test.counts);
        println!("  rounds over {} pages: {:?}", guest::PAGES, test.rounds());
    }
}
