//! Installing missing pages, for every delivery of faults.
//!
//! **Guarantee.** Each page is installed once. A vCPU that faults on a page that another thread
//! installs waits until the page is there. It does not enter the guest and exit again.
//!
//! **Mechanism.** As in a migration's destination: one thread claims the page ([`PageStates`]). A
//! second vCPU spins for [`FAULT_SPIN`] and then sleeps ([`Waiters`]). A vCPU whose fault is
//! delivered as an event sleeps in the kernel, and the installation wakes it.
//!
//! **Neighbours.** `soft` and `machine` write the bytes and map the page.

use super::plan::Plan;
use crate::BenchError;
use crate::vm::LIMIT;
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_migration::FAULT_SPIN;
use pageferry_transport::channel::Spinner;
use pageferry_userfault::{Claim, PageBitmap, PageStates, Waiters};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// The bytes of an installed page. They are not zero, so that a check notices a page that was not
/// installed.
pub(super) const BYTES: [u8; PAGE_SIZE as usize] = [0x5a; PAGE_SIZE as usize];

/// The threads that read fault events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    /// One thread that never spins: it sleeps in `poll(2)`, reads one message, and installs the
    /// page. `demand_paging_test` reads so.
    Plain,
    /// A thread for each of the machine's streams, which spins before it sleeps. Both numbers are
    /// at least 1.
    Streams {
        userfaultfds: u32,
        /// The readers of each userfaultfd.
        readers: u32,
    },
}

/// How faults on missing pages are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Serving {
    /// The time that a thread sleeps before it installs a page: a simulated fetch.
    pub(crate) delay: Duration,
    /// The threads that read fault events.
    pub(crate) reading: Reading,
    /// Whether the times of faults are taken. That costs a read of the clock for each fault.
    pub(crate) clock: bool,
}

impl Default for Serving {
    /// No delay, one reader, no clock.
    fn default() -> Self {
        Self {
            delay: Duration::ZERO,
            reading: Reading::Streams {
                userfaultfds: 1,
                readers: 1,
            },
            clock: false,
        }
    }
}

/// The missing pages of one VM.
pub(super) struct MissingPages {
    states: PageStates,
    waiters: Waiters,
    /// The thread of each vCPU that has waited.
    threads: Box<[OnceLock<Thread>]>,
    /// Whether an installation failed, so that a page may never come.
    failed: AtomicBool,
    delay: Duration,
    created: Instant,
    /// When the fault on each touched page was seen, in nanoseconds since `created`. Empty without
    /// a clock.
    seen: Box<[AtomicU64]>,
    /// The touched pages, and the number of pages that each vCPU touches.
    touched: Range<u64>,
    each: usize,
}

impl MissingPages {
    /// All pages that `plan` touches are missing from a RAM of `pages` pages.
    ///
    /// # Errors
    /// If the allocator refuses memory.
    pub(super) fn all(pages: u64, plan: &Plan, serving: Serving) -> Result<Self, BenchError> {
        let no_memory = |e| BenchError::Os {
            what: "cannot record the missing pages",
            source: io::Error::new(io::ErrorKind::OutOfMemory, e),
        };
        let missing = PageBitmap::try_new(pages as usize).map_err(no_memory)?;
        missing.set_range(plan.touched.start as usize..plan.touched.end as usize);
        let vcpus = plan.vcpus() as usize;
        // With overlap the pages do not tell which vCPU faulted.
        let own = plan.touches() == plan.touched.end - plan.touched.start;
        let seen = if serving.clock && own {
            plan.touched.clone().map(|_| AtomicU64::new(0)).collect()
        } else {
            Box::default()
        };
        Ok(Self {
            states: PageStates::try_new(Arc::new(missing)).map_err(no_memory)?,
            waiters: Waiters::new(vcpus),
            threads: (0..vcpus).map(|_| OnceLock::new()).collect(),
            failed: AtomicBool::new(false),
            delay: serving.delay,
            created: Instant::now(),
            seen,
            touched: plan.touched.clone(),
            each: plan.each as usize,
        })
    }

    pub(super) fn bitmap(&self) -> &Arc<PageBitmap> {
        self.states.missing()
    }

    /// Serves a fault on `page`. The first thread installs it by `write`. If another thread does,
    /// the thread of `vcpu` waits. A reader of events has no `vcpu`, and returns.
    ///
    /// If the page is present, it calls `map`: userfaultfd also reports pages that have their bytes
    /// and are not mapped yet, such as those of the guest's program.
    pub(super) fn install(
        &self,
        vcpu: Option<usize>,
        page: RamPage,
        write: impl FnOnce() -> Result<(), BenchError>,
        map: impl FnOnce() -> Result<(), BenchError>,
    ) -> Result<(), BenchError> {
        if !self.touched.contains(&page.0) {
            return map();
        }
        match self.states.claim(page) {
            Claim::Present => map(),
            Claim::Mine => {
                self.fetch(page);
                let written = write();
                match written {
                    Ok(()) => drop(self.states.arrive(page, 1)),
                    Err(_) => self.failed.store(true, Ordering::Release),
                }
                let page = page.0..page.0 + 1;
                self.waiters.arrived(page, |vcpu| self.wake(vcpu));
                written
            }
            Claim::Others => {
                if let Some(vcpu) = vcpu {
                    self.wait(vcpu, page);
                }
                Ok(())
            }
        }
    }

