//! The fault path on a model of the kernel, under a scheduler that decides every step (the
//! `shuttle` crate).
//!
//! Two vCPUs touch pages. Beside them a thread reads events, another installs pages, another marks
//! missing pages, and another drops mappings as reclaim does. When no page is missing, delivery
//! ends while all of these go on. [`Model`] is the kernel, with the semantics of Linux 6.12.
//!
//! **Properties.** No vCPU sleeps for ever (shuttle reports a deadlock). None sees zeros or stale
//! bytes. No marker outlives its delivery. No call fails.
//!
//! ```sh
//! RUSTFLAGS="--cfg shuttle" \
//!     cargo test -p pageferry-machine --profile stress --lib userfault::model
//! ```
//!
//! `PAGEFERRY_SHUTTLE_SECONDS` is the time for all scenarios together, 40 by default. A failure
//! prints its schedule, which `shuttle::replay` takes. "failing seed" beside a test that passes
//! only means that its time was over.
//!
//! # Caught faults
//!
//! Each row breaks one rule. Some ten thousand schedules find it.
//!
//! | broken rule | found as |
//! |---|---|
//! | disarming does not sweep | a marker stays |
//! | marking takes no turn | a marker stays |
//! | marking reads the missing pages before its turn | marking fails |
//! | disarming takes no turn of marking | marking fails |
//! | an install that failed does not look whether delivery has ended | an install fails |
//! | ... does not wait for the thread that ends delivery | an install fails |
//! | `active` stays set after disarming | an install fails |
//! | a vCPU does not lift a stale marker | no end |
//! | unregistering does not wake | deadlock |
//! | a present page is not installed again at a fault | deadlock |
//! | CONTINUE does not replace markers | no end, or deadlock |
//! | the missing bit is cleared, or the page mapped, before its bytes are there | wrong bytes |
//!
//! The wake-up behind a CONTINUE that stopped is not caught when it is left out: each page's
//! sleepers are also woken by the thread that mapped the page.

mod kernel;

use super::FaultPath;
use crate::kvm::x86::poison::mark;
use crate::{Delivery, DeliveryInUse, GuestRam, RamLayout};
use kernel::{Model, Pte, Touch, placing};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_userfault::{Claim, PageBitmap, PageStates};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, Runner, thread};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Present: 0. Missing: 1 has stale bytes, 2 is a hole and arrives as zero, 3 is a hole and arrives
/// with bytes.
const PAGES: u64 = 4;
const MISSING: Range<usize> = 1..4;
const STALE: u8 = 0x5a;

/// The first byte of a page's right contents; all of its bytes are the same.
fn right(page: RamPage) -> u8 {
    [0x10, 0x11, 0, 0x13][page.index()]
}

/// A machine with its kernel.
struct Vm {
    kernel: Arc<Model>,
    faults: FaultPath<Arc<Model>>,
    states: PageStates,
    delivery: Delivery,
}

impl Vm {
    fn armed(delivery: Delivery) -> Self {
        let ram = GuestRam::new(RamLayout::for_memory(PAGES * PAGE_SIZE).unwrap());
        let ram = Arc::new(ram.unwrap());
        placing(&ram).write(RamPage(0), &[right(RamPage(0)); PAGE_SIZE as usize]);
        if delivery != Delivery::Missing {
            placing(&ram).write(RamPage(1), &[STALE; PAGE_SIZE as usize]);
        }
        let kernel = Model::new(Arc::clone(&ram), delivery != Delivery::Missing);
        let missing = Arc::new(PageBitmap::new(PAGES as usize));
        missing.set_range(MISSING);
        let faults = FaultPath::new(ram);
        let in_use = DeliveryInUse {
            delivery,
            because: String::new(),
        };
        faults
            .set_armed(Arc::clone(&kernel), Arc::clone(&missing), in_use, true)
            .unwrap();
        Self {
            kernel,
            faults,
            states: PageStates::try_new(missing).unwrap(),
            delivery,
        }
    }

    fn install(&self, page: RamPage) {
        self.faults.install(page, 1).unwrap();
    }

    /// Serves a fault, as the threads of a migration's destination do. A vCPU also `waits`.
    fn bring(&self, page: RamPage, waits: bool) {
        match self.states.claim(page) {
            Claim::Present => self.install(page),
            Claim::Others => {
                while waits && self.states.is_missing(page) {
                    thread::yield_now();
                }
            }
            Claim::Mine => self.place(page, 1),
        }
    }

