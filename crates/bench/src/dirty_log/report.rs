//! The results of a run: a figure for each phase with both MMUs, and the verdicts.

use super::logged_vm::Times;
use super::{Config, Pattern, Phase};
use crate::Conditions;
use crate::kit::Figure;
use pageferry_hypervisor::DirtyBy;
use serde::Serialize;
use std::fmt;

/// The figures of one phase with one pattern.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Cell {
    /// The pages that each vCPU wrote.
    pub(crate) pattern: Pattern,
    /// The phase.
    pub(crate) phase: Phase,
    /// Milliseconds with one lock around every fault and sweep.
    pub(crate) serialised_ms: Figure,
    /// Milliseconds with the parallel MMU.
    pub(crate) parallel_ms: Figure,
    /// The median of `serialised_ms` divided by that of `parallel_ms`. Above 1: the parallel MMU is
    /// faster.
    pub(crate) speedup: f64,
}

/// A lower bound on a speed-up, and whether the run met it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct SpeedupVerdict {
    /// Pattern and phase.
    pub(crate) name: String,
    /// The smallest speed-up that meets the bound.
    pub(crate) at_least: f64,
    /// The speed-up of this run.
    pub(crate) speedup: f64,
    /// Whether `speedup` is at least `at_least`.
    pub(crate) holds: bool,
}

/// The results of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DirtyLogReport {
    /// The figures, by pattern and then in the order of the phases.
    pub(crate) cells: Vec<Cell>,
    /// A verdict for each of `cells`.
    pub(crate) verdicts: Vec<SpeedupVerdict>,
    /// The way the log learned of writes: `write_protection` or `dirty_bits`.
    pub(crate) dirty_by: &'static str,
    /// The conditions of the run.
    pub(crate) conditions: Conditions,
}

/// The smallest speed-up that counts as "no slower": two runs of the same code differ this much on
/// a shared machine.
const NOISE: f64 = 0.95;

impl DirtyLogReport {
    pub(super) fn new(config: Config) -> Self {
        let bytes = u64::from(config.vcpus) * config.pages * pageferry_addr::PAGE_SIZE;
        let note = "soft engine, 4 KiB pages, host memory touched before".to_owned();
        Self {
            cells: Vec::new(),
            verdicts: Vec::new(),
            dirty_by: match config.dirty_by {
                DirtyBy::WriteProtection => "write_protection",
                DirtyBy::Bits => "dirty_bits",
            },
            conditions: Conditions::here(config.vcpus, bytes, note),
        }
    }

    pub(super) fn add(&mut self, pattern: Pattern, serialised: &Times, parallel: &Times) {
        for phase in Phase::ALL {
            let serialised_ms = Figure::of(serialised.of(phase));
            let parallel_ms = Figure::of(parallel.of(phase));
            let cell = Cell {
                pattern,
                phase,
                speedup: serialised_ms.median / parallel_ms.median,
                serialised_ms,
                parallel_ms,
            };
            self.verdicts.push(verdict(&cell));
            self.cells.push(cell);
        }
    }
}

/// Populating own parts must be 1.7 times as fast, with two vCPUs on two cores. Nothing may be
/// slower.
fn verdict(cell: &Cell) -> SpeedupVerdict {
    let at_least = match (cell.pattern, cell.phase) {
        (Pattern::Partitioned, Phase::Populate) => 1.7,
        _ => NOISE,
    };
    SpeedupVerdict {
        name: format!("{} {}", name(&cell.pattern), name(&cell.phase)),
        at_least,
        speedup: cell.speedup,
        holds: cell.speedup >= at_least,
    }
}

/// The name in JSON.
fn name(value: &impl fmt::Debug) -> String {
    format!("{value:?}").to_lowercase()
}

impl fmt::Display for DirtyLogReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} vCPUs, {} MiB, log by {}; medians in ms (smallest to largest)",
            self.conditions.vcpus,
            self.conditions.memory_bytes >> 20,
            self.dirty_by.replace('_', " "),
        )?;
        writeln!(
            f,
            "{:<12} {:<9} {:>26} {:>26} {:>8}",
            "pattern", "phase", "serialised", "parallel", "faster"
        )?;
        let figure = |ms: &Figure| format!("{:.3} ({:.3} to {:.3})", ms.median, ms.min, ms.max);
        for cell in &self.cells {
            writeln!(
                f,
                "{:<12} {:<9} {:>26} {:>26} {:>7.2}x",
                name(&cell.pattern),
                name(&cell.phase),
                figure(&cell.serialised_ms),
                figure(&cell.parallel_ms),
                cell.speedup,
            )?;
        }
        for verdict in self.verdicts.iter().filter(|v| !v.holds) {
            writeln!(
                f,
                "MISSED: {} is {:.2}x as fast (at least {:.2}x)",
                verdict.name, verdict.speedup, verdict.at_least
            )?;
        }
        Ok(())
    }
}
