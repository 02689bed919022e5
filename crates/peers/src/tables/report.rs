//! What a run found: figures, and whether they reach what is asked of the second-stage tables.

use super::Operation;
use super::bounds;
use super::scheme::{Scheme, Tdp};
use super::stage::Sample;
use crate::verdict::Verdict;
use serde::Serialize;
use std::fmt::{self, Write};
use std::time::Duration;

/// One figure. The names of the keys are stable.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// What was measured.
    pub operation: Operation,
    /// Of which scheme.
    pub scheme: &'static str,
    /// The median, in nanoseconds a page; with two threads, each thread's own.
    pub value: f64,
    /// The mean, which also has what few chunks bear for all.
    pub mean: f64,
    /// The unit of both: `ns`.
    pub unit: &'static str,
    /// The smallest sample.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// How many samples the median is of; a sample is itself the mean of a chunk of pages.
    pub samples: usize,
    /// How many more were left out, since a thread lost its core to another process meanwhile, or the two did not begin
    /// together. Where all samples with one thread are like that, none is left out.
    pub left_out: usize,
    /// TLB flushes that were asked for, a page. Flushing is but counted here, whatever it would cost.
    pub flushes: f64,
}

impl Figure {
    /// The figure of `samples`; none where none is fit for it.
    pub(super) fn of(
        operation: Operation,
        scheme: &'static str,
        samples: &[Sample],
    ) -> Option<Self> {
        let alone = operation.threads() == 1 && samples.iter().all(|sample| sample.disturbed);
        let fit = samples.iter().filter(|sample| alone || !sample.disturbed);
        let mut costs: Vec<f64> = fit.map(|sample| sample.cost).collect();
        costs.sort_unstable_by(f64::total_cmp);
        let flushes: f64 = samples.iter().map(|sample| sample.flushes).sum();
        Some(Self {
            operation,
            scheme,
            value: *costs.get(costs.len() / 2)?,
            mean: costs.iter().sum::<f64>() / costs.len() as f64,
            unit: "ns",
            min: *costs.first()?,
            max: *costs.last()?,
            samples: costs.len(),
            left_out: samples.len() - costs.len(),
            flushes: flushes / samples.len() as f64,
        })
    }
}

/// A scheme that was not measured, and what is known of it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Absent {
    /// Which one.
    pub scheme: &'static str,
    /// Why it is not here.
    pub why: &'static str,
    /// Figures of another run, on a machine of the kind this project is developed on.
    pub elsewhere: &'static [(Operation, f64)],
    /// Where they are from.
    pub source: &'static str,
}

impl Absent {
    /// What is known of `operation`.
    #[must_use]
    pub fn value(&self, operation: Operation) -> Option<f64> {
        let known = self.elsewhere.iter().find(|(o, _)| *o == operation);
        known.map(|(_, value)| *value)
    }
}

/// What is not built.
///
/// ostd 0.19 declares its dependencies (acpi, x86, multiboot2, ...) for `x86_64-unknown-none` and other bare-metal targets
/// alone, so for a host's target it does not compile; it needs a nightly compiler; and `ostd::mm::page_table`
/// is private to the crate, reached through the address spaces of a booted kernel only.
pub const NOT_BUILT: [Absent; 1] = [Absent {
    scheme: "asterinas ostd",
    why: "ostd 0.19 (CortenMM) compiles for bare-metal kernels only, and its page tables are private",
    elsewhere: &[
        (Operation::MapPage, 48.0),
        (Operation::MapRange, 14.4),
        (Operation::UnmapPage, 47.0),
        (Operation::MapPartitioned, 26.0),
        (Operation::MapOverlapping, 206.0),
    ],
    source: "measured in 2026-11 on a 2-core virtual machine, not in this run",
}];

/// What a run found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Cores this process may run on. There are no figures with two threads where the two never ran at once.
    pub cores: usize,
    /// How long the run took, in seconds.
    pub seconds: f64,
    /// Pages of 4 KiB that each thread had.
    pub pages: u64,
    /// The figures, by scheme and operation.
    pub figures: Vec<Figure>,
    /// What is not built.
    pub absent: Vec<Absent>,
    /// What is asked of the second-stage tables, and whether this run met it.
    pub verdicts: Vec<Verdict>,
}

impl Report {
    pub(super) fn new(figures: Vec<Figure>, pages: u64, spent: Duration) -> Self {
        let mut report = Self {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            seconds: spent.as_secs_f64(),
            pages,
            figures,
            absent: NOT_BUILT.to_vec(),
            verdicts: Vec::new(),
        };
        report.verdicts = bounds::verdicts(&report);
        report
    }

