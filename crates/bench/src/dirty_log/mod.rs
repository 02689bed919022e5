//! `bench dirty-log`: the phases of KVM's `dirty_log_perf_test` (`tools/testing/selftests/kvm`),
//! with one lock around every fault and without it.
//!
//! Two VMs of the soft hypervisor take turns. They differ only in their memory slots: one has
//! [`Serialised`]. Each goes through these phases:
//!
//! 1. *populate*: the vCPUs write a word to every page. No page is mapped yet.
//! 2. *enable*: logging is turned on.
//! 3. *dirty*: the vCPUs write to every page again.
//! 4. *get*: the log is read.
//! 5. *clear*: the log is cleared. Phases 3 to 5 are repeated.
//! 6. *disable*: logging is turned off.
//!
//! Either each vCPU writes its own part of the memory, or each writes all of it. The host has
//! allocated the memory before, so no figure includes time of the host's allocator.

mod logged_vm;

use crate::args::Common;
use crate::row::{Bound, Conditions, Row};
use crate::watched::Serialised;
use crate::{BenchError, rounds};
use logged_vm::{LoggedVm, Times};
use pageferry_harness::size;
use pageferry_hypervisor::Scalable;

/// The repetitions of *dirty*, *get* and *clear* in each round.
const ITERATIONS: u32 = 2;

/// `pageferry-bench dirty-log`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DirtyLogFlags {
    /// Virtual CPUs, with a thread for each
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    vcpus: u32,
    /// Guest memory for each: a whole number and K, M or G (powers of 1024)
    #[arg(long, default_value = "128M", value_name = "SIZE", value_parser = size::parse)]
    memory: u64,
    /// Find dirty pages by the dirty bits of the tables instead of by write protection
    #[arg(long)]
    dirty_bits: bool,
    #[command(flatten)]
    pub(crate) common: Common,
}

/// The pages that each vCPU writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// Each vCPU writes its own part.
    Partitioned,
    /// Each vCPU writes every page.
    Overlapping,
}

impl Pattern {
    /// Both patterns.
    pub(crate) const ALL: [Self; 2] = [Self::Partitioned, Self::Overlapping];
}

/// The phases, in the order of the test.
const PHASES: [&str; 6] = ["populate", "enable", "dirty", "get", "clear", "disable"];

/// Measures both MMUs with both patterns.
///
/// # Errors
/// If the host refuses memory or a thread, or a log does not name exactly the pages that were
/// written.
pub(crate) fn dirty_log(flags: &DirtyLogFlags) -> Result<Vec<Row>, BenchError> {
    let (host, repeat) = (logged_vm::host(flags)?, flags.common.rounds(11, 1));
    let mut rows = Vec::new();
    for pattern in Pattern::ALL {
        let (mut serialised, mut parallel) = (Times::default(), Times::default());
        for round in rounds(repeat, format!("{pattern:?}")) {
            // The MMUs take turns, and each goes first in every other round.
            for turn in [round, round + 1] {
                if turn % 2 == 0 {
                    LoggedVm::<Serialised>::new(&host, flags)?.run(pattern, &mut serialised)?;
                } else {
                    LoggedVm::<Scalable>::new(&host, flags)?.run(pattern, &mut parallel)?;
                }
            }
        }
        rows.extend(rows_of(flags, pattern, &serialised, &parallel));
    }
    Ok(rows)
}

/// The smallest speed-up that counts as "no slower": two runs of the same code differ this much on
/// a shared machine.
const NOISE: f64 = 0.95;

/// Two rows for each phase: with one lock around every fault, and without it. Populating own parts
/// must be 1.7 times as fast, with two vCPUs on two cores. Nothing may be slower.
fn rows_of(
    flags: &DirtyLogFlags,
    pattern: Pattern,
    serialised: &Times,
    parallel: &Times,
) -> Vec<Row> {
    let bytes = u64::from(flags.vcpus) * flags.memory;
    let by = match flags.dirty_bits {
        true => "dirty bits",
        false => "write protection",
    };
    let note = format!("soft engine, 4 KiB pages, host memory touched before; log by {by}");
    let rows = PHASES.into_iter().flat_map(|phase| {
        let case = format!("dirty_log.{phase}");
        let row = |scheme, times: &Times| {
            let subject = format!("{scheme}, {}", format!("{pattern:?}").to_lowercase());
            let how = Conditions::here(flags.vcpus, bytes, note.clone());
            times[phase].row(case.clone(), subject, "ms", how)
        };
        let least = match (pattern, phase) {
            (Pattern::Partitioned, "populate") => 1.7,
            _ => NOISE,
        };
        let serialised = row("serialised", serialised);
        let parallel = row("parallel", parallel)
            .against(serialised.subject.clone(), serialised.value)
            .aiming_at(Bound::RatioAtMost(1.0 / least));
        [serialised, parallel]
    });
    rows.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_is_timed_and_every_log_is_right_with_both_mmus() {
        for dirty_bits in [false, true] {
            let flags = DirtyLogFlags {
                vcpus: 3,
                memory: 200 * 4096,
                dirty_bits,
                common: Common {
                    repeat: Some(2),
                    ..Common::default()
                },
            };
            let rows = dirty_log(&flags).unwrap();
            assert_eq!(rows.len(), 24);
            assert!(rows.iter().all(|row| row.value > 0.0));
            assert_eq!(rows.iter().filter(|row| row.met.is_some()).count(), 12);
            assert_eq!(rows[0].case, "dirty_log.populate");
        }
    }
}
