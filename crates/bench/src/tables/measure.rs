//! The measurement of one scheme.

use super::Operation;
use super::scheme::{Parallel, Scheme, Worker};
use super::switches;
use crate::kit::{Meeting, Random};
use crate::schemes::per_operation;
use crate::schemes::{self, Comparison, Subject, Wrong};
use pageferry_addr::{Gfn, GfnRange, Pfn};
use std::hint;
use std::marker::PhantomData;
use std::thread;
use std::time::{Duration, Instant};

/// The inputs of all schemes.
#[derive(Debug)]
pub(super) struct Input {
    /// Pages per thread, a multiple of both chunks.
    pages: u64,
    /// Pages per chunk with one thread, a multiple of a table's.
    chunk: u64,
    /// Pages per chunk with two threads, a multiple of a table's.
    pair_chunk: u64,
    /// Random frames of the first thread's pages, `pages` of them.
    random: Vec<Gfn>,
    /// The cost of reading the clock.
    overhead: Duration,
}

/// The first thread's first frame. It is at 4 GiB, so it shares no tables with addresses below 1
/// GiB.
const FIRST: Gfn = Gfn(1 << 20);
/// The distance from a guest frame to the frame that backs it. It keeps the alignment of 2 MiB
/// pages.
const OFFSET: u64 = 1 << 23;
/// If two threads start a chunk further apart, they did not have a core each.
const APART: Duration = Duration::from_micros(2);

/// The frame that backs `gfn`.
#[inline]
pub(super) const fn frame(gfn: Gfn) -> Pfn {
    Pfn(gfn.0 + OFFSET)
}

/// A sequence of operations that starts with empty tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Maps page by page, looks up, protects by ranges, unmaps by ranges.
    Pages,
    /// Maps by ranges, unmaps page by page.
    Ranges,
    /// Two threads map disjoint pages.
    Partitioned,
    /// Two threads map the same pages.
    Overlapping,
}

impl Comparison for Input {
    type Operation = Operation;
    type Step = Step;
    const STEPS: &'static [Step] = &[
        Step::Pages,
        Step::Ranges,
        Step::Partitioned,
        Step::Overlapping,
    ];
}

type Sample = schemes::Sample<Operation>;
type Sink<'a> = schemes::Sink<'a, Operation>;

/// A scheme that one thread changes at a time.
#[derive(Debug, Default)]
pub(super) struct OneThread<S>(PhantomData<S>);

/// A scheme that several threads change at once.
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
            Step::Pages => input.pages(&mut S::single(), sink),
            Step::Ranges => input.ranges(&mut S::single(), sink),
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
            Step::Pages | Step::Ranges => OneThread::<S>(PhantomData).measure(step, input, sink),
            Step::Partitioned => {
                let firsts = [FIRST, Gfn(FIRST.0 + input.pages)];
                input.two::<S>(Operation::MapPartitioned, firsts, sink)
            }
            Step::Overlapping => input.two::<S>(Operation::MapOverlapping, [FIRST, FIRST], sink),
        }
    }
}

impl Input {
    /// The inputs for `pages` pages per thread, in chunks of `chunk` pages, or of `pair_chunk` with
    /// two threads.
    pub(super) fn new(pages: u64, chunk: u64, pair_chunk: u64) -> Self {
        let mut random = Random::new(3);
        Self {
            pages,
            chunk,
            pair_chunk,
            random: (0..pages)
                .map(|_| Gfn(FIRST.0 + random.below(pages)))
                .collect(),
            overhead: schemes::clock_overhead(),
        }
    }

    /// The pages from `first` on, in chunks.
    fn chunks(&self, first: Gfn, chunk: u64) -> impl Iterator<Item = GfnRange> + use<> {
        (0..self.pages / chunk).map(move |n| {
            let start = Gfn(first.0 + n * chunk);
            GfnRange::new(start, chunk).expect("pages within the address space")
        })
    }

    /// Nanoseconds per page of a chunk.
    fn cost(&self, spent: Duration, chunk: u64) -> f64 {
        per_operation(spent, self.overhead, chunk as usize)
    }

    /// Times `work` on each chunk.
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

    /// Maps page by page with two threads, each from its own first frame. The threads start each
    /// chunk together.
    fn two<S: Parallel>(
        &self,
        operation: Operation,
        firsts: [Gfn; 2],
        sink: Sink<'_>,
    ) -> Result<(), Wrong> {
        let tables = S::tables();
        let meeting = Meeting::new(2);
        let go_over = |first: Gfn| {
            let _leaving = meeting.leaving();
            let mut worker = S::worker(&tables);
            let chunks = self.pages / self.pair_chunk;
            let mut times = Vec::with_capacity(chunks as usize);
            for (round, range) in (1..).zip(self.chunks(first, self.pair_chunk)) {
                meeting.meet(round);
                times.push(Timed::of(|| {
                    map_each(&mut worker, range);
                }));
            }
            // The threads end together, so that neither frees tables during the other's last chunk.
            meeting.meet(chunks as usize + 1);
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

/// The time of some work.
#[derive(Debug)]
struct Timed {
    start: Instant,
    spent: Duration,
    /// Whether the thread lost its core meanwhile.
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

/// Maps all pages of `range` one by one. It is not inlined, so that one thread and two threads run
/// the same instructions. The compiler would make loops of different speed of two inlined copies.
#[inline(never)]
fn map_each<W: Worker>(worker: &mut W, range: GfnRange) {
    range.iter().for_each(|gfn| worker.map(gfn, frame(gfn)));
}

#[inline]
fn is_mapped<W: Worker>(worker: &mut W, gfn: Gfn) -> bool {
    // The whole translation must be computed, as for a TLB fill.
    let found = hint::black_box(worker.find(gfn));
    found.is_some_and(|found| found.pfn == frame(gfn))
}
