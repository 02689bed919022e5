//! What a comparison of page tables found, as text.

use super::scheme::{Scheme, Tdp};
use super::{Operation, bounds};
use crate::Operation as _;
use crate::report::{self, Figure, short};
use serde::Serialize;
use std::fmt::{self, Write};
use std::time::Duration;

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
/// ostd 0.19 declares its dependencies (acpi, x86, multiboot2, ...) for `x86_64-unknown-none` and
/// other bare-metal targets alone, so for a host's target it does not compile; it needs a nightly
/// compiler; and `ostd::mm::page_table` is private to the crate, reached through the address spaces
/// of a booted kernel only.
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

/// What only a comparison of page tables has.
#[derive(Clone, Debug, Serialize)]
pub struct Pages {
    /// Pages of 4 KiB that each thread had.
    pub pages: u64,
    /// What is not built.
    pub absent: Vec<Absent>,
}

/// What a run found.
pub type Report = report::Report<Operation, Pages>;

impl Report {
    pub(super) fn new(figures: Vec<Figure<Operation>>, pages: u64, spent: Duration) -> Self {
        let extra = Pages {
            pages,
            absent: NOT_BUILT.to_vec(),
        };
        Self::judged(figures, extra, spent, bounds::verdicts)
    }

    /// The median of `operation` by `scheme`, if it was measured.
    #[must_use]
    pub fn value(&self, operation: Operation, scheme: &str) -> Option<f64> {
        self.median(operation, scheme, None)
    }

    /// The schemes, in the order they were measured.
    #[must_use]
    pub fn schemes(&self) -> Vec<&'static str> {
        let mut schemes: Vec<_> = self.figures.iter().map(|figure| figure.scheme).collect();
        schemes.dedup();
        schemes
    }

    /// Which operations had TLB flushes asked for, by whom, and how many a page.
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
            "ns a page of 4 KiB, {} pages a thread; with 2 threads, each thread's own time. {} cores, {:.0} s.\n",
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
        write!(f, "{:>CELL$}", short(value(operation)))?;
    }
    writeln!(f)
}
