#![expect(
    unsafe_code,
    reason = "plays the kernel and the thread that places pages"
)]
//! The fault path on a model of the kernel, under a scheduler that decides every step (the
//! `shuttle` crate).
//!
//! Two vCPUs touch pages. Beside them a thread reads events, another installs pages, another marks
//! missing pages, and another drops mappings as reclaim does. When no page is missing, delivery
//! ends while all of these go on. The page cache is a real memfd. [`Model`] has the rest of the
//! kernel's state, with the semantics of Linux 6.12.
//!
//! **Properties.** No vCPU sleeps for ever (shuttle reports a deadlock). None sees zeros or stale
//! bytes. No marker outlives its delivery. No call fails.
//!
//! ```sh
//! RUSTFLAGS="--cfg shuttle" cargo test -p pageferry-machine --profile stress --lib userfault::model
//! ```
//!
//! `PAGEFERRY_SHUTTLE_SECONDS` is the time for all scenarios together, 40 by default. A failure
//! prints its schedule, which `shuttle::replay` takes. "failing seed" beside a test that passes only
//! means that its time was over.
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
//! The wake-up behind a CONTINUE that stopped is not caught when it is left out: each page's sleepers
//! are also woken by the thread that mapped the page.

use super::super::poison::mark;
use super::super::userfault::Kernel;
use super::FaultPath;
use crate::{Backing, Delivery, DeliveryInUse, GuestRam, MachineError, RamLayout, UncheckedRam};
use pageferry_addr::{Hva, PAGE_SIZE, PageSize, RamPage};
use pageferry_userfault::uffd::{RangeError, RangeOp, Wake};
use pageferry_userfault::{Claim, PageBitmap, PageStates};
use rustix::io::Errno;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::{Condvar, Mutex, MutexGuard};
use shuttle::{Config, Runner, thread};
use std::collections::{HashSet, VecDeque};
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

/// The bytes of the page cache.
fn placing(ram: &GuestRam) -> UncheckedRam<'_> {
    // SAFETY: shuttle runs one thread at a time, so no two accesses meet. A byte that is read too
    // early, or written twice, is what the model looks for.
    unsafe { ram.unchecked() }
}

/// An entry of the guest mapping's page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    Empty,
    Marker,
    Mapped,
}

/// What a vCPU's touch of a page comes to, after any sleep.
enum Touch {
    Byte(u8),
    Marker,
}

struct State {
    entries: [Entry; PAGES as usize],
    /// Whether the mapping is registered, and then whether it is for minor faults too.
    registered: Option<bool>,
    /// The number of the last sleep.
    last: u64,
    /// Sleeps and their pages.
    sleepers: Vec<(u64, RamPage)>,
    /// Sleeps whose event was not read.
    events: VecDeque<(u64, RamPage)>,
    /// The reader of events ends.
    over: bool,
}

impl State {
    fn wake(&mut self, pages: Range<u64>) {
        self.sleepers.retain(|(_, page)| !pages.contains(&page.0));
        let sleepers = &self.sleepers;
        self.events.retain(|event| sleepers.contains(event));
    }
}

/// The kernel.
struct Model {
    ram: GuestRam,
    state: Mutex<State>,
    /// A sleep has begun or ended, or `over` is set.
    changed: Condvar,
}

impl Model {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn in_page_cache(&self, page: RamPage) -> bool {
        let next = self.ram.next_allocated(page).unwrap();
        next.is_some_and(|pages| pages.start == page.0)
    }

    fn pages(&self, start: Hva, len: u64) -> Range<u64> {
        let first = self.ram.page_at_guest_hva(start).unwrap().0;
        first..first + len / PAGE_SIZE
    }

