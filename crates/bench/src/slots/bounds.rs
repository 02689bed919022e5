//! The bounds on our memory slots, compared with the figures of a run.

use crate::Operation as _;
use crate::kit::Verdict;
use crate::slots::Operation;
use crate::slots::Report;
use crate::slots::scheme::{Floor, Memslots, RecordFloor, Scheme, VmMemory};

/// The scheme that is judged.
const OURS: &str = Memslots::NAME;

/// Bounds on single figures, in their units, at the largest number of slots.
const BOUNDS: [(Operation, f64); 7] = [
    (Operation::AgainHeld, 2.0),
    (Operation::ByHva, 150.0),
    (Operation::Add, 500.0),
    (Operation::Delete, 800.0),
    (Operation::Move, 800.0),
    (Operation::SetUp, 12.0),
    (Operation::BesideWriter, 100.0),
];

/// The largest ratio of a look-up to the floor.
const OVER_FLOOR: f64 = 1.3;
/// The largest ratio of a look-up next to a busy writer to a quiet one.
const BUSY: f64 = 2.5;
/// The largest ratio of any of our figures to vm-memory's, at any number of slots.
const LOSS: f64 = 1.05;

/// All verdicts that the figures of `report` allow.
pub(crate) fn verdicts(report: &Report) -> Vec<Verdict> {
    let mut all = Vec::new();
    let sizes = report.sizes();
    let Some(&most) = sizes.iter().max() else {
        return all;
    };
    // Both floors: the first returns an address, the second a record, as ours does.
    for (floor, name) in [(Floor::NAME, "floor"), (RecordFloor::NAME, "records")] {
        // A floor has no protection. Its plain look-up is the baseline of both operations.
        let floor = report.value(Operation::ByGfn, floor, most);
        for operation in [Operation::ByGfn, Operation::ByGfnHeld] {
            let ours = report.value(operation, OURS, most);
            if let (Some(ours), Some(floor)) = (ours, floor) {
                let name = format!("{} vs {name}", operation.name());
                all.push(Verdict::new(name, OVER_FLOOR, ours / floor, "x").with_slots(most));
            }
        }
    }
    for (operation, limit) in BOUNDS {
        if let Some(ours) = report.value(operation, OURS, most) {
            let (name, unit) = (operation.name(), operation.unit());
            all.push(Verdict::new(name, limit, ours, unit).with_slots(most));
        }
    }
    if let Some(ratio) = report.busy_ratio(OURS, most) {
        let name = "look-up while another thread writes, vs alone";
        all.push(Verdict::new(name, BUSY, ratio, "x").with_slots(most));
    }
    all.extend(sizes.iter().filter_map(|&size| worst(report, size)));
    all
}

/// The verdict on our worst operation compared with vm-memory. Its name lists all operations that
/// lose.
fn worst(report: &Report, slots: u32) -> Option<Verdict> {
    let mut ratios: Vec<(Operation, f64)> = Operation::ALL
        .into_iter()
        .filter(|operation| *operation != Operation::WriterRate)
        .filter_map(|operation| {
            let ours = report.value(operation, OURS, slots)?;
            let theirs = report.value(operation, VmMemory::NAME, slots)?;
            Some((operation, ours / theirs))
        })
        .collect();
    ratios.sort_by(|a, b| b.1.total_cmp(&a.1));
    let worst = *ratios.first()?;
    let lost: Vec<String> = ratios
        .iter()
        .filter(|(operation, ratio)| *ratio > LOSS || *operation == worst.0)
        .map(|(operation, ratio)| format!("{} {ratio:.2}", operation.name()))
        .collect();
    let name = format!("vs {}: {}", VmMemory::NAME, lost.join(", "));
    Some(Verdict::new(name, LOSS, worst.1, "x").with_slots(slots))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Figure;
    use crate::run::Sample;
    use std::time::Duration;

    fn report(figures: &[(Operation, &'static str, u32, f64)]) -> Report {
        let figure = |&(operation, scheme, slots, value): &_| {
            let samples = [Sample::new(operation, value)];
            Figure::of(operation, scheme, Some(slots), &samples).expect("a figure")
        };
        Report::new(
            figures.iter().map(figure).collect(),
            Vec::new(),
            Duration::ZERO,
        )
    }

    #[test]
    fn ratios_and_bounds_are_taken_at_the_largest_size() {
        let report = report(&[
            (Operation::ByGfn, OURS, 10, 900.0),
            (Operation::ByGfn, Floor::NAME, 100, 20.0),
            (Operation::ByGfn, RecordFloor::NAME, 100, 12.5),
            (Operation::ByGfn, OURS, 100, 25.0),
            (Operation::Add, OURS, 100, 501.0),
            (Operation::BesideWriter, OURS, 100, 75.0),
        ]);
        let seen: Vec<(&str, f64, bool)> = report
            .verdicts
            .iter()
            .map(|v| (v.name.as_str(), v.measured, v.met))
            .collect();
        assert_eq!(
            seen,
            [
                ("look-up by gfn vs floor", 1.25, true),
                ("look-up by gfn vs records", 2.0, false),
                ("add", 501.0, false),
                ("look-up while another thread writes", 75.0, true),
                ("look-up while another thread writes, vs alone", 3.0, false),
            ]
        );
    }

    #[test]
    fn every_size_names_the_worst_loss_to_vm_memory() {
        let report = report(&[
            (Operation::ByGfn, OURS, 10, 30.0),
            (Operation::ByGfn, VmMemory::NAME, 10, 20.0),
            (Operation::Add, OURS, 10, 100.0),
            (Operation::Add, VmMemory::NAME, 10, 400.0),
            (Operation::Add, OURS, 30, 100.0),
            (Operation::Add, VmMemory::NAME, 30, 400.0),
        ]);
        let worst: Vec<&Verdict> = report
            .verdicts
            .iter()
            .filter(|v| v.name.starts_with("vs vm-memory"))
            .collect();
        assert_eq!(worst.len(), 2);
        assert!(worst[0].name.ends_with("look-up by gfn 1.50") && !worst[0].met);
        assert!(worst[1].met && worst[1].measured == 0.25);
    }
}
