//! What a run found: figures, and whether they reach what is asked of the memslots.

use crate::bounds;
use crate::operation::Operation;
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
    /// With how many slots.
    pub slots: u32,
    /// The median.
    pub value: f64,
    /// The mean, which also has what few samples bear for all (memory given back, a thread descheduled).
    pub mean: f64,
    /// Its unit.
    pub unit: &'static str,
    /// The smallest sample.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// How many samples the median is of; a sample is itself the mean of a batch of operations.
    pub samples: usize,
}

impl Figure {
    /// The figure of `samples`, which must not be empty.
    pub(crate) fn of(
        operation: Operation,
        scheme: &'static str,
        slots: u32,
        mut samples: Vec<f64>,
    ) -> Self {
        samples.sort_unstable_by(f64::total_cmp);
        Self {
            operation,
            scheme,
            slots,
            value: samples[samples.len() / 2],
            mean: samples.iter().sum::<f64>() / samples.len() as f64,
            unit: operation.unit(),
            min: samples[0],
            max: samples[samples.len() - 1],
            samples: samples.len(),
        }
    }
}

/// What a run found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Cores this process may run on. A figure with two threads says little on fewer than two.
    pub cores: usize,
    /// How long the run took, in seconds.
    pub seconds: f64,
    /// What a cache line takes from one core to another, in nanoseconds: the smallest, the median and the largest over
    /// the rounds, or nothing where there was no second core. All figures with two threads hang on it, and on virtual
    /// machines it changes with the cores the host gives.
    pub line_transfer: Option<[f64; 3]>,
    /// The figures, by number of slots, scheme and operation.
    pub figures: Vec<Figure>,
    /// What is asked of the memslots, and whether this run met it.
    pub verdicts: Vec<Verdict>,
}

impl Report {
    pub(crate) fn new(figures: Vec<Figure>, mut transfers: Vec<f64>, spent: Duration) -> Self {
        transfers.sort_unstable_by(f64::total_cmp);
        let mut report = Self {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            seconds: spent.as_secs_f64(),
            line_transfer: transfers
                .last()
                .map(|last| [transfers[0], transfers[transfers.len() / 2], *last]),
            figures,
            verdicts: Vec::new(),
        };
        report.verdicts = bounds::verdicts(&report);
        report
    }

    /// The median of `operation` by `scheme` with `slots` slots, if it was measured.
    #[must_use]
    pub fn value(&self, operation: Operation, scheme: &str, slots: u32) -> Option<f64> {
        self.figures
            .iter()
            .find(|figure| {
                figure.operation == operation && figure.scheme == scheme && figure.slots == slots
            })
            .map(|figure| figure.value)
    }

    /// How many times as long a look-up of `scheme` takes beside a busy writer as alone.
    #[must_use]
    pub fn busy_ratio(&self, scheme: &str, slots: u32) -> Option<f64> {
        let quiet = self.value(Operation::ByGfn, scheme, slots)?;
        Some(self.value(Operation::BesideWriter, scheme, slots)? / quiet)
    }

    /// How many nanoseconds of a reader's time each change of the busy writer costs, which its rate leaves out: a scheme whose changes
    /// take long disturbs a reader seldom. No scheme costs less than one move of a cache line, unless the reader needs nothing that
    /// changes.
    #[must_use]
    pub fn lost_a_change(&self, scheme: &str, slots: u32) -> Option<f64> {
        let quiet = self.value(Operation::ByGfn, scheme, slots)?;
        let busy = self.value(Operation::BesideWriter, scheme, slots)?;
        let a_change = 1e6 / self.value(Operation::WriterRate, scheme, slots)?;
        Some((a_change * (busy - quiet) / busy).max(0.0))
    }

    /// The numbers of slots, in the order they were measured.
    #[must_use]
    pub fn sizes(&self) -> Vec<u32> {
        let mut sizes: Vec<u32> = self.figures.iter().map(|figure| figure.slots).collect();
        sizes.dedup();
        sizes
    }

    /// The figures and the verdicts as text of at most 130 columns.
    #[must_use]
    pub fn table(&self) -> String {
        self.to_string()
    }
}