    /// Changes entries one by one. `change` says whether it changed the entry.
    fn fill(
        &self,
        op: RangeOp,
        (start, len): (Hva, u64),
        wake: Wake,
        change: impl Fn(&mut State, RamPage) -> Result<bool, Errno>,
    ) -> Result<(), RangeError> {
        let pages = self.pages(start, len);
        let mut changed = 0;
        for (done, page) in (0..).zip(pages.clone()) {
            let mut state = self.lock();
            let result = match state.registered {
                Some(_) => change(&mut state, RamPage(page)),
                None => Err(Errno::NOENT),
            };
            match result {
                Ok(one) => changed += u64::from(one),
                Err(errno) => {
                    return Err(RangeError {
                        op,
                        start,
                        len,
                        done: done * PAGE_SIZE,
                        errno,
                    });
                }
            }
            // The kernel wakes the sleepers of the pages that it changed, even if it stops later.
            if wake == Wake::Now && matches!(result, Ok(true)) {
                state.wake(page..page + 1);
                self.changed.notify_all();
            }
        }
        if wake == Wake::Now && changed < pages.end - pages.start {
            self.wake(pages);
        }
        Ok(())
    }

    fn wake(&self, pages: Range<u64>) {
        self.lock().wake(pages);
        self.changed.notify_all();
    }

    /// A touch by a vCPU. It sleeps where the kernel would.
    fn touch(&self, page: RamPage) -> Touch {
        let mut state = self.lock();
        loop {
            match state.entries[page.index()] {
                Entry::Marker => return Touch::Marker,
                Entry::Mapped => {
                    let mut bytes = [0; PAGE_SIZE as usize];
                    placing(&self.ram).read(page, &mut bytes);
                    return Touch::Byte(bytes[0]);
                }
                Entry::Empty => {}
            }
            let cached = self.in_page_cache(page);
            if state.registered.is_some_and(|minor| minor || !cached) {
                state.last += 1;
                let sleep = (state.last, page);
                state.sleepers.push(sleep);
                state.events.push_back(sleep);
                self.changed.notify_all();
                while state.sleepers.contains(&sleep) {
                    state = self.changed.wait(state).unwrap();
                }
            } else {
                if !cached {
                    placing(&self.ram).zero(page);
                }
                state.entries[page.index()] = Entry::Mapped;
            }
        }
    }

    /// Reads an event, and waits for one. Returns `None` at the end.
    fn next_event(&self) -> Option<RamPage> {
        let mut state = self.lock();
        while !state.over && state.events.is_empty() {
            state = self.changed.wait(state).unwrap();
        }
        if state.over {
            return None;
        }
        state.events.pop_front().map(|(_, page)| page)
    }

    /// Drops a mapping, as reclaim does. Markers stay.
    fn reclaim(&self, page: RamPage) {
        let entry = &mut self.lock().entries[page.index()];
        if *entry == Entry::Mapped {
            *entry = Entry::Empty;
        }
    }
}

impl Kernel for Arc<Model> {
    fn continue_unmapped(
        &self,
        start: Hva,
        len: u64,
        _: PageSize,
        wake: Wake,
    ) -> Result<(), RangeError> {
        self.fill(RangeOp::Continue, (start, len), wake, |state, page| {
            let entry = &mut state.entries[page.index()];
            match *entry {
                _ if !self.in_page_cache(page) => Err(Errno::FAULT),
                Entry::Mapped => Ok(false),
                Entry::Empty | Entry::Marker => {
                    *entry = Entry::Mapped;
                    Ok(true)
                }
            }
        })
    }

    fn zeropage(&self, start: Hva, len: u64, wake: Wake) -> Result<(), RangeError> {
        self.fill(RangeOp::Zeropage, (start, len), wake, |state, page| {
            if self.in_page_cache(page) {
                return Err(Errno::EXIST);
            }
            placing(&self.ram).zero(page);
            state.entries[page.index()] = Entry::Mapped;
            Ok(true)
        })
    }

