//! The cost of a served VM so far: counts, and the times of its faults.

use crate::timeline::{Came, Timeline};
use hdrhistogram::Histogram;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The counts of a VM. Each is plain: nothing is read because of it.
#[derive(Debug)]
pub(crate) struct Figures {
    /// Times of faults in nanoseconds, by the first kinds of [`Came`].
    times: [Mutex<Histogram<u64>>; 3],
    pub(crate) timeline: Arc<Timeline>,
    /// Pages placed because a neighbour was touched.
    pub(crate) neighbours: Count,
    /// Pages placed because of a recording.
    pub(crate) replayed: Count,
    /// Pages placed in the background.
    pub(crate) background: Count,
    /// Pages placed as zeros.
    pub(crate) zeros: Count,
    /// Pages that the VM gave back.
    pub(crate) given_back: Count,
    /// Calls that the kernel refused until a removal was read (EAGAIN).
    pub(crate) repeated: Count,
    /// Failed reads of the source.
    pub(crate) source_errors: Count,
}

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Figures {
    pub(crate) fn new() -> Self {
        // 2 significant digits: 1 % is closer than any two runs are.
        let histogram = || Mutex::new(Histogram::new(2).expect("2 digits are allowed"));
        Self {
            times: [histogram(), histogram(), histogram()],
            timeline: Arc::new(Timeline::new()),
            neighbours: Count::default(),
            replayed: Count::default(),
            background: Count::default(),
            zeros: Count::default(),
            given_back: Count::default(),
            repeated: Count::default(),
            source_errors: Count::default(),
        }
    }

    /// A fault was answered after this time.
    pub(crate) fn answered(&self, way: Came, took: Duration) {
        self.timeline.add(way, 1);
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let mut times = self.times(way);
        // An automatic histogram has no largest value, but for its memory.
        let _ = times.record(nanoseconds);
    }

    /// A recording brought pages.
    pub(crate) fn replayed(&self, pages: u64) {
        self.replayed.add(pages);
        self.timeline.add(Came::Replayed, pages);
    }

    /// Pages came in the background.
    pub(crate) fn loaded(&self, pages: u64) {
        self.background.add(pages);
        self.timeline.add(Came::Background, pages);
    }

    pub(crate) fn times(&self, way: Came) -> std::sync::MutexGuard<'_, Histogram<u64>> {
        let times = &self.times[way as usize];
        times.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