/// Three digits, and a `k` or `M` where the number needs it.
fn short(value: f64) -> String {
    let (scaled, suffix) = match value {
        v if v >= 999_500.0 => (value / 1e6, "M"),
        v if v >= 9_995.0 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = match scaled {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    format!("{scaled:.digits$}{suffix}")
}

/// The width of a scheme's name.
const NAME: usize = 20;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "ns an operation (set-up: ms for all slots; writer: 1000 changes a second). held: inside one guard; \
             first: one slot is enough;\nadd, delete, move: a reader beside; busy: gfn beside that writer; \
             ratio: busy to gfn; lost: of the reader's time to each change. {} cores, {:.0} s.",
            self.cores, self.seconds
        )?;
        if let Some(ends) = self.line_transfer {
            let [least, median, most] = ends.map(short);
            writeln!(
                f,
                "A cache line from core to core: {median} ns ({least} to {most})."
            )?;
        }
        for slots in self.sizes() {
            let mut heading = format!("\n{:<NAME$}", format!("{slots} slots"));
            for operation in Operation::ALL {
                write!(heading, " {:>7}", operation.heading())?;
            }
            writeln!(f, "{heading}  ratio    lost")?;
            let mut schemes: Vec<&str> = self
                .figures
                .iter()
                .filter(|figure| figure.slots == slots)
                .map(|figure| figure.scheme)
                .collect();
            schemes.dedup();
            for scheme in schemes {
                write!(f, "{scheme:<NAME$}")?;
                for operation in Operation::ALL {
                    let value = self.value(operation, scheme, slots);
                    write!(f, " {:>7}", value.map_or_else(|| "-".to_owned(), short))?;
                }
                let ratio = self.busy_ratio(scheme, slots);
                let lost = self.lost_a_change(scheme, slots);
                let [ratio, lost] = [ratio, lost].map(|v| v.map_or_else(|| "-".to_owned(), short));
                writeln!(f, " {ratio:>6} {lost:>7}")?;
            }
        }
        if !self.verdicts.is_empty() {
            writeln!(f)?;
        }
        for verdict in &self.verdicts {
            writeln!(f, "{verdict}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        let shown = [
            0.512, 1.234, 12.34, 99.96, 512.4, 9994.0, 9996.0, 66_900.0, 2.23e6,
        ];
        assert_eq!(
            shown.map(short),
            [
                "0.51", "1.23", "12.3", "100", "512", "9994", "10.0k", "66.9k", "2.23M"
            ]
        );
    }

    #[test]
    fn a_figure_is_the_median_with_its_ends() {
        let figure = Figure::of(Operation::Add, "a", 10, vec![6.0, 1.0, 2.0]);
        assert_eq!((figure.value, figure.mean), (2.0, 3.0));
        assert_eq!((figure.value, figure.min, figure.max), (2.0, 1.0, 6.0));
        assert_eq!((figure.samples, figure.unit), (3, "ns"));
    }

    #[test]
    fn a_table_has_a_row_a_scheme_and_dashes_for_what_it_lacks() {
        let figures = vec![
            Figure::of(Operation::ByGfn, "one", 10, vec![10.0]),
            Figure::of(Operation::BesideWriter, "one", 10, vec![25.0]),
            Figure::of(Operation::WriterRate, "one", 10, vec![500.0]),
            Figure::of(Operation::ByGfn, "two", 10, vec![7.0]),
        ];
        let report = Report::new(figures, vec![70.0, 60.0, 90.0], Duration::from_secs(2));
        assert_eq!(report.busy_ratio("one", 10), Some(2.5));
        assert_eq!(report.busy_ratio("two", 10), None);
        // Of the 2000 ns between two changes a look-up takes 15 of each 25 ns longer.
        assert_eq!(report.lost_a_change("one", 10), Some(1200.0));
        assert_eq!(report.lost_a_change("two", 10), None);
        assert_eq!(report.line_transfer, Some([60.0, 70.0, 90.0]));
        let table = report.table();
        let row = |name: &str| table.lines().find(|line| line.starts_with(name));
        let (one, two) = (row("one").expect("one"), row("two").expect("two"));
        assert!(
            one.contains("10.0") && one.ends_with("2.50    1200"),
            "{one}"
        );
        assert!(two.contains("7.00") && two.ends_with('-'), "{two}");
        assert!(table.lines().all(|line| line.len() <= 150), "{table}");
    }
}
