//! Pins threads to the cores that this process may use, and what two cores cost each other.

use crate::kit::{CacheLine, Meeting};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// One set for each usable core, in ascending order. Empty if the kernel refuses the query.
pub(crate) fn each() -> Vec<CpuSet> {
    let Ok(allowed) = sched_getaffinity(None) else {
        return Vec::new();
    };
    let alone = |core| {
        let mut one = CpuSet::new();
        one.set(core);
        one
    };
    (0..CpuSet::MAX_CPU)
        .filter(|&core| allowed.is_set(core))
        .map(alone)
        .collect()
}

/// Pins the calling thread to one core. If the kernel refuses, the scheduler keeps placing it.
pub(crate) fn stay_on(core: &CpuSet) {
    let _ = sched_setaffinity(None, core);
}

/// One core for each of two threads, if this process may use two.
pub(crate) fn two() -> Option<[CpuSet; 2]> {
    each().first_chunk().copied()
}

/// Runs `body` on two threads, each on its own core, which start together. `body` gets the index of
/// its thread. Returns both results.
pub(crate) fn on_two<T: Send>(cores: [CpuSet; 2], body: impl Fn(u32) -> T + Sync) -> [T; 2] {
    let start = Meeting::new(2);
    let run = |index: u32| {
        stay_on(&cores[index as usize]);
        start.meet(1);
        body(index)
    };
    std::thread::scope(|scope| {
        let run = &run;
        let threads = [0, 1].map(|index| scope.spawn(move || run(index)));
        threads.map(|thread| thread.join().expect("measuring threads do not panic"))
    })
}

/// Nanoseconds for one transfer of a cache line with a word that two threads change in turns: the
/// best of some batches. A thread that lost its core for a while says nothing of a cache line.
pub(crate) fn line_transfer_ns(cores: [CpuSet; 2]) -> f64 {
    const TURNS: u32 = 2000;
    const BATCHES: u32 = 20;
    let line = CacheLine::<AtomicU64>::default();
    let [first, _] = on_two(cores, |index| {
        let (mut turn, mut best) = (u64::from(index), f64::INFINITY);
        for _ in 0..BATCHES {
            let began = Instant::now();
            for _ in 0..TURNS {
                wait_until(&line, turn);
                line.store(turn + 1, Ordering::Release);
                turn += 2;
            }
            let ns = began.elapsed().as_nanos() as f64 / f64::from(2 * TURNS);
            best = best.min(ns);
        }
        best
    });
    first
}

fn wait_until(word: &AtomicU64, value: u64) {
    let mut spins = 0_u32;
    while word.load(Ordering::Acquire) != value {
        spins = spins.wrapping_add(1);
        if spins.is_multiple_of(1 << 14) {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stays_where_it_is_put() {
        let cores = each();
        let Some(last) = cores.last().copied() else {
            pageferry_testkit::skip("cores", "the kernel does not say which may be used");
            return;
        };
        let seen = std::thread::spawn(move || {
            stay_on(&last);
            each()
        });
        let seen = seen.join().unwrap();
        assert!(seen == [last] || seen == cores, "{seen:?}");
    }

    #[test]
    fn a_line_takes_some_time_to_another_core() {
        match two() {
            Some(cores) => {
                let line = line_transfer_ns(cores);
                assert!(line > 0.0 && line.is_finite(), "{line}");
            }
            None => {
                pageferry_testkit::skip("cores", "two are needed");
            }
        }
    }
}
