//! What a run found: a figure for each phase, with both MMUs, and what of it was asked for.

use super::logged_vm::Times;
use super::{Config, Pattern, Phase};
use crate::Conditions;
use crate::kit::Figure;
use pageferry_hypervisor::DirtyBy;
use serde::Serialize;
use std::fmt;

/// One phase with one pattern.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// Who wrote which page.
    pub pattern: Pattern,
    /// Which phase.
    pub phase: Phase,
    /// With one lock around every fault and sweep.
    pub serialised_ms: Figure,
    /// With the parallel MMU.
    pub parallel_ms: Figure,
    /// How many times as fast the parallel one is, by medians.
    pub speedup: f64,
}

/// A bound that was to be reached.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// What it is a bound of.
    pub name: String,
    /// The least speed-up that holds.
    pub at_least: f64,
    /// The speed-up.
    pub speedup: f64,
    /// Whether it holds.
    pub holds: bool,
}

/// All of it.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Pattern by pattern, in the order of the phases.
    pub cells: Vec<Cell>,
    /// What was asked for of each.
    pub verdicts: Vec<Verdict>,
    /// How the log knew of writes: `write_protection` or `dirty_bits`.
    pub dirty_by: &'static str,
    /// What it was measured on.
    pub conditions: Conditions,
}

/// As much slower counts as no slower: what two runs of the same differ by on a shared machine.
const NOISE: f64 = 0.95;

impl Report {
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

/// What is asked for: populating own parts 1.7 times as fast, with two vCPUs on two cores; nothing
/// slower.
fn verdict(cell: &Cell) -> Verdict {
    let at_least = match (cell.pattern, cell.phase) {
        (Pattern::Partitioned, Phase::Populate) => 1.7,
        _ => NOISE,
    };
    Verdict {
        name: format!("{} {}", name(&cell.pattern), name(&cell.phase)),
        at_least,
        speedup: cell.speedup,
        holds: cell.speedup >= at_least,
    }
}

/// As in JSON.
fn name(value: &impl fmt::Debug) -> String {
    format!("{value:?}").to_lowercase()
}

impl fmt::Display for Report {
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
                "MISSED: {} is {:.2}x as fast, {:.2}x was asked for",
                verdict.name, verdict.speedup, verdict.at_least
            )?;
        }
        Ok(())
    }
}
