//! The stages of stalls.
//!
//! **Guarantee.** A stage is recorded only if both its ends were seen for this page and this
//! thread. Otherwise it is left out. No vCPU waits for another thread here.
//!
//! **Mechanism.** [`Marks`] has a slot for each page whose request is under way. The thread that
//! sends a request, and the one that places its answer, write times there. The thread that waited
//! reads them. Two pages may want one slot: the later request takes it, and the earlier page has no
//! stages. A [`Row`] has the buckets of one thread.

use crate::report::{StallRow, StallStage, StallTimes};
use crate::sync::{AtomicU64, Ordering};
use hdrhistogram::Histogram;
use pageferry_addr::RamPage;
use std::time::Duration;

/// The slots of [`Marks`]. Far fewer requests are under way at a time.
const SLOTS: u64 = 1024;
/// The page of a slot that a thread writes.
const LOCKED: u64 = u64::MAX;

/// The times of one request, in nanoseconds of the monotonic clock. 0 is none.
#[derive(Debug, Default)]
struct Mark {
    /// The page + 1, [`LOCKED`], or 0.
    page: AtomicU64,
    sent: AtomicU64,
    read: AtomicU64,
    /// The time at the source, in nanoseconds.
    at_source: AtomicU64,
    placed: AtomicU64,
}

/// A copy of a [`Mark`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Times {
    pub(super) sent: u64,
    pub(super) read: u64,
    pub(super) at_source: u64,
    pub(super) placed: u64,
}

/// The times of the requests under way.
#[derive(Debug)]
pub(super) struct Marks(Box<[Mark]>);

impl Marks {
    pub(super) fn new() -> Self {
        Self((0..SLOTS).map(|_| Mark::default()).collect())
    }

    fn slot(&self, page: RamPage) -> &Mark {
        &self.0[(page.0 % SLOTS) as usize]
    }

    /// Calls `write` with the slot of `page`, unless another page or thread has it.
    fn with(&self, page: RamPage, write: impl FnOnce(&Mark)) {
        let mark = self.slot(page);
        let ours = page.0 + 1;
        let taken = mark
            .page
            .compare_exchange(ours, LOCKED, Ordering::AcqRel, Ordering::Relaxed);
        if taken.is_ok() {
            write(mark);
            mark.page.store(ours, Ordering::Release);
        }
    }

    /// The request for `page` goes to the socket.
    pub(super) fn sent(&self, page: RamPage, now: u64) {
        let mark = self.slot(page);
        let before = mark.page.load(Ordering::Relaxed);
        if before == LOCKED
            || mark
                .page
                .compare_exchange(before, LOCKED, Ordering::AcqRel, Ordering::Relaxed)
                .is_err()
        {
            return;
        }
        mark.sent.store(now, Ordering::Release);
        for time in [&mark.read, &mark.at_source, &mark.placed] {
            time.store(0, Ordering::Release);
        }
        mark.page.store(page.0 + 1, Ordering::Release);
    }

    /// The answer was read at `now`, after `at_source` at the source.
    pub(super) fn read(&self, page: RamPage, now: u64, at_source: Option<Duration>) {
        let at_source = at_source.map_or(0, |time| time.as_nanos() as u64);
        self.with(page, |mark| {
            mark.read.store(now, Ordering::Release);
            mark.at_source.store(at_source, Ordering::Release);
        });
    }

    /// The page is in place. The caller clears its missing bit afterwards, so a thread that finds
    /// the bit clear finds this time.
    pub(super) fn placed(&self, page: RamPage, now: u64) {
        self.with(page, |mark| mark.placed.store(now, Ordering::Release));
    }

    /// The times of `page`, if its slot is still its own.
    pub(super) fn times(&self, page: RamPage) -> Option<Times> {
        let mark = self.slot(page);
        let is_ours = || mark.page.load(Ordering::Acquire) == page.0 + 1;
        if !is_ours() {
            return None;
        }
        let load = |time: &AtomicU64| time.load(Ordering::Acquire);
        let times = Times {
            sent: load(&mark.sent),
            read: load(&mark.read),
            at_source: load(&mark.at_source),
            placed: load(&mark.placed),
        };
        is_ours().then_some(times)
    }
}

/// Each power of two has this many buckets, as a power of two.
const FINE_BITS: u32 = 3;
/// Buckets up to 2^40 ns, about 18 minutes. Longer times count as that.
const BUCKETS: usize = (40 - FINE_BITS as usize + 1) << FINE_BITS;

/// The bucket of a time. Eight for each power of two: a value is exact to 12.5 percent.
fn bucket(ns: u64) -> usize {
    if ns < 1 << FINE_BITS {
        return ns as usize;
    }
    let shift = 63 - ns.leading_zeros() - FINE_BITS;
    let fine = (ns >> shift) as usize & ((1 << FINE_BITS) - 1);
    ((((shift + 1) as usize) << FINE_BITS) + fine).min(BUCKETS - 1)
}

/// The longest time of a bucket.
fn longest(bucket: usize) -> u64 {
    let fine = 1 << FINE_BITS;
    if bucket < fine {
        return bucket as u64;
    }
    let shift = (bucket >> FINE_BITS) - 1;
    (((fine + (bucket & (fine - 1)) + 1) as u64) << shift) - 1
}

/// The times of one kind. One thread at a time writes, any reads.
#[derive(Debug)]
struct Buckets {
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
    max: AtomicU64,
}

impl Buckets {
    fn new() -> Self {
        Self {
            counts: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
            max: AtomicU64::new(0),
        }
    }

