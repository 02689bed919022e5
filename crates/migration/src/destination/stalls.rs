//! Records of vCPU stalls. No two vCPUs share a lock for them.

use super::stages::{Marks, Row};
use crate::clock::monotonic_ns;
use crate::report::{DestinationReport, FaultRecord, StallRow};
use crate::sync::{AtomicU64, Ordering};
use hdrhistogram::Histogram;
use pageferry_addr::RamPage;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The longest recorded stall: 1000 s, in nanoseconds. Longer stalls count as this.
const MAX_STALL_NS: u64 = 1_000_000_000_000;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns an empty histogram of stalls in nanoseconds, with three significant digits.
///
/// # Panics
/// Never: the bounds are valid.
#[must_use]
pub fn new_histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, MAX_STALL_NS, 3).expect("1 to 10^12 with 3 digits is valid")
}

#[derive(Debug)]
struct StallRecords {
    stalls: Histogram<u64>,
    faults: Vec<FaultRecord>,
    limit: usize,
}

impl StallRecords {
    fn add(&mut self, record: FaultRecord) {
        self.stalls
            .saturating_record((record.stall.as_nanos() as u64).max(1));
        if self.faults.len() < self.limit {
            self.faults.push(record);
        }
    }
}

/// The stalls of one migration.
#[derive(Debug)]
pub(crate) struct Stalls {
    /// One for each vCPU, which only its thread locks before the end, and a last one for
    /// userfaultfd events.
    records: Vec<Mutex<StallRecords>>,
    /// The same stalls with their stages, for readers that take no lock.
    rows: Vec<Row>,
    /// The times of the requests under way.
    pub(super) marks: Marks,
    /// Open faults of userfaultfd events, which an arrival will close: page -> start time.
    open: Mutex<HashMap<u64, u64>>,
    /// The number of open faults. Arrivals take no lock while it is 0.
    open_count: AtomicU64,
    first: Mutex<Vec<FaultRecord>>,
    first_left: AtomicU64,
    local: AtomicU64,
}

impl Stalls {
    pub(crate) fn new(vcpus: usize) -> Self {
        let limit = DestinationReport::MAX_FAULT_RECORDS / (vcpus + 1);
        let new_records = || {
            Mutex::new(StallRecords {
                stalls: new_histogram(),
                faults: Vec::new(),
                limit,
            })
        };
        Self {
            records: (0..=vcpus).map(|_| new_records()).collect(),
            rows: (0..=vcpus).map(|_| Row::new()).collect(),
            marks: Marks::new(),
            open: Mutex::default(),
            open_count: AtomicU64::new(0),
            first: Mutex::default(),
            first_left: AtomicU64::new(DestinationReport::MAX_FIRST_FAULTS as u64),
            local: AtomicU64::new(0),
        }
    }

    /// Records a fault of any kind if it is one of the first.
    pub(crate) fn note_first(&self, at_ns: u64, page: RamPage, vcpu: Option<u32>) {
        if self.first_left.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut first = lock(&self.first);
        if first.len() < DestinationReport::MAX_FIRST_FAULTS {
            first.push(FaultRecord {
                at: Duration::from_nanos(at_ns),
                stall: Duration::ZERO,
                page,
                vcpu,
            });
            let left = DestinationReport::MAX_FIRST_FAULTS - first.len();
            self.first_left.store(left as u64, Ordering::Relaxed);
        }
    }

    /// Counts a fault on a present, unmapped page.
    pub(crate) fn local(&self) {
        self.local.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that a vCPU waited for `page` from `at_ns` until now.
    pub(crate) fn vcpu_waited(&self, vcpu: u32, page: RamPage, at_ns: u64) {
        let now = monotonic_ns();
        let times = self.marks.times(page);
        self.rows[vcpu as usize].record(at_ns, now, times, Some(now));
        lock(&self.records[vcpu as usize]).add(FaultRecord {
            at: Duration::from_nanos(at_ns),
            stall: Duration::from_nanos(now.saturating_sub(at_ns)),
            page,
            vcpu: Some(vcpu),
        });
    }

    /// Opens a fault: a thread sleeps in the kernel until `page` arrives. Call this before testing
    /// the missing bit. Returns `false` if a fault on the page is open already.
    pub(crate) fn open(&self, page: RamPage, at_ns: u64) -> bool {
        let mut open = lock(&self.open);
        let before = open.len();
        open.entry(page.0).or_insert(at_ns);
        self.open_count.store(open.len() as u64, Ordering::SeqCst);
        open.len() > before
    }

    /// Closes the open faults of `pages` pages from `first`, which are present now.
    pub(crate) fn close(&self, first: RamPage, pages: u64) {
        if self.open_count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let now = monotonic_ns();
        let mut open = lock(&self.open);
        for page in first.0..first.0 + pages {
            if let Some(at_ns) = open.remove(&page) {
                let last = self.records.len() - 1;
                // Of a huge page only the whole stall is known. Nobody here sees the vCPU go on.
                let times = (pages == 1).then(|| self.marks.times(RamPage(page)));
                self.rows[last].record(at_ns, now, times.flatten(), None);
                lock(&self.records[last]).add(FaultRecord {
                    at: Duration::from_nanos(at_ns),
                    stall: Duration::from_nanos(now.saturating_sub(at_ns)),
                    page: RamPage(page),
                    vcpu: None,
                });
            }
        }
        self.open_count.store(open.len() as u64, Ordering::SeqCst);
    }

    /// Whether any fault is open.
    pub(crate) fn any_open(&self) -> bool {
        self.open_count.load(Ordering::SeqCst) != 0
    }

    /// Drops a fault that this thread has opened, and whose page was present already.
    pub(crate) fn cancel(&self, page: RamPage) {
        let mut open = lock(&self.open);
        open.remove(&page.0);
        self.open_count.store(open.len() as u64, Ordering::SeqCst);
    }

    /// The stalls so far: a row for each vCPU, and one for userfaultfd events. Takes no lock.
    pub(crate) fn rows(&self) -> Vec<StallRow> {
        let events = self.rows.len() - 1;
        let vcpu = |at: usize| (at < events).then_some(at as u32);
        let rows = self.rows.iter().enumerate();
        rows.map(|(at, row)| row.snapshot(vcpu(at))).collect()
    }

    /// Returns the histogram, the records, the first faults and the number of local faults.
    pub(crate) fn collect(&self) -> (Histogram<u64>, Vec<FaultRecord>, Vec<FaultRecord>, u64) {
        let mut stalls = new_histogram();
        let mut faults = Vec::new();
        for of_thread in &self.records {
            let of_thread = lock(of_thread);
            stalls
                .add(&of_thread.stalls)
                .expect("both have the same bounds");
            faults.extend_from_slice(&of_thread.faults);
        }
        faults.sort_unstable_by_key(|f| f.at);
        (
            stalls,
            faults,
            lock(&self.first).clone(),
            self.local.load(Ordering::Relaxed),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_event_of_a_page_opens_no_second_fault() {
        let stalls = Stalls::new(1);
        let (page, other) = (RamPage(7), RamPage(8));
        assert!(stalls.open(page, 1));
        assert!(!stalls.open(page, 2), "another thread has opened it");
        assert!(stalls.open(other, 3));
        stalls.cancel(other);
        assert!(stalls.any_open());
        stalls.close(RamPage(0), 16);
        assert!(!stalls.any_open());
        let (histogram, faults, ..) = stalls.collect();
        assert_eq!(histogram.len(), 1);
        assert_eq!(
            (faults[0].page, faults[0].at),
            (page, Duration::from_nanos(1))
        );
    }
}
