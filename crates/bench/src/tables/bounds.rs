//! The bounds on our second-stage tables, compared with the figures of a run.

use super::Operation;
use super::Report;
use super::scheme::{CompareExchange, Komora, Scheme, Tdp};
use crate::Operation as _;
use crate::kit::Verdict;

/// The scheme that is judged.
const OURS: &str = Tdp::NAME;

/// Bounds of single figures, in nanoseconds.
const BOUNDS: [(Operation, f64); 6] = [
    (Operation::MapPage, 25.0),
    (Operation::MapOverlapping, 60.0),
    (Operation::Find, 8.0),
    (Operation::FindRandom, 8.0),
    (Operation::ProtectRange, 8.0),
    (Operation::UnmapRange, 8.0),
];

/// The largest ratio of the time of each of two threads with disjoint pages to that of one thread.
const PARTITIONED: f64 = 1.3;
/// The largest ratio of an operation on ranges to the floor.
const OVER_FLOOR: f64 = 2.0;
/// The operations on ranges.
const RANGES: [Operation; 3] = [
    Operation::MapRange,
    Operation::ProtectRange,
    Operation::UnmapRange,
];

/// All verdicts that the figures of `report` allow.
pub(super) fn verdicts(report: &Report) -> Vec<Verdict> {
    let mut all = Vec::new();
    let ours = |operation| report.value(operation, OURS);
    for (operation, limit) in BOUNDS {
        if let Some(ours) = ours(operation) {
            all.push(Verdict::new(operation.name(), limit, ours, "ns"));
        }
    }
    let mut ratio = |name: String, limit, ours: Option<f64>, theirs: Option<f64>| {
        if let (Some(ours), Some(theirs)) = (ours, theirs) {
            all.push(Verdict::new(name, limit, ours / theirs, "x"));
        }
    };
    let partitioned = Operation::MapPartitioned;
    ratio(
        format!("{} vs one thread", partitioned.name()),
        PARTITIONED,
        ours(partitioned),
        ours(Operation::MapPage),
    );
    for operation in RANGES {
        let name = format!("{} vs {}", operation.name(), CompareExchange::NAME);
        let floor = report.value(operation, CompareExchange::NAME);
        ratio(name, OVER_FLOOR, ours(operation), floor);
    }
    for operation in Operation::ALL.into_iter().filter(|o| o.threads() == 2) {
        let name = format!("{} vs {}", operation.name(), Komora::NAME);
        let theirs = report.value(operation, Komora::NAME);
        ratio(name, 1.0, ours(operation), theirs);
        for absent in &report.extra.absent {
            let name = format!("{} vs {}, elsewhere", operation.name(), absent.scheme);
            ratio(name, 1.0, ours(operation), absent.value(operation));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Figure;
    use crate::run::Sample;
    use std::time::Duration;

    fn report(figures: &[(Operation, &'static str, f64)]) -> Report {
        let figure = |&(operation, scheme, cost): &_| {
            let samples = [Sample::new(operation, cost)];
            Figure::of(operation, scheme, None, &samples).expect("a figure")
        };
        Report::new(figures.iter().map(figure).collect(), 1, Duration::ZERO)
    }

    #[test]
    fn bounds_and_ratios_are_those_of_the_run() {
        let report = report(&[
            (Operation::MapPage, OURS, 20.0),
            (Operation::MapRange, OURS, 9.0),
            (Operation::MapRange, CompareExchange::NAME, 5.0),
            (Operation::UnmapRange, OURS, 9.0),
            (Operation::MapPartitioned, OURS, 27.0),
            (Operation::MapPartitioned, Komora::NAME, 18.0),
        ]);
        let seen: Vec<_> = report
            .verdicts
            .iter()
            .map(|v| (v.name.as_str(), v.measured, v.unit, v.met))
            .collect();
        assert_eq!(
            seen,
            [
                ("map a page", 20.0, "ns", true),
                ("unmap a range", 9.0, "ns", false),
                (
                    "map a page, 2 threads partitioned vs one thread",
                    1.35,
                    "x",
                    false
                ),
                ("map a range vs floor: compare-exchange", 1.8, "x", true),
                (
                    "map a page, 2 threads partitioned vs pagetable 0.4 (komora)",
                    1.5,
                    "x",
                    false
                ),
                (
                    "map a page, 2 threads partitioned vs asterinas ostd, elsewhere",
                    27.0 / 26.0,
                    "x",
                    false
                ),
            ]
        );
    }

    #[test]
    fn nothing_is_said_of_what_was_not_measured() {
        let report = report(&[(Operation::MapPage, Komora::NAME, 1.0)]);
        assert!(report.verdicts.is_empty(), "{:?}", report.verdicts);
    }
}