    fn record(&self, ns: u64) {
        // There is one writer, so no read-modify-write is needed.
        let add = |to: &AtomicU64, more| {
            to.store(
                to.load(Ordering::Relaxed).wrapping_add(more),
                Ordering::Relaxed,
            );
        };
        add(&self.counts[bucket(ns)], 1);
        add(&self.sum, ns);
        if ns > self.max.load(Ordering::Relaxed) {
            self.max.store(ns, Ordering::Relaxed);
        }
    }

    fn snapshot(&self) -> StallTimes {
        let max = self.max.load(Ordering::Relaxed);
        let mut counts = Histogram::new(3).expect("3 digits are valid");
        for (at, count) in self.counts.iter().enumerate() {
            let count = count.load(Ordering::Relaxed);
            if count > 0 {
                let ns = longest(at).min(max.max(1));
                counts
                    .record_n(ns.max(1), count)
                    .expect("the histogram grows");
            }
        }
        StallTimes {
            counts,
            sum: Duration::from_nanos(self.sum.load(Ordering::Relaxed)),
        }
    }
}

/// The stalls of one vCPU, or those that userfaultfd events opened.
#[derive(Debug)]
pub(super) struct Row {
    whole: Buckets,
    stages: [Buckets; StallStage::ALL.len()],
}

impl Row {
    pub(super) fn new() -> Self {
        Self {
            whole: Buckets::new(),
            stages: std::array::from_fn(|_| Buckets::new()),
        }
    }

    /// Records a stall from `began` to `ended`, and the stages that `times` has. A stage that began
    /// before the stall is left out. Only the row's own thread calls this, or one that excludes
    /// others. `resumed` is the time at which the vCPU's thread goes on, if that thread called.
    pub(super) fn record(
        &self,
        began: u64,
        ended: u64,
        times: Option<Times>,
        resumed: Option<u64>,
    ) {
        self.whole.record(ended.saturating_sub(began));
        let Some(times) = times else {
            return;
        };
        let stage = |stage: StallStage, from: u64, to: u64| {
            if from >= began && to >= from {
                self.stages[stage as usize].record(to - from);
            }
        };
        if times.sent > 0 {
            stage(StallStage::ToSent, began, times.sent);
        }
        if times.read > 0 && times.sent >= began && times.at_source > 0 {
            let trip = times.read.saturating_sub(times.sent);
            stage(StallStage::AtSource, began, began + times.at_source);
            let rest = trip.saturating_sub(times.at_source);
            stage(StallStage::WireAndQueue, began, began + rest);
        }
        if times.read > 0 && times.placed > 0 {
            stage(StallStage::Install, times.read, times.placed);
        }
        if let Some(resumed) = resumed
            && times.placed > 0
        {
            stage(StallStage::Resume, times.placed, resumed);
        }
    }

    pub(super) fn snapshot(&self, vcpu: Option<u32>) -> StallRow {
        StallRow {
            vcpu,
            whole: self.whole.snapshot(),
            stages: std::array::from_fn(|at| self.stages[at].snapshot()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_is_in_its_bucket() {
        let mut last = None;
        for at in 0..BUCKETS {
            assert_eq!(bucket(longest(at)), at);
            assert!(last < Some(longest(at)));
            last = Some(longest(at));
        }
        assert_eq!(longest(BUCKETS - 1), (1 << 40) - 1);
        for ns in [0, 7, 8, 9, 1000, 123_456_789, 1 << 39] {
            let most = longest(bucket(ns));
            assert!(most >= ns && most <= ns + ns / 8, "{ns}: {most}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn the_stages_of_a_stall_add_up_to_it() {
        let (marks, row, page) = (Marks::new(), Row::new(), RamPage(7));
        marks.sent(page, 1100);
        marks.read(page, 1700, Some(Duration::from_nanos(200)));
        marks.placed(page, 1750);
        row.record(1000, 1850, marks.times(page), Some(1850));
        let row = row.snapshot(Some(0));
        assert_eq!(row.whole.sum.as_nanos(), 850);
        let sums = StallStage::ALL.map(|stage| row.stage(stage).sum.as_nanos());
        assert_eq!(sums, [100, 200, 400, 50, 100]);
        assert_eq!(sums.iter().sum::<u128>(), 850);
        assert_eq!(row.whole.counts.max(), 850);
    }

    #[test]
    fn stages_that_were_not_seen_are_left_out() {
        let counts = |began, times, resumed| {
            let row = Row::new();
            row.record(began, 2000, times, resumed);
            let row = row.snapshot(None);
            assert_eq!(row.whole.counts.len(), 1);
            StallStage::ALL.map(|stage| row.stage(stage).counts.len())
        };
        let all = Times {
            sent: 1100,
            read: 1700,
            at_source: 200,
            placed: 1750,
        };
        assert_eq!(counts(1000, None, Some(2000)), [0; 5]);
        assert_eq!(counts(1000, Some(all), None), [1, 1, 1, 1, 0]);
        let untold = Times {
            at_source: 0,
            ..all
        };
        assert_eq!(counts(1000, Some(untold), Some(2000)), [1, 0, 0, 1, 1]);
        // Another vCPU had requested the page before.
        assert_eq!(counts(1200, Some(all), Some(2000)), [0, 0, 0, 1, 1]);
        // The background push brought the page.
        let pushed = Times {
            sent: 1100,
            ..Times::default()
        };
        assert_eq!(counts(1000, Some(pushed), Some(2000)), [1, 0, 0, 0, 0]);
    }

    #[test]
    fn a_slot_belongs_to_the_page_that_took_it_last() {
        let (marks, page) = (Marks::new(), RamPage(5));
        let other = RamPage(5 + SLOTS);
        assert_eq!(marks.times(page), None);
        marks.sent(page, 10);
        marks.sent(other, 20);
        marks.placed(page, 30);
        assert_eq!(marks.times(page), None);
        let times = marks.times(other).unwrap();
        assert_eq!((times.sent, times.placed), (20, 0));
    }
}
