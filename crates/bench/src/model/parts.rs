//! The times of a fault's parts on this host: the inputs of the model.
//!
//! The parts of a fault alone are measured with one vCPU on the soft engine, by a clock around its
//! work ([`crate::demand_paging`]). The costs that two vCPUs cause each other are measured by two
//! threads on two cores. Of repeated batches the fastest counts: a thread that lost its core for a
//! while gives no information about a cache line.

use crate::demand_paging::{HostRam, Plan, Scheme, clocked_touch, exit_and_entry, soft_touch};
use crate::kit::TicketLock;
use crate::watched::FaultTimes;
use crate::{BenchError, Samples, cores};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_userfault::PageBitmap;
use rustix::thread::CpuSet;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The measured times, in nanoseconds, with a sample for each round.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parts {
    /// The guest's own instructions per page, its TLB and the touch: all of a touch except the
    /// fault.
    pub(super) guest: Samples,
    /// The look-up of the memory slot, outside the lock.
    pub(super) lookup: Samples,
    /// A fault that maps its page, after the look-up: the walk and the change of the tables, under
    /// the lock.
    pub(super) map: Samples,
    /// A fault that finds its page missing, after the look-up: the walk and the test of the bit,
    /// under the lock.
    pub(super) missing: Samples,
    /// Leaving and entering the guest.
    pub(super) exit: Samples,
    /// Copying 4 KiB into a page and clearing its bit.
    pub(super) copy: Samples,
    /// Taking and releasing the exclusive lock without contention.
    pub(super) lock: Samples,
    /// Handing the contended lock over to another core.
    pub(super) handover: Samples,
    /// Moving a cache line to another core.
    pub(super) line: Samples,
}

/// The guests, and their host memory.
pub(super) struct Guests {
    pub(super) host: Arc<HostRam>,
    /// The plans for one vCPU and for two.
    pub(super) plans: [Plan; 2],
}

impl Parts {
    /// Adds a sample of each part.
    pub(super) fn round(&mut self, on: &Guests) -> Result<(), BenchError> {
        let [one, _] = &on.plans;
        let clock = clock_ns();
        let present = clocked_touch(&on.host, one, false)?;
        let missing = clocked_touch(&on.host, one, true)?;
        let of = |faults: &[FaultTimes], which: fn(&FaultTimes) -> Option<u32>| {
            (usual(faults.iter().filter_map(which)) - clock).max(0.0)
        };
        let lookup = of(&present, |fault| Some(fault.lookup));
        let map = of(&present, |fault| Some(fault.rest));
        let test = of(&missing, |fault| fault.missing.then_some(fault.rest));
        let touch = soft_touch(&on.host, one, Scheme::Parallel, None)?;
        let all = touch.whole.as_nanos() as f64 / one.touches() as f64;
        // If the timed parts exceed the whole, the fault was all of it.
        self.guest.push((all - lookup - map).max(0.0));
        self.lookup.push(lookup);
        self.map.push(map);
        self.missing.push(test);
        self.exit.push(exit_and_entry(&on.host, one, 20_000)?);
        self.copy.push(copy_ns(&on.host, one));
        self.lock.push(lock_ns());
        let cores = cores::two().ok_or_else(|| {
            let why = "the model needs two cores to measure how two vCPUs delay each other";
            BenchError::Setting(why.into())
        })?;
        self.handover.push(handover_ns(cores)?);
        self.line.push(cores::line_transfer_ns(cores));
        Ok(())
    }