    /// Gives claimed pages their bytes, and makes them present.
    fn place(&self, first: RamPage, pages: u64) {
        let ram = &self.kernel.ram;
        for page in (first.0..first.0 + pages).map(RamPage) {
            let bytes = [right(page); PAGE_SIZE as usize];
            if right(page) == 0 {
                continue;
            }
            if self.delivery == Delivery::Missing {
                self.faults.install_copy(page, &bytes).unwrap();
            } else {
                placing(ram).write(page, &bytes);
            }
        }
        self.faults.install(first, pages).unwrap();
        let _ = self.states.arrive(first, pages as usize);
    }

    /// Brings all missing pages that no other thread brings, run by run.
    fn push(&self) {
        for page in MISSING.rev() {
            let page = RamPage(page as u64);
            let claim = self.states.claim_around(page, MISSING, |first, pages| {
                self.place(first, pages as u64);
            });
            if claim == Claim::Present {
                self.install(page);
            }
        }
    }

    fn run_vcpu(&self, pages: impl Iterator<Item = u64>) {
        for page in pages.map(RamPage) {
            loop {
                match self.kernel.touch(page) {
                    Touch::Byte(byte) => {
                        assert_eq!(byte, right(page), "{page:?} has wrong bytes");
                        break;
                    }
                    Touch::Marker => {
                        if self.faults.met_marker(page).unwrap() {
                            self.bring(page, true);
                        }
                    }
                }
            }
        }
    }

    fn mark(&self) {
        let spared = HashSet::new();
        let armed = self.faults.armed().unwrap();
        mark(armed, &spared, &|| false).unwrap();
    }

    fn disarm(&self) {
        while self.states.missing().next_set(0).is_some() {
            thread::yield_now();
        }
        self.faults.end(|| Ok(())).unwrap();
        self.assert_no_markers();
        self.kernel.end();
    }

    fn assert_no_markers(&self) {
        let entries = self.kernel.lock().entries;
        assert!(!entries.contains(&Pte::Marker), "a marker stays");
    }
}

/// Fault, arrival, disarm and sweep, all at once.
fn scenario(delivery: Delivery) {
    let vm = Arc::new(Vm::armed(delivery));
    let spawn = |act: fn(&Vm)| {
        let vm = Arc::clone(&vm);
        thread::spawn(move || act(&vm))
    };
    let threads = [
        spawn(|vm| vm.run_vcpu((0..PAGES).chain([1]))),
        spawn(|vm| vm.run_vcpu((0..PAGES).rev().chain([3]))),
        spawn(|vm| {
            while let Some(page) = vm.kernel.next_event() {
                vm.bring(page, false);
            }
        }),
        spawn(Vm::push),
        spawn(|vm| {
            for page in [1, 3, 1] {
                vm.kernel.reclaim(RamPage(page));
            }
        }),
        spawn(|vm| {
            if vm.delivery == Delivery::Poison {
                vm.mark();
            }
        }),
        spawn(Vm::disarm),
    ];
    for thread in threads {
        thread.join().unwrap();
    }
    vm.assert_no_markers();
    assert!(vm.kernel.lock().sleepers.is_empty());
    // A marker that is left all the same is in nobody's way.
    vm.kernel.lock().entries[0] = Pte::Marker;
    vm.run_vcpu(0..1);
    vm.assert_no_markers();
}

fn check(delivery: Delivery) {
    const SCENARIOS: u32 = 3;
    let seconds = std::env::var("PAGEFERRY_SHUTTLE_SECONDS");
    let seconds: u64 = seconds.map_or(40, |s| s.parse().expect("a number of seconds"));
    let mut config = Config::new();
    config.max_time = Some(Duration::from_secs(seconds) / SCENARIOS / 2);
    config.silence_warnings = true;
    config.stack_size = 1 << 17;
    let schedules = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&schedules);
    let run = move || {
        counted.fetch_add(1, Ordering::Relaxed);
        scenario(delivery);
    };
    Runner::new(RandomScheduler::new(usize::MAX), config.clone()).run(run.clone());
    Runner::new(PctScheduler::new(4, usize::MAX), config).run(run);
    println!(
        "{delivery}: {} schedules",
        schedules.load(Ordering::Relaxed)
    );
}

#[test]
fn faults_arrivals_and_disarming_with_poison() {
    check(Delivery::Poison);
}

#[test]
fn faults_arrivals_and_disarming_with_minor_faults() {
    check(Delivery::Minor);
}

#[test]
fn faults_arrivals_and_disarming_with_missing_faults() {
    check(Delivery::Missing);
}