    fn copy(&self, start: Hva, bytes: &[u8], wake: Wake) -> Result<(), RangeError> {
        let range = (start, bytes.len() as u64);
        self.fill(RangeOp::Copy, range, wake, |state, page| {
            if self.in_page_cache(page) {
                return Err(Errno::EXIST);
            }
            placing(&self.ram).write_at(page, 0, bytes);
            state.entries[page.index()] = Entry::Mapped;
            Ok(true)
        })
    }

    fn poison_unmapped(
        &self,
        start: Hva,
        len: u64,
        _: PageSize,
        wake: Wake,
    ) -> Result<(), RangeError> {
        self.fill(RangeOp::Poison, (start, len), wake, |state, page| {
            let entry = &mut state.entries[page.index()];
            let empty = *entry == Entry::Empty;
            if empty {
                *entry = Entry::Marker;
            }
            Ok(empty)
        })
    }

    fn wake(&self, start: Hva, len: u64) -> Result<(), RangeError> {
        Model::wake(self, self.pages(start, len));
        Ok(())
    }

    fn unregister(&self) -> Result<(), RangeError> {
        let mut state = self.lock();
        state.registered = None;
        state.wake(0..PAGES);
        self.changed.notify_all();
        Ok(())
    }

    fn drop_mappings(&self, first: RamPage, pages: u64) -> Result<(), MachineError> {
        for page in first.0..first.0 + pages {
            self.lock().entries[page as usize] = Entry::Empty;
        }
        Ok(())
    }

    fn markers(&self, pages: Range<u64>) -> Result<Option<Vec<bool>>, MachineError> {
        let entries = self.lock().entries;
        let of = |page| entries[page as usize] == Entry::Marker;
        Ok(Some(pages.map(of).collect()))
    }

    fn populate(&self, page: RamPage) -> Result<(), MachineError> {
        assert!(matches!(self.touch(page), Touch::Byte(_)));
        Ok(())
    }
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
        let ram = GuestRam::new(RamLayout::for_memory(PAGES * PAGE_SIZE).unwrap()).unwrap();
        placing(&ram).write(RamPage(0), &[right(RamPage(0)); PAGE_SIZE as usize]);
        if delivery != Delivery::Missing {
            placing(&ram).write(RamPage(1), &[STALE; PAGE_SIZE as usize]);
        }
        let kernel = Arc::new(Model {
            ram,
            state: Mutex::new(State {
                entries: [Entry::Empty; PAGES as usize],
                registered: Some(delivery != Delivery::Missing),
                last: 0,
                sleepers: Vec::new(),
                events: VecDeque::new(),
                over: false,
            }),
            changed: Condvar::new(),
        });
        let missing = Arc::new(PageBitmap::new(PAGES as usize));
        missing.set_range(MISSING);
        let faults = FaultPath::new();
        let in_use = DeliveryInUse {
            delivery,
            because: String::new(),
        };
        faults
            .set_armed(
                Arc::clone(&kernel),
                Backing::Shmem,
                Arc::clone(&missing),
                in_use,
                true,
            )
            .unwrap();
        Self {
            kernel,
            faults,
            states: PageStates::try_new(missing).unwrap(),
            delivery,
        }
    }

    fn install(&self, page: RamPage) {
        self.faults.install(&self.kernel.ram, page, 1).unwrap();
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
                self.faults.install_copy(ram, page, &bytes).unwrap();
            } else {
                placing(&ram).write(page, &bytes);
            }
        }
        self.faults.install(ram, first, pages).unwrap();
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
        mark(armed, &self.kernel.ram, &spared, &|| false).unwrap();
    }

    fn disarm(&self) {
        while self.states.missing().next_set(0).is_some() {
            thread::yield_now();
        }
        self.faults.end(PAGES, || Ok(())).unwrap();
        self.assert_no_markers();
        self.kernel.lock().over = true;
        self.kernel.changed.notify_all();
    }

    fn assert_no_markers(&self) {
        let entries = self.kernel.lock().entries;
        assert!(!entries.contains(&Entry::Marker), "a marker stays");
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
    vm.kernel.lock().entries[0] = Entry::Marker;
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
