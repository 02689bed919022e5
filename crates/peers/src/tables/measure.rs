//! One scheme under measurement.

use super::Operation;
use super::scheme::{Parallel, Scheme, Worker};
use super::switches;
use crate::clock;
use crate::run::{self, Comparison, Subject, Wrong};
use crate::sync::{AtomicBool, AtomicU64, Ordering};
use pageferry_addr::{Gfn, GfnRange, Pfn};
use pageferry_bench::kit::Random;
use std::hint;
use std::marker::PhantomData;
use std::thread;
use std::time::{Duration, Instant};

/// What all schemes are measured with.
#[derive(Debug)]
pub(super) struct Input {
    /// Pages a thread has; a multiple of `chunk`.
    pages: u64,
    /// Pages that are timed together; a multiple of a table's.
    chunk: u64,
    /// The same with two threads.
    pair_chunk: u64,
    /// As many frames of the first thread's pages, at random.
    random: Vec<Gfn>,
    /// What reading the clock costs.
    overhead: Duration,
}

/// The first thread's first frame: at 4 GiB, with no tables in common with what is below 1 GiB.
const FIRST: Gfn = Gfn(1 << 20);
/// Frames lie so far above what they back, as far as tables of 2 MiB pages need them aligned.
const OFFSET: u64 = 1 << 23;
/// Two threads that start a chunk further apart did not have a core each.
const APART: Duration = Duration::from_micros(2);
/// After so many looks at the other thread, let the processor have something else.
const SPINS: u32 = 1 << 14;

/// The frame that backs `gfn`.
#[inline]
pub(super) const fn frame(gfn: Gfn) -> Pfn {
    Pfn(gfn.0 + OFFSET)
}

/// What is measured together, on tables that are empty before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Mapped page by page, looked up, protected and unmapped by ranges.
    Pages,
    /// Mapped by ranges, unmapped page by page.
    Ranges,
    /// By two threads, each its own pages.
    Partitioned,
    /// By two threads, the same pages.
    Overlapping,
}

impl Step {
    pub(super) const ALL: [Self; 4] = [
        Self::Pages,
        Self::Ranges,
        Self::Partitioned,
        Self::Overlapping,
    ];
}

impl Comparison for Input {
    type Operation = Operation;
    type Step = Step;
    const STEPS: &'static [Step] = &Step::ALL;
}

type Sample = run::Sample<Operation>;
type Sink<'a> = run::Sink<'a, Operation>;

/// A scheme of one thread.
#[derive(Debug, Default)]
pub(super) struct OneThread<S>(PhantomData<S>);

/// A scheme of several.
#[derive(Debug, Default)]
pub(super) struct TwoThreads<S>(PhantomData<S>);

impl<S> OneThread<S> {
    pub(super) fn boxed() -> Box<Self> {
        Box::new(Self(PhantomData))
    }
}

impl<S> TwoThreads<S> {
    pub(super) fn boxed() -> Box<Self> {
        Box::new(Self(PhantomData))
    }
}

impl<S: Scheme> Subject<Input> for OneThread<S> {
    fn name(&self) -> &'static str {
        S::NAME
    }

    fn measure(&mut self, step: Step, input: &Input, sink: Sink<'_>) -> Result<(), Wrong> {
        match step {
            Step::Pages => input.pages(&mut S::alone(), sink),
            Step::Ranges => input.ranges(&mut S::alone(), sink),
            Step::Partitioned | Step::Overlapping => Ok(()),
        }
    }
}

impl<S: Parallel> Subject<Input> for TwoThreads<S> {
    fn name(&self) -> &'static str {
        S::NAME
    }

    fn measure(&mut self, step: Step, input: &Input, sink: Sink<'_>) -> Result<(), Wrong> {
        match step {
            Step::Pages => input.pages(&mut S::alone(), sink),
            Step::Ranges => input.ranges(&mut S::alone(), sink),
            Step::Partitioned => {
                let firsts = [FIRST, Gfn(FIRST.0 + input.pages)];
                input.two::<S>(Operation::MapPartitioned, firsts, sink)
            }
            Step::Overlapping => input.two::<S>(Operation::MapOverlapping, [FIRST, FIRST], sink),
        }
    }
}

impl Input {
    /// `pages` a thread, in chunks of `chunk`, and with two threads of `pair_chunk`.
    pub(super) fn new(pages: u64, chunk: u64, pair_chunk: u64) -> Self {
        let mut random = Random::new(3);
        Self {
            pages,
            chunk,
            pair_chunk,
            random: (0..pages)
                .map(|_| Gfn(FIRST.0 + random.below(pages)))
                .collect(),
            overhead: clock::overhead(),
        }
    }

    /// The pages from `first` on, in chunks.
    fn chunks(&self, first: Gfn, chunk: u64) -> impl Iterator<Item = GfnRange> + use<> {
        (0..self.pages / chunk).map(move |n| {
            let start = Gfn(first.0 + n * chunk);
            GfnRange::new(start, chunk).expect("pages within the address space")
        })
    }

    /// Nanoseconds for one of the pages of a chunk.
    fn cost(&self, spent: Duration, chunk: u64) -> f64 {
        clock::per_operation(spent, self.overhead, chunk as usize)
    }

    /// Does `work` for each chunk, and times that.
    #[inline]
    fn each<W: Worker>(
        &self,
        worker: &mut W,
        operation: Operation,
        sink: Sink<'_>,
        mut work: impl FnMut(&mut W, GfnRange),
    ) {
        for range in self.chunks(FIRST, self.chunk) {
            let before = worker.flushes();
            let time = Timed::of(|| work(worker, range));
            let flushes = (worker.flushes() - before) as f64 / self.chunk as f64;
            sink(Sample {
                operation,
                value: self.cost(time.spent, self.chunk),
                flushes,
                disturbed: time.disturbed,
            });
        }
    }

