//! The whole machine, and the roles of its threads.

use super::board::Board;
use super::host::Host;
use super::maintain::Maintainer;
use super::sync::{AtomicBool, AtomicU64, Mutex, Ordering, thread};
use super::vcpu::Vcpu;
use pageferry_addr::{Gfn, GfnRange};
use pageferry_tdp::format::{DirtyBy, Format};
use pageferry_tdp::{Log, Mmu};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// The log of the only slot, one bit a page.
pub(crate) struct SlotLog {
    on: AtomicBool,
    words: Vec<AtomicU64>,
}

impl Log for SlotLog {
    fn is_on(&self) -> bool {
        self.on.load(Ordering::SeqCst)
    }

    fn dirtied(&self, gfn: Gfn, pages: u64) {
        if !self.is_on() {
            return;
        }
        let end = (gfn.0 + pages).min(self.words.len() as u64 * 64);
        for page in gfn.0..end {
            self.words[page as usize / 64].fetch_or(1 << (page % 64), Ordering::AcqRel);
        }
    }
}

impl SlotLog {
    fn new(pages: u64) -> Self {
        Self {
            on: AtomicBool::new(false),
            words: (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    pub(crate) fn switch(&self, on: bool) {
        self.on.store(on, Ordering::SeqCst);
        if !on {
            for word in &self.words {
                word.store(0, Relaxed);
            }
        }
    }

    /// Takes the bits, by words of 64 pages.
    pub(crate) fn take(&self) -> Vec<u64> {
        let take = |word: &AtomicU64| word.swap(0, Ordering::AcqRel);
        self.words.iter().map(take).collect()
    }
}

/// The length of a run.
#[derive(Clone, Copy)]
pub(crate) enum Length {
    /// A number of accesses for each vCPU. Each other thread makes a quarter as many rounds.
    #[cfg_attr(not(shuttle), expect(dead_code, reason = "for shuttle only"))]
    Accesses(u64),
    /// A duration.
    #[cfg_attr(shuttle, expect(dead_code, reason = "for threads only"))]
    Time(Duration),
}

/// The repeated work of a thread other than a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Moves pages to other frames, both single ones and large pieces.
    Notifier,
    /// Starts the log, reads it a few times, and stops it: split, protect or clean, recover.
    Logger,
    /// A logger that splits nothing. Faults and other threads do.
    LazyLogger,
    /// Splits and recovers. Not beside a logger.
    Resizer,
    /// Splits only. Works beside a logger.
    Splitter,
    /// Ages.
    Ager,
    /// Zaps ranges.
    Zapper,
    /// Zaps everything.
    Destroyer,
}

pub(crate) struct Machine<F: Format> {
    pub(crate) mmu: Arc<Mmu<F, Board<F>>>,
    pub(crate) host: Host,
    pub(crate) log: SlotLog,
    /// Whether all vCPUs must stand still.
    pub(crate) paused: AtomicBool,
    /// Excludes log passes by dirty bits against zaps. A zap finds dirty bits and reports them to
    /// the log a moment later.
    pub(crate) passes: Mutex<()>,
    /// Whether faults map only pages of 4 KiB.
    pub(crate) small: bool,
    length: Length,
    begun: Instant,
    over: AtomicBool,
}

pub(crate) fn range(first: u64, pages: u64) -> GfnRange {
    GfnRange::new(Gfn(first), pages).expect("a range of pages")
}

impl<F: Format> Machine<F> {
    /// Runs `vcpus` vCPUs and a thread for each role on `pages` pages, then checks everything.
    pub(crate) fn run(vcpus: usize, pages: u64, roles: &[Role], small: bool, length: Length) {
        let machine = Arc::new(Self {
            mmu: Mmu::new(Board::new(vcpus)).expect("memory for a root"),
            host: Host::new(pages, vcpus),
            log: SlotLog::new(pages),
            paused: AtomicBool::new(false),
            passes: Mutex::new(()),
            small,
            length,
            begun: Instant::now(),
            over: AtomicBool::new(false),
        });
        let guests: Vec<_> = (0..vcpus)
            .map(|number| {
                let machine = Arc::clone(&machine);
                thread::spawn(move || {
                    let _end = End(&machine);
                    Vcpu::new(&machine, number).run();
                })
            })
            .collect();
        let others: Vec<_> = roles
            .iter()
            .map(|&role| {
                let machine = Arc::clone(&machine);
                thread::spawn(move || {
                    let _end = End(&machine);
                    Maintainer::new(&machine, role).run();
                })
            })
            .collect();
        for thread in guests.into_iter().chain(others) {
            if let Err(why) = thread.join() {
                std::panic::resume_unwind(why);
            }
        }
        machine.check();
    }

    /// Whether a thread that has done something `done` times must go on.
    pub(crate) fn goes_on(&self, done: u64) -> bool {
        match self.length {
            Length::Accesses(accesses) => done < accesses,
            Length::Time(time) => !self.over.load(Relaxed) && self.begun.elapsed() < time,
        }
    }

    /// The number of rounds for threads other than vCPUs.
    pub(crate) fn goes_round(&self, done: u64) -> bool {
        match self.length {
            Length::Accesses(accesses) => done < accesses / 4,
            Length::Time(_) => self.goes_on(done),
        }
    }

    /// The checks after all threads have ended.
    fn check(&self) {
        let mut worker = self.mmu.worker();
        let mut leaves = [0; 3];
        worker.scan(range(0, self.host.pages()), |first, found| {
            leaves[found.level as usize - 1] += 1;
            for page in 0..F::frames_per_entry(found.level) {
                let (gfn, mapped) = (first.0 + page, found.leaf.pfn.0 + page);
                let behind = self.host.pfn(gfn).map(|pfn| pfn.0);
                assert_eq!(behind, Some(mapped), "page {gfn:#x} is mapped elsewhere");
            }
        });
        assert_eq!(self.mmu.stats().leaves, leaves, "leaves are counted wrong");
        worker.zap_all(&()).expect("memory for a root");
        drop(worker);
        let stats = self.mmu.stats();
        assert_eq!(
            (stats.leaves, stats.tables),
            ([0; 3], 0),
            "counts of nothing"
        );
        let live = self.mmu.platform().live.load(Relaxed);
        assert_eq!(live, 1, "tables are left over beside the root");
    }

    /// Reads the log once. It copies each logged page after every later store to it will be in the
    /// log again.
    pub(crate) fn pass(
        &self,
        worker: &mut pageferry_tdp::Worker<F, Board<F>>,
        copy: &mut [Vec<u64>],
    ) {
        let bits = if F::DIRTY_BY == DirtyBy::Hardware {
            let _apart = self.passes.lock().unwrap();
            worker.clear_dirty(range(0, self.host.pages()), &self.log);
            self.log.take()
        } else {
            let bits = self.log.take();
            worker.deferred(|worker| {
                for (word, &mask) in (0..).zip(&bits) {
                    worker.write_protect_mask(Gfn(word * 64), mask, &());
                }
            });
            bits
        };
        for (word, mask) in bits.into_iter().enumerate() {
            for bit in (0..64).filter(|bit| mask >> bit & 1 != 0) {
                self.copy_page(copy, word * 64 + bit);
            }
        }
    }

    /// The last pass. All vCPUs stand still, and then every page must equal its copy.
    pub(crate) fn last_pass(
        &self,
        worker: &mut pageferry_tdp::Worker<F, Board<F>>,
        copy: &mut [Vec<u64>],
    ) {
        self.paused.store(true, Ordering::SeqCst);
        for gate in &self.mmu.platform().gates {
            while !gate.parked.load(Ordering::SeqCst) {
                thread::yield_now();
            }
        }
        self.pass(worker, copy);
        let copied = copy.to_vec();
        for (gfn, copied) in copied.iter().enumerate() {
            self.copy_page(copy, gfn);
            assert_eq!(*copied, copy[gfn], "page {gfn:#x} is not in the log");
        }
        self.paused.store(false, Ordering::SeqCst);
    }

    /// Copies one page, if a frame is behind it.
    pub(crate) fn copy_page(&self, copy: &mut [Vec<u64>], gfn: usize) {
        loop {
            if let Some(words) = self.host.words(gfn as u64) {
                copy[gfn] = words;
                return;
            }
            thread::yield_now();
        }
    }
}

/// Ends the run, however its thread ends.
struct End<'m, F: Format>(&'m Machine<F>);

impl<F: Format> Drop for End<'_, F> {
    fn drop(&mut self) {
        self.0.over.store(true, Relaxed);
        if thread::panicking() {
            self.0.paused.store(false, Ordering::SeqCst);
        }
    }
}