    /// The inputs with their cases, in the order of the table.
    pub(super) fn inputs(&self) -> [(&'static str, &Samples); 9] {
        [
            ("model.guest", &self.guest),
            ("model.lookup", &self.lookup),
            ("model.map", &self.map),
            ("model.missing", &self.missing),
            ("model.exit", &self.exit),
            ("model.copy", &self.copy),
            ("model.lock", &self.lock),
            ("model.handover", &self.handover),
            ("model.line", &self.line),
        ]
    }
}

/// The mean of the times up to 100 times the median. During longer ones the thread was not running.
fn usual(times: impl Iterator<Item = u32>) -> f64 {
    let mut times: Vec<u32> = times.collect();
    times.sort_unstable();
    let Some(median) = times.get(times.len() / 2) else {
        return 0.0;
    };
    let limit = median.saturating_mul(100).max(1);
    let kept = &times[..times.partition_point(|&time| time <= limit)];
    kept.iter().map(|&time| f64::from(time)).sum::<f64>() / kept.len() as f64
}

/// The time that two readings of the clock add between them.
fn clock_ns() -> f64 {
    let pair = || {
        let first = Instant::now();
        Instant::now().duration_since(first).as_nanos()
    };
    usual((0..10_000).map(|_| u32::try_from(pair()).unwrap_or(u32::MAX)))
}

fn per_operation(began: Instant, operations: u32) -> f64 {
    began.elapsed().as_nanos() as f64 / f64::from(operations)
}

/// Nanoseconds to install a page. It copies into each touched page once, as a vCPU does.
fn copy_ns(host: &HostRam, plan: &Plan) -> f64 {
    let bytes = [0x5a; PAGE_SIZE as usize];
    let missing = PageBitmap::new(plan.touched.end as usize);
    missing.set_range(plan.touched.start as usize..plan.touched.end as usize);
    let began = Instant::now();
    for page in plan.touched.clone() {
        host.placing().write(RamPage(page), black_box(&bytes));
        missing.clear(RamPage(page));
    }
    let pages = plan.touched.end - plan.touched.start;
    began.elapsed().as_nanos() as f64 / pages as f64
}

const OPERATIONS: u32 = 2000;
const BATCHES: u32 = 20;
/// The time limit for two threads to contend for a lock.
const MEETING: Duration = Duration::from_secs(5);

/// Nanoseconds to take and release a lock that nobody else wants: the best of some batches.
fn lock_ns() -> f64 {
    let lock = TicketLock::default();
    let batch = |_| {
        let began = Instant::now();
        for _ in 0..OPERATIONS {
            drop(black_box(&lock).lock());
        }
        per_operation(began, OPERATIONS)
    };
    (0..BATCHES).map(batch).fold(f64::INFINITY, f64::min)
}

/// Nanoseconds for one hand-over between two threads that always want the lock. The lock protects
/// nothing, so only its own lines move. A batch does not count if one thread took the lock twice in
/// a row too often: then the other thread was not running.
///
/// # Errors
/// If no batch counts.
fn handover_ns(cores: [CpuSet; 2]) -> Result<f64, BenchError> {
    let lock = TicketLock::default();
    // Both take the lock until one of them has enough batches. On a busy host they may run one
    // after the other for a while.
    let (done, deadline) = (AtomicU32::new(0), Instant::now() + MEETING);
    let best = cores::on_two(cores, |_| {
        let (mut best, mut counted) = (f64::INFINITY, 0);
        while counted < BATCHES && done.load(Ordering::Relaxed) == 0 && Instant::now() < deadline {
            let (began, mut changes, mut last) = (Instant::now(), 0, 0_u32);
            for _ in 0..OPERATIONS {
                let ticket = lock.lock().ticket();
                // The other thread had the lock once in between.
                changes += u32::from(ticket.wrapping_sub(last) == 2);
                last = ticket;
            }
            // Each change is two hand-overs.
            if changes >= OPERATIONS * 9 / 10 {
                best = f64::min(best, per_operation(began, 2 * changes));
                counted += 1;
            }
        }
        done.store(1, Ordering::Relaxed);
        best
    });
    let [first, second] = best;
    let best = f64::min(first, second);
    if best.is_finite() {
        Ok(best)
    } else {
        Err(BenchError::Busy(
            "two threads never contended for a lock".into(),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_testkit::skip;

    #[test]
    fn times_in_which_a_thread_did_not_run_are_left_out() {
        assert_eq!(usual([10, 20, 30, 4_000_000].into_iter()), 20.0);
        assert_eq!(usual([10, 10, 900].into_iter()), 920.0 / 3.0);
        assert_eq!(usual([].into_iter()), 0.0);
    }

    #[test]
    fn locks_take_time() {
        assert!(lock_ns() > 0.0);
        let Some(cores) = cores::two() else {
            skip("cores", "two are needed");
            return;
        };
        match handover_ns(cores) {
            Ok(handover) => {
                assert!(handover > 0.0 && handover.is_finite(), "{handover}");
            }
            Err(BenchError::Busy(why)) => {
                skip("cores", why);
            }
            Err(why) => panic!("{why}"),
        }
    }
}