    fn pages<W: Worker>(&self, worker: &mut W, sink: Sink<'_>) -> Result<(), Wrong> {
        self.each(worker, Operation::MapPage, sink, map_each);
        let mut right = true;
        self.each(worker, Operation::Find, sink, |worker, range| {
            for gfn in range.iter() {
                right &= is_mapped(worker, gfn);
            }
        });
        self.each(worker, Operation::FindRandom, sink, |worker, range| {
            let skipped = (range.start().0 - FIRST.0) as usize;
            for &gfn in &self.random[skipped..][..self.chunk as usize] {
                right &= is_mapped(worker, gfn);
            }
        });
        self.each(worker, Operation::ProtectRange, sink, W::protect_range);
        let protected = worker.find(FIRST).is_some_and(|found| !found.writable);
        self.each(worker, Operation::UnmapRange, sink, W::unmap_range);
        let gone = worker.find(FIRST).is_none();
        (right && protected && gone).then_some(()).ok_or(Wrong)
    }

    fn ranges<W: Worker>(&self, worker: &mut W, sink: Sink<'_>) -> Result<(), Wrong> {
        self.each(worker, Operation::MapRange, sink, |worker, range| {
            worker.map_range(range, frame(range.start()));
        });
        let mapped = self.all_mapped(worker, FIRST);
        self.each(worker, Operation::UnmapPage, sink, |worker, range| {
            range.iter().for_each(|gfn| worker.unmap(gfn));
        });
        let gone = worker.find(FIRST).is_none();
        (mapped && gone).then_some(()).ok_or(Wrong)
    }

    fn all_mapped<W: Worker>(&self, worker: &mut W, first: Gfn) -> bool {
        (first.0..first.0 + self.pages).all(|gfn| is_mapped(worker, Gfn(gfn)))
    }

    /// Maps page by page with two threads, each `pages` from its first frame on, chunk by chunk at
    /// once.
    fn two<S: Parallel>(
        &self,
        operation: Operation,
        firsts: [Gfn; 2],
        sink: Sink<'_>,
    ) -> Result<(), Wrong> {
        let tables = S::tables();
        let meeting = Meeting::new();
        let go_over = |first: Gfn| {
            let _leaving = Leaving(&meeting);
            let mut worker = S::worker(&tables);
            let chunks = self.pages / self.pair_chunk;
            let mut times = Vec::with_capacity(chunks as usize);
            for (round, range) in (1..).zip(self.chunks(first, self.pair_chunk)) {
                meeting.meet(round);
                times.push(Timed::of(|| {
                    map_each(&mut worker, range);
                }));
            }
            // Tables that one of them gives back must not be in the other's times.
            meeting.meet(chunks + 1);
            times
        };
        let (here, there) = thread::scope(|scope| {
            let there = scope.spawn(|| go_over(firsts[1]));
            let here = go_over(firsts[0]);
            (here, there.join())
        });
        let there = there.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        for (a, b) in here.into_iter().zip(there) {
            let apart = a.start.max(b.start) - a.start.min(b.start);
            sink(Sample {
                operation,
                value: self.cost((a.spent + b.spent) / 2, self.pair_chunk),
                flushes: 0.0,
                disturbed: a.disturbed || b.disturbed || apart > APART,
            });
        }
        let mut worker = S::worker(&tables);
        let mapped = firsts.iter().all(|&gfn| self.all_mapped(&mut worker, gfn));
        mapped.then_some(()).ok_or(Wrong)
    }
}

/// Work that was timed.
#[derive(Debug)]
struct Timed {
    start: Instant,
    spent: Duration,
    /// The thread lost its core meanwhile.
    disturbed: bool,
}

impl Timed {
    #[inline]
    fn of(work: impl FnOnce()) -> Self {
        let switches = switches::involuntary();
        let start = Instant::now();
        work();
        Self {
            start,
            spent: start.elapsed(),
            disturbed: switches::involuntary() != switches,
        }
    }
}

/// Maps all pages of `range` one by one. By itself, so that one thread and each of two run the same
/// instructions: inlined here and there, the compiler makes loops of different speeds of it.
#[inline(never)]
fn map_each<W: Worker>(worker: &mut W, range: GfnRange) {
    range.iter().for_each(|gfn| worker.map(gfn, frame(gfn)));
}

#[inline]
fn is_mapped<W: Worker>(worker: &mut W, gfn: Gfn) -> bool {
    // All of it, as who fills a TLB needs it.
    let found = hint::black_box(worker.find(gfn));
    found.is_some_and(|found| found.pfn == frame(gfn))
}

/// Where two threads wait for each other, again and again.
#[derive(Debug)]
#[repr(align(128))]
struct Meeting {
    arrived: AtomicU64,
    /// One of them will not come again.
    over: AtomicBool,
}

impl Meeting {
    const fn new() -> Self {
        Self {
            arrived: AtomicU64::new(0),
            over: AtomicBool::new(false),
        }
    }

    /// Comes for the `round`th time, from 1, and waits until the other has come as often, or left
    /// for good.
    fn meet(&self, round: u64) {
        self.arrived.fetch_add(1, Ordering::AcqRel);
        let mut spins = 0;
        while self.arrived.load(Ordering::Acquire) < 2 * round && !self.over.load(Ordering::Relaxed)
        {
            spins += 1;
            if spins < SPINS {
                hint::spin_loop();
            } else {
                spins = 0;
                thread::yield_now();
            }
        }
    }
}

/// Says when it is dropped, also by a panic, that its thread does not come to meetings any more.
struct Leaving<'a>(&'a Meeting);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Relaxed);
    }
}
