//! The progress of each vCPU over time, sampled beside the running guest, for the timeline.
//!
//! The sampler reads the vCPUs' control pages through the VMM's mapping, after it has checked that
//! the page is present. It never touches the vCPUs themselves.

use crate::report::ns;
use crate::vm::Vm;
use pageferry_migration::monotonic;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// The first interval between samples.
const INTERVAL: Duration = Duration::from_millis(2);
/// The most numbers kept. At this point every other sample is dropped and the interval doubled.
const MAX_CELLS: usize = 1 << 16;

/// The progress of all vCPUs at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sample {
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub(crate) at_ns: u64,
    /// Pages done since the guest's start, per vCPU; `None` while its control page is missing.
    pub(crate) done: Vec<Option<u64>>,
}

/// The samples so far, and the request to stop.
#[derive(Default)]
struct SampleLog {
    stop: AtomicBool,
    samples: Mutex<Vec<Sample>>,
}

impl SampleLog {
    fn lock(&self) -> MutexGuard<'_, Vec<Sample>> {
        self.samples.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread that samples until it is dropped.
pub(crate) struct Sampler {
    log: Arc<SampleLog>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// Begins to sample `vm` once `ready` holds. Before that, a page of a VM that is being received
    /// may be neither missing nor complete, so the sampler reads none. Linux has no control pages,
    /// so there are no samples of it.
    pub(crate) fn start(vm: &Arc<Vm>, ready: impl Fn() -> bool + Send + 'static) -> Self {
        let log = Arc::<SampleLog>::default();
        if vm.workload().is_none() {
            return Self { log, thread: None };
        }
        let (vm, ours) = (Arc::clone(vm), Arc::clone(&log));
        let thread = std::thread::Builder::new()
            .name("sampler".into())
            .spawn(move || {
                let mut interval = INTERVAL;
                while !ours.stop.load(Ordering::Acquire) {
                    if ready() {
                        let sample = Sample {
                            at_ns: ns(monotonic()),
                            done: vm.controls().iter().map(|c| c.map(|c| c.done)).collect(),
                        };
                        let mut samples = ours.lock();
                        samples.push(sample);
                        if samples.len() * vm.vcpus() as usize > MAX_CELLS {
                            thin(&mut samples);
                            interval *= 2;
                        }
                    }
                    std::thread::park_timeout(interval);
                }
            });
        Self {
            log,
            thread: thread.ok(),
        }
    }

    /// All samples so far.
    pub(crate) fn samples(&self) -> Vec<Sample> {
        self.log.lock().clone()
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.log.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// Drops every other sample.
fn thin(samples: &mut Vec<Sample>) {
    let mut keep = false;
    samples.retain(|_| {
        keep = !keep;
        keep
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinning_keeps_the_first_and_every_other() {
        let mut samples: Vec<Sample> = (0..5)
            .map(|at_ns| Sample {
                at_ns,
                done: vec![],
            })
            .collect();
        thin(&mut samples);
        assert_eq!(
            samples.iter().map(|s| s.at_ns).collect::<Vec<_>>(),
            [0, 2, 4]
        );
    }
}