    /// Takes the time of the fault on `page`, and simulates the fetch.
    fn fetch(&self, page: RamPage) {
        if let Some(seen) = self.seen.get((page.0 - self.touched.start) as usize) {
            seen.store(self.created.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
        if !self.delay.is_zero() {
            thread::sleep(self.delay);
        }
    }

    /// Waits until `page` is present. It also returns after a failed installation and after
    /// [`LIMIT`]: the race then stops the vCPU.
    fn wait(&self, vcpu: usize, page: RamPage) {
        self.threads[vcpu].get_or_init(thread::current);
        let over = || !self.states.is_missing(page) || self.failed.load(Ordering::Acquire);
        let (began, mut spinner) = (Instant::now(), Spinner::new(FAULT_SPIN));
        while !over() && began.elapsed() < LIMIT {
            if !spinner.spin() {
                self.waiters.announce(vcpu, page.0);
                if !over() {
                    thread::park_timeout(LIMIT);
                }
                self.waiters.withdraw(vcpu);
                spinner = Spinner::new(FAULT_SPIN);
            }
        }
    }

    fn wake(&self, vcpu: usize) {
        // A thread enters its handle before it announces that it sleeps.
        if let Some(thread) = self.threads[vcpu].get() {
            thread.unpark();
        }
    }

    /// Nanoseconds from each fault of a vCPU to its next, as the threads that serve them see both.
    /// They contain the installation, the resumption, the repeated store, and the delivery of the
    /// next fault. Empty without a clock, and with overlap.
    pub(super) fn fault_to_fault(&self) -> Vec<u64> {
        let at = |seen: &AtomicU64| seen.load(Ordering::Relaxed);
        self.seen
            .chunks(self.each)
            .flat_map(|of_vcpu| of_vcpu.windows(2))
            .map(|pair| at(&pair[1]).saturating_sub(at(&pair[0])))
            .collect()
    }

    /// Checks that all pages are present.
    pub(super) fn check(&self) -> Result<(), BenchError> {
        match self.bitmap().count() {
            0 => Ok(()),
            left => Err(BenchError::WrongValue(format!(
                "{left} pages are still missing after every page was touched"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_guest::Isa;
    use std::sync::mpsc;

    fn two_vcpus(serving: Serving, overlap: bool) -> (MissingPages, RamPage) {
        let plan = Plan::new(Isa::Rv64, 2, 2, overlap).unwrap();
        let missing = MissingPages::all(plan.touched.end, &plan, serving).unwrap();
        (missing, RamPage(plan.touched.start))
    }

    /// vCPU 0 installs a page by `outcome` once vCPU 1 sleeps for it.
    fn second_faulter(missing: &MissingPages, page: RamPage, outcome: Result<(), BenchError>) {
        let (claimed, wait_for_claim) = mpsc::channel();
        let start = Instant::now();
        thread::scope(|scope| {
            scope.spawn(move || {
                let write = || {
                    claimed.send(()).unwrap();
                    let late = Duration::from_secs(5);
                    while missing.waiters.asleep().next().is_none() && start.elapsed() < late {
                        thread::yield_now();
                    }
                    outcome
                };
                let _ = missing.install(Some(0), page, write, || Ok(()));
            });
            scope.spawn(move || {
                wait_for_claim.recv().unwrap();
                let never = || panic!("the page is installed twice");
                missing.install(Some(1), page, never, || Ok(())).unwrap();
                let arrived = !missing.bitmap().test(page);
                assert!(arrived || missing.failed.load(Ordering::Acquire));
                assert!(start.elapsed() < LIMIT, "it slept to the limit");
            });
        });
    }

    #[test]
    fn the_second_faulter_sleeps_until_the_page_is_there() {
        let (missing, page) = two_vcpus(Serving::default(), true);
        second_faulter(&missing, page, Ok(()));
        assert!(!missing.bitmap().test(page));
        assert_eq!(missing.waiters.asleep().count(), 0);
    }

    #[test]
    fn a_failed_installation_wakes_the_second_faulter() {
        let (missing, page) = two_vcpus(Serving::default(), true);
        let why = BenchError::Setting("refused".into());
        second_faulter(&missing, page, Err(why));
        assert!(missing.bitmap().test(page));
    }

    #[test]
    fn times_are_fault_to_fault_of_one_vcpu() {
        let serving = Serving {
            delay: Duration::from_millis(2),
            clock: true,
            ..Serving::default()
        };
        let (missing, page) = two_vcpus(serving, false);
        // The first vCPU has pages 0 and 1, the second 2 and 3.
        for index in [0, 2, 1, 3] {
            let page = RamPage(page.0 + index);
            missing.install(None, page, || Ok(()), || Ok(())).unwrap();
        }
        let times = missing.fault_to_fault();
        assert_eq!(times.len(), 2, "an interval for each vCPU");
        assert!(times.iter().all(|&ns| ns >= 4_000_000), "{times:?}");
        assert!(two_vcpus(serving, true).0.fault_to_fault().is_empty());
        let (unclocked, _) = two_vcpus(Serving::default(), false);
        assert!(unclocked.fault_to_fault().is_empty());
    }
}
