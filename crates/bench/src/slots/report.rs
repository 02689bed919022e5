//! The results of a comparison of memory slots.

use super::{Operation, bounds};
use crate::report::{self, Figure, short};
use serde::Serialize;
use std::fmt::{self, Write};
use std::time::Duration;

/// The part that only a comparison of slots has.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct LineTransfer {
    /// Nanoseconds to move a cache line from one core to another: minimum, median and maximum over
    /// the rounds. `None` without a second core. All figures with two threads depend on it. On
    /// virtual machines it changes with the cores that the host assigns.
    pub(crate) line_transfer: Option<[f64; 3]>,
}

/// The results of a run.
pub(crate) type Report = report::Report<Operation, LineTransfer>;

impl Report {
    pub(crate) fn new(
        figures: Vec<Figure<Operation>>,
        mut transfers: Vec<f64>,
        spent: Duration,
    ) -> Self {
        transfers.sort_unstable_by(f64::total_cmp);
        let extra = LineTransfer {
            line_transfer: transfers
                .last()
                .map(|last| [transfers[0], transfers[transfers.len() / 2], *last]),
        };
        Self::judged(figures, extra, spent, bounds::verdicts)
    }

    /// The median of `operation` by `scheme` with `slots` slots, if it was measured.
    #[must_use]
    pub(crate) fn value(&self, operation: Operation, scheme: &str, slots: u32) -> Option<f64> {
        self.median(operation, scheme, Some(slots))
    }

    /// The time of a look-up next to a busy writer, divided by that of a quiet look-up.
    #[must_use]
    pub(crate) fn busy_ratio(&self, scheme: &str, slots: u32) -> Option<f64> {
        let quiet = self.value(Operation::ByGfn, scheme, slots)?;
        Some(self.value(Operation::BesideWriter, scheme, slots)? / quiet)
    }

    /// The nanoseconds of a reader's time that each change of the busy writer costs. The ratio does
    /// not show this: a scheme with slow changes disturbs a reader rarely. The cost is at least one
    /// move of a cache line, unless the reader reads nothing that changes.
    #[must_use]
    pub(crate) fn lost_a_change(&self, scheme: &str, slots: u32) -> Option<f64> {
        let quiet = self.value(Operation::ByGfn, scheme, slots)?;
        let busy = self.value(Operation::BesideWriter, scheme, slots)?;
        let a_change = 1e6 / self.value(Operation::WriterRate, scheme, slots)?;
        Some((a_change * (busy - quiet) / busy).max(0.0))
    }

    /// The numbers of slots, in the order of measurement.
    #[must_use]
    pub(crate) fn sizes(&self) -> Vec<u32> {
        let mut sizes: Vec<u32> = self
            .figures
            .iter()
            .filter_map(|figure| figure.slots)
            .collect();
        sizes.dedup();
        sizes
    }

    /// The figures and the verdicts as text.
    #[must_use]
    pub(crate) fn table(&self) -> String {
        self.to_string()
    }
}

/// The width of a scheme's name.
const NAME: usize = 20;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "ns per operation; set-up: ms for all slots. held: inside one guard. first: one slot only. add, delete, move: while \
             another thread\nlooks up frames. busy: gfn while another thread writes. writer: 1000 changes/s of that thread. \
             ratio: busy/gfn. lost: ns of the\nreader's time per change. {} cores, {:.0} s.",
            self.cores, self.seconds
        )?;
        if let Some(ends) = self.extra.line_transfer {
            let [least, median, most] = ends.map(|ns| short(Some(ns)));
            writeln!(
                f,
                "Moving a cache line from core to core: {median} ns ({least} to {most})."
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
                .filter(|figure| figure.slots == Some(slots))
                .map(|figure| figure.scheme)
                .collect();
            schemes.dedup();
            for scheme in schemes {
                write!(f, "{scheme:<NAME$}")?;
                for operation in Operation::ALL {
                    let value = self.value(operation, scheme, slots);
                    write!(f, " {:>7}", short(value))?;
                }
                let ratio = self.busy_ratio(scheme, slots);
                let lost = self.lost_a_change(scheme, slots);
                let [ratio, lost] = [ratio, lost].map(short);
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
    use crate::run::Sample;

    fn figure(operation: Operation, scheme: &'static str, value: f64) -> Figure<Operation> {
        let samples = [Sample::new(operation, value)];
        Figure::of(operation, scheme, Some(10), &samples).expect("a figure")
    }

    #[test]
    fn a_table_has_a_row_a_scheme_and_dashes_for_what_it_lacks() {
        let figures = vec![
            figure(Operation::ByGfn, "one", 10.0),
            figure(Operation::BesideWriter, "one", 25.0),
            figure(Operation::WriterRate, "one", 500.0),
            figure(Operation::ByGfn, "two", 7.0),
        ];
        let report = Report::new(figures, vec![70.0, 60.0, 90.0], Duration::from_secs(2));
        assert_eq!(report.busy_ratio("one", 10), Some(2.5));
        assert_eq!(report.busy_ratio("two", 10), None);
        // There are 2000 ns between two changes. Of each 25 ns of a look-up, 15 ns are lost.
        assert_eq!(report.lost_a_change("one", 10), Some(1200.0));
        assert_eq!(report.lost_a_change("two", 10), None);
        assert_eq!(report.extra.line_transfer, Some([60.0, 70.0, 90.0]));
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
