//! Pins threads to the cores that this process may use.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

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
}