    fn figure(&self, operation: Operation, scheme: &str) -> Option<&Figure> {
        self.figures
            .iter()
            .find(|figure| figure.operation == operation && figure.scheme == scheme)
    }

    /// The median of `operation` by `scheme`, if it was measured.
    #[must_use]
    pub fn value(&self, operation: Operation, scheme: &str) -> Option<f64> {
        self.figure(operation, scheme).map(|figure| figure.value)
    }

    /// The schemes, in the order they were measured.
    #[must_use]
    pub fn schemes(&self) -> Vec<&'static str> {
        let mut schemes: Vec<_> = self.figures.iter().map(|figure| figure.scheme).collect();
        schemes.dedup();
        schemes
    }

    /// Which operations had TLB flushes asked for, by whom, and how many a page.
    fn flushes(&self) -> Vec<&Figure> {
        self.figures.iter().filter(|f| f.flushes > 0.0).collect()
    }
}

/// The width of a scheme's name, and of a figure.
const NAME: usize = 26;
const CELL: usize = 10;

/// Two digits behind the point where there is one before it, else fewer.
fn short(value: f64) -> String {
    match value {
        v if v >= 99.95 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "ns a page of 4 KiB, {} pages a thread; with 2 threads, each thread's own time. {} cores, {:.0} s.\n",
            self.pages, self.cores, self.seconds
        )?;
        for line in 0..2 {
            let mut heading = " ".repeat(NAME);
            for operation in Operation::ALL {
                write!(heading, "{:>CELL$}", operation.heading()[line])?;
            }
            writeln!(f, "{heading}")?;
        }
        for scheme in self.schemes() {
            let cell = |operation| self.value(operation, scheme);
            row(f, scheme, &cell)?;
        }
        for absent in &self.absent {
            let name = format!("{}, elsewhere", absent.scheme);
            row(f, &name, &|operation| absent.value(operation))?;
        }
        writeln!(f)?;
        for absent in &self.absent {
            writeln!(f, "{}: not built here: {};", absent.scheme, absent.why)?;
            writeln!(f, "its figures were {}.", absent.source)?;
        }
        writeln!(
            f,
            "What has one writer is behind a mutex where there are two.\n\
             {}: a range is mapped as pages of 2 MiB, which are then split.",
            Tdp::NAME
        )?;
        for figure in self.flushes() {
            writeln!(
                f,
                "{}, {}: a TLB flush asked for once in {:.0} pages.",
                figure.scheme,
                figure.operation.name(),
                1.0 / figure.flushes
            )?;
        }
        let left_out: usize = self.figures.iter().map(|figure| figure.left_out).sum();
        let fit: usize = self.figures.iter().map(|figure| figure.samples).sum();
        if left_out > 0 {
            writeln!(
                f,
                "{left_out} of {} chunks are left out: a thread lost its core meanwhile.",
                fit + left_out
            )?;
        }
        writeln!(f)?;
        for verdict in &self.verdicts {
            writeln!(f, "{verdict}")?;
        }
        Ok(())
    }
}

fn row(
    f: &mut fmt::Formatter<'_>,
    name: &str,
    value: &dyn Fn(Operation) -> Option<f64>,
) -> fmt::Result {
    write!(f, "{name:<NAME$}")?;
    for operation in Operation::ALL {
        let shown = value(operation).map_or_else(|| "-".to_owned(), short);
        write!(f, "{shown:>CELL$}")?;
    }
    writeln!(f)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(operation: Operation, costs: &[(f64, bool)]) -> Vec<Sample> {
        let sample = |&(cost, disturbed): &_| Sample {
            operation,
            cost,
            flushes: 0.5,
            disturbed,
        };
        costs.iter().map(sample).collect()
    }

    #[test]
    fn a_figure_is_the_median_of_what_was_not_disturbed() {
        let costs = [(6.0, false), (1.0, false), (90.0, true), (2.0, false)];
        let samples = samples(Operation::MapPage, &costs);
        let figure = Figure::of(Operation::MapPage, "a", &samples).expect("a figure");
        assert_eq!((figure.value, figure.mean), (2.0, 3.0));
        assert_eq!((figure.min, figure.max, figure.flushes), (1.0, 6.0, 0.5));
        assert_eq!((figure.samples, figure.left_out), (3, 1));
    }

    #[test]
    fn one_thread_has_a_figure_in_any_case_and_two_have_none_of_disturbed_chunks() {
        let disturbed = [(7.0, true), (9.0, true)];
        let figure = |operation| Figure::of(operation, "a", &samples(operation, &disturbed));
        let alone = figure(Operation::Find).expect("a figure");
        assert_eq!((alone.value, alone.samples, alone.left_out), (9.0, 2, 0));
        assert!(figure(Operation::MapOverlapping).is_none());
    }
}
