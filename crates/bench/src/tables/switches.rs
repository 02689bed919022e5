#![expect(
    unsafe_code,
    reason = "the standard library does not count a thread's context switches"
)]
//! The number of times that the calling thread lost its core to others. It shows the state of the
//! machine, not of the scheme.

use std::mem::MaybeUninit;

/// Involuntary context switches of the calling thread so far (`ru_nivcsw` of getrusage(2)). A
/// thread that waits for a mutex switches voluntarily.
pub(super) fn involuntary() -> i64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is valid for one `rusage`.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) };
    // SAFETY: zeros are a valid `rusage`, even if the call did not fill it.
    unsafe { usage.assume_init() }.ru_nivcsw
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::{Duration, Instant};

    #[test]
    fn sleeping_is_not_losing_the_core_and_being_crowded_out_is() {
        // On a busy machine this thread may lose its core as well, but not during every one of its
        // sleeps.
        let lost = (0..1000).map(|_| {
            let before = involuntary();
            thread::sleep(Duration::from_millis(2));
            involuntary() - before
        });
        assert_eq!(lost.into_iter().find(|&lost| lost == 0), Some(0));
        // More threads than cores run until one of them has lost its core.
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let begun = Instant::now();
        let lost = thread::scope(|scope| {
            let spin = || {
                while involuntary() == 0 && begun.elapsed() < Duration::from_secs(10) {}
                involuntary()
            };
            let threads: Vec<_> = (0..2 * cores).map(|_| scope.spawn(spin)).collect();
            threads
                .into_iter()
                .map(|t| t.join().expect("no panic"))
                .max()
        });
        assert!(lost > Some(0), "ten seconds without a switch");
    }
}
