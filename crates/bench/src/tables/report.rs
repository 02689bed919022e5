//! The results of a comparison of page tables.

use super::scheme::{Scheme, Tdp};
use super::{Operation, bounds};
use crate::Operation as _;
use crate::report::{self, Figure, short};
use serde::Serialize;
use std::fmt::{self, Write};
use std::time::Duration;

/// A scheme that was not measured, with figures from elsewhere.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Absent {
    /// The scheme's name.
    pub(crate) scheme: &'static str,
    /// The reason why it was not measured.
    pub(crate) why: &'static str,
    /// Figures of another run in nanoseconds, on a similar machine.
    pub(crate) elsewhere: &'static [(Operation, f64)],
    /// The source of these figures.
    pub(crate) source: &'static str,
}

impl Absent {
    /// The figure of `operation` in nanoseconds, if it is known.
    #[must_use]
    pub(crate) fn value(&self, operation: Operation) -> Option<f64> {
        let known = self.elsewhere.iter().find(|(o, _)| *o == operation);
        known.map(|(_, value)| *value)
    }
}

/// The schemes that are not built.
///
/// ostd 0.19 cannot be built here for three reasons. It declares its dependencies (acpi, x86,
/// multiboot2, ...) for bare-metal targets such as `x86_64-unknown-none` only, so it does not
/// compile for a host's target. It needs a nightly compiler. And `ostd::mm::page_table` is private
/// to the crate; only the address spaces of a booted kernel reach it.
pub(crate) const NOT_BUILT: [Absent; 1] = [Absent {
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

/// The parts that only a comparison of page tables has.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Pages {
    /// Pages of 4 KiB per thread.
    pub(crate) pages: u64,
    /// The schemes that are not built.
    pub(crate) absent: Vec<Absent>,
}

/// The results of a run.
pub(crate) type Report = report::Report<Operation, Pages>;

impl Report {
    pub(super) fn new(figures: Vec<Figure<Operation>>, pages: u64, spent: Duration) -> Self {
        let extra = Pages {
            pages,
            absent: NOT_BUILT.to_vec(),
        };
        Self::judged(figures, extra, spent, bounds::verdicts)
    }

    /// The median of `operation` by `scheme` in nanoseconds, if it was measured.
    #[must_use]
    pub(crate) fn value(&self, operation: Operation, scheme: &str) -> Option<f64> {
        self.median(operation, scheme, None)
    }

    /// The schemes, in the order of measurement.
    #[must_use]
    pub(crate) fn schemes(&self) -> Vec<&'static str> {
        let mut schemes: Vec<_> = self.figures.iter().map(|figure| figure.scheme).collect();
        schemes.dedup();
        schemes
    }

    /// The figures of operations that requested TLB flushes.
    fn flushes(&self) -> Vec<&Figure<Operation>> {
        self.figures.iter().filter(|f| f.flushes > 0.0).collect()
    }
}

/// The width of a scheme's name, and of a figure.
const NAME: usize = 26;
const CELL: usize = 10;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "ns per page of 4 KiB, {} pages per thread; with 2 threads, each thread's own time. {} cores, {:.0} s.\n",
            self.extra.pages, self.cores, self.seconds
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
        for absent in &self.extra.absent {
            let name = format!("{}, elsewhere", absent.scheme);
            row(f, &name, &|operation| absent.value(operation))?;
        }
        writeln!(f)?;
        for absent in &self.extra.absent {
            writeln!(f, "{}: not built here: {};", absent.scheme, absent.why)?;
            writeln!(f, "its figures: {}.", absent.source)?;
        }
        writeln!(
            f,
            "With two threads, tables that allow only one writer are behind a mutex.\n\
             {}: a range is mapped as pages of 2 MiB, which are then split.",
            Tdp::NAME
        )?;
        for figure in self.flushes() {
            writeln!(
                f,
                "{}, {}: one TLB flush requested per {:.0} pages.",
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
                "{left_out} of {} chunks do not count, because a thread lost its core.",
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
        write!(f, "{:>CELL$}", short(value(operation)))?;
    }
    writeln!(f)
}
