//! The phases of KVM's `dirty_log_perf_test` (`tools/testing/selftests/kvm`), with one lock and
//! without.
//!
//! Two VMs of the soft hypervisor, alike but for [`Serialised`], go through the same phases in
//! turns: vCPUs write a word of every page of memory that is not mapped yet (*populate*); logging
//! is turned on (*enable*); the vCPUs write every page again (*dirty*); the log is fetched (*get*)
//! and cleared (*clear*); the last three once more and more; logging is turned off (*disable*).
//! Each vCPU has its own part of the memory, or all write all of it. The memory behind the slot is
//! there before, so no time of the host's is in it.

mod logged_vm;
mod report;

pub use pageferry_hypervisor::DirtyBy;
pub use report::{Cell, Report, Verdict};

use crate::BenchError;
use crate::serialised::Serialised;
use logged_vm::{LoggedVm, Times};
use pageferry_hypervisor::Scalable;
use serde::Serialize;

/// What is to be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// How many vCPUs, each with a thread.
    pub vcpus: u32,
    /// How many pages of 4 KiB there are for each.
    pub pages: u64,
    /// How often memory is dirtied and the log read, in each round.
    pub iterations: u32,
    /// How often everything is done, with each MMU.
    pub rounds: u32,
    /// How the log knows.
    pub dirty_by: DirtyBy,
}

impl Default for Config {
    /// Two vCPUs with 128 MiB each.
    fn default() -> Self {
        Self {
            vcpus: 2,
            pages: 32_768,
            iterations: 2,
            rounds: 11,
            dirty_by: DirtyBy::WriteProtection,
        }
    }
}

/// Who writes which page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Each vCPU its own part.
    Partitioned,
    /// Every vCPU every page.
    Overlapping,
}

impl Pattern {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Partitioned, Self::Overlapping];
}

/// A phase of the test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The first write to every page.
    Populate,
    /// Turning the log on.
    Enable,
    /// A write to every page, logged.
    Dirty,
    /// Fetching the log.
    Get,
    /// Clearing it, which protects the pages.
    Clear,
    /// Turning the log off.
    Disable,
}

impl Phase {
    /// In the order of the test.
    pub const ALL: [Self; 6] = [
        Self::Populate,
        Self::Enable,
        Self::Dirty,
        Self::Get,
        Self::Clear,
        Self::Disable,
    ];
}

/// Measures.
///
/// # Errors
/// If there is no memory or thread to be had, or a log did not name exactly the pages that were
/// written.
pub fn run(config: Config, progress: &mut dyn FnMut(&str)) -> Result<Report, BenchError> {
    let host = logged_vm::host(&config)?;
    let mut report = Report::new(config);
    for pattern in Pattern::ALL {
        let (mut serialised, mut parallel) = (Times::default(), Times::default());
        for round in 0..config.rounds {
            progress(&format!(
                "{pattern:?}, round {} of {}",
                round + 1,
                config.rounds
            ));
            // In turns, and each first as often as the other.
            for turn in [round, round + 1] {
                if turn % 2 == 0 {
                    LoggedVm::<Serialised>::new(&host, config)?.run(pattern, &mut serialised)?;
                } else {
                    LoggedVm::<Scalable>::new(&host, config)?.run(pattern, &mut parallel)?;
                }
            }
        }
        report.add(pattern, &serialised, &parallel);
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_is_timed_and_every_log_is_right_with_both_mmus() {
        for dirty_by in [DirtyBy::WriteProtection, DirtyBy::Bits] {
            let config = Config {
                vcpus: 3,
                pages: 200,
                iterations: 2,
                rounds: 2,
                dirty_by,
            };
            let report = run(config, &mut |_| {}).unwrap();
            assert_eq!(report.cells.len(), 12);
            for cell in &report.cells {
                assert!(cell.serialised_ms.median > 0.0 && cell.parallel_ms.median > 0.0);
            }
            assert!(report.verdicts.len() == 12);
            assert!(report.to_string().contains("populate"));
        }
    }
}
