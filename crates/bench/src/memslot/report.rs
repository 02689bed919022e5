//! The results of a run: figures, verdicts, and the patch series' table.

use super::series::{Xeon, xeon};
use super::{Pair, SOURCE, Test};
use crate::kit::{Figure, Verdict};
use serde::{Serialize, Serializer};
use std::fmt;
use std::time::Duration;

/// Serialises a figure in seconds, with keys that name the unit.
fn as_seconds<S: Serializer>(figure: &Figure, to: S) -> Result<S::Ok, S::Error> {
    as_seconds_if_any(&Some(*figure), to)
}

/// As [`as_seconds`], for a figure that may be absent.
fn as_seconds_if_any<S: Serializer>(figure: &Option<Figure>, to: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Seconds {
        median_s: f64,
        min_s: f64,
        max_s: f64,
        samples: usize,
    }
    let seconds = figure.map(|figure| Seconds {
        median_s: figure.median,
        min_s: figure.min,
        max_s: figure.max,
        samples: figure.samples,
    });
    seconds.serialize(to)
}

/// The figures of one test with one number of slots.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// The test.
    pub test: Test,
    /// The number of slots of the VM, including slot 0 with the guest's program.
    pub slots: u32,
    /// Seconds per run with the copied array.
    #[serde(serialize_with = "as_seconds")]
    pub array_copy: Figure,
    /// Seconds per run with `pageferry-memslot`.
    #[serde(serialize_with = "as_seconds")]
    pub scalable: Figure,
    /// The difference of the medians, in percent of `array_copy`; negative if `scalable` is slower.
    pub improvement_percent: f64,
    /// The kernel's own figures, if the series has them.
    pub xeon: Option<Xeon>,
}

impl Cell {
    pub(super) fn new(test: Test, slots: u32, [array_copy, scalable]: &Pair) -> Self {
        let (array_copy, scalable) = (Figure::of(array_copy), Figure::of(scalable));
        Self {
            test,
            slots,
            improvement_percent: improvement(array_copy.median, scalable.median),
            array_copy,
            scalable,
            xeon: xeon(test, slots),
        }
    }

    /// The median of `scalable` divided by that of `array_copy`.
    fn ratio(&self) -> f64 {
        self.scalable.median / self.array_copy.median
    }
}

/// The reduction from `before` to `after`, in percent of `before`.
fn improvement(before: f64, after: f64) -> f64 {
    100.0 * (1.0 - after / before)
}

/// A call of the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    /// One slot moves.
    Move,
    /// All slots are created.
    SetUp,
}

impl Call {
    const fn name(self) -> &'static str {
        match self {
            Self::Move => "one move",
            Self::SetUp => "set-up of all",
        }
    }
}

/// The costs of a call while no vCPU runs.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CallCost {
    /// The call.
    pub call: Call,
    /// The number of slots.
    pub slots: u32,
    /// Seconds with the copied array.
    #[serde(serialize_with = "as_seconds")]
    pub array_copy: Figure,
    /// Seconds with `pageferry-memslot`.
    #[serde(serialize_with = "as_seconds")]
    pub scalable: Figure,
    /// Seconds by `KVM_SET_USER_MEMORY_REGION` on this host.
    #[serde(serialize_with = "as_seconds_if_any")]
    pub kvm: Option<Figure>,
    /// The number of slots on KVM: fewer than `slots` if KVM allows no more.
    pub kvm_slots: Option<u32>,
}

/// The largest ratio to the copied array that counts as "no slower" with few slots; the excess is
/// noise.
const NOT_SLOWER: f64 = 1.05;
/// The largest ratio of a move's time with many slots to that with few.
const MOVE_GROWTH: f64 = 2.0;

/// The results of a run.
#[derive(Clone, Debug, Serialize)]
pub struct MemslotReport {
    /// The figures, by number of slots and then in the order of [`Test::ALL`].
    pub cells: Vec<Cell>,
    /// The costs of calls, with the fewest and with the most slots of the run.
    pub calls: Vec<CallCost>,
    /// The reason why KVM was not measured.
    pub kvm_absent: Option<String>,
    /// The verdicts.
    pub verdicts: Vec<Verdict>,
    /// The source of [`Cell::xeon`].
    pub xeon_source: &'static str,
    /// The number of cores that this process may use.
    pub cores: usize,
    /// The length of the run, in seconds.
    pub seconds: f64,
}

impl MemslotReport {
    pub(super) fn new(
        cells: Vec<Cell>,
        calls: Vec<CallCost>,
        kvm_absent: Option<String>,
        took: Duration,
    ) -> Self {
        Self {
            verdicts: verdicts(&cells),
            cells,
            calls,
            kvm_absent,
            xeon_source: SOURCE,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            seconds: took.as_secs_f64(),
        }
    }

    /// The numbers of slots, ascending.
    #[must_use]
    pub fn sizes(&self) -> Vec<u32> {
        let mut sizes: Vec<u32> = self.cells.iter().map(|cell| cell.slots).collect();
        sizes.dedup();
        sizes
    }

    /// The figures of a test, by ascending number of slots.
    pub fn of(&self, test: Test) -> impl Iterator<Item = &Cell> {
        self.cells.iter().filter(move |cell| cell.test == test)
    }
}

/// All verdicts that the figures allow. `cells` are in ascending order of slots.
fn verdicts(cells: &[Cell]) -> Vec<Verdict> {
    let mut all = Vec::new();
    let (Some(first), Some(last)) = (cells.first(), cells.last()) else {
        return all;
    };
    let (few, many) = (first.slots, last.slots);
    let worst = cells
        .iter()
        .filter(|cell| cell.slots == few)
        .max_by(|a, b| a.ratio().total_cmp(&b.ratio()));
    if let Some(worst) = worst {
        let name = format!(
            "with {few} slots no slower than the array copy; worst test: {}",
            worst.test.name()
        );
        all.push(Verdict::new(name, NOT_SLOWER, worst.ratio(), "x"));
    }
    for test in [Test::MoveActive, Test::MoveInactive] {
        let with = |slots| {
            let cell = cells
                .iter()
                .find(|cell| cell.test == test && cell.slots == slots)?;
            Some(cell.scalable.median)
        };
        if let (Some(least), Some(most), true) = (with(few), with(many), few != many) {
            let name = format!("{} with {many} slots, relative to {few}", test.name());
            all.push(Verdict::new(name, MOVE_GROWTH, most / least, "x"));
        }
    }
    all
}

/// Formats seconds with three digits and a suitable unit.
fn seconds(value: f64) -> String {
    let (scaled, unit) = match value {
        v if v >= 0.9995 => (value, "s"),
        v if v >= 0.999_5e-3 => (value * 1e3, "ms"),
        _ => (value * 1e6, "us"),
    };
    let digits = match scaled {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    format!("{scaled:.digits$} {unit}")
}

impl fmt::Display for MemslotReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "The tests of the kernel's memslot_perf_test on the soft hypervisor: time per run, median (min .. max). {} \
             cores, {:.0} s in all.\nUnmapping covers the MMU notifier's call only. The Xeon columns are not measured here: {}.",
            self.cores, self.seconds, self.xeon_source
        )?;
        for slots in self.sizes() {
            writeln!(
                f,
                "\n{:<14} {:>9} {:>21} {:>9} {:>21} {:>11} {:>4}  {:>21} {:>5}",
                format!("{slots} slots"),
                "array",
                "",
                "scalable",
                "",
                "improvement",
                "n",
                "Xeon",
                ""
            )?;
            for cell in self.cells.iter().filter(|cell| cell.slots == slots) {
                let xeon = cell.xeon.map_or_else(
                    || ("-".to_owned(), String::new()),
                    |x| {
                        (
                            format!("{} -> {}", seconds(x.before_s), seconds(x.after_s)),
                            format!("{:.0} %", improvement(x.before_s, x.after_s)),
                        )
                    },
                );
                let ends = |figure: &Figure| {
                    format!("({} .. {})", seconds(figure.min), seconds(figure.max))
                };
                writeln!(
                    f,
                    "{:<14} {:>9} {:>21} {:>9} {:>21} {:>9.0} % {:>4}  {:>21} {:>5}",
                    cell.test.name(),
                    seconds(cell.array_copy.median),
                    ends(&cell.array_copy),
                    seconds(cell.scalable.median),
                    ends(&cell.scalable),
                    cell.improvement_percent,
                    cell.scalable.samples,
                    xeon.0,
                    xeon.1
                )?;
            }
        }
        self.show_calls(f)?;
        writeln!(f)?;
        for verdict in &self.verdicts {
            writeln!(
                f,
                "{:<6} {:<76} {:>6.2} x (at most {} x)",
                if verdict.met { "met" } else { "MISSED" },
                verdict.name,
                verdict.measured,
                verdict.limit
            )?;
        }
        Ok(())
    }
}

impl MemslotReport {
    fn show_calls(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.calls.is_empty() {
            return Ok(());
        }
        writeln!(
            f,
            "\n{:<14} {:>7} {:>12} {:>12} {:>20}",
            "no vCPU runs", "slots", "array", "scalable", "this host's KVM"
        )?;
        for cost in &self.calls {
            let kvm = cost.kvm.map_or_else(
                || "not measured".to_owned(),
                |figure| seconds(figure.median),
            );
            let fewer = cost
                .kvm_slots
                .filter(|&slots| slots != cost.slots)
                .map_or_else(String::new, |slots| format!(" with {slots} slots"));
            writeln!(
                f,
                "{:<14} {:>7} {:>12} {:>12} {:>20}{fewer}",
                cost.call.name(),
                cost.slots,
                seconds(cost.array_copy.median),
                seconds(cost.scalable.median),
                kvm
            )?;
        }
        if let Some(why) = &self.kvm_absent {
            writeln!(f, "KVM was not measured: {why}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Samples;

    fn cell(test: Test, slots: u32, before: f64, after: f64) -> Cell {
        let samples = |value: f64| Samples::from_iter([value * 2.0, value, value / 2.0]);
        Cell::new(test, slots, &[samples(before), samples(after)])
    }

    fn report(cells: Vec<Cell>) -> MemslotReport {
        MemslotReport::new(cells, Vec::new(), None, Duration::from_secs(3))
    }

    #[test]
    fn improvements_are_of_medians() {
        let cell = cell(Test::Map, 10, 2e-3, 5e-4);
        assert_eq!((cell.array_copy.min, cell.array_copy.max), (1e-3, 4e-3));
        assert!((cell.improvement_percent - 75.0).abs() < 1e-9);
        assert_eq!(cell.xeon.map(|x| x.after_s), Some(0.0186));
        assert!((improvement(1.0, 1.5) + 50.0).abs() < 1e-9);
    }

    #[test]
    fn verdicts_look_at_the_ends() {
        let report = report(vec![
            cell(Test::Map, 10, 1.0, 1.04),
            cell(Test::MoveActive, 10, 1.0, 1.2),
            cell(Test::MoveInactive, 10, 1.0, 0.5),
            cell(Test::Map, 30, 1.0, 9.0),
            cell(Test::MoveActive, 509, 1.0, 2.0),
            cell(Test::MoveInactive, 509, 1.0, 1.1),
        ]);
        let seen: Vec<_> = report
            .verdicts
            .iter()
            .map(|verdict| ((verdict.measured * 100.0).round(), verdict.met))
            .collect();
        assert_eq!(seen, [(120.0, false), (167.0, true), (220.0, false)]);
        assert!(report.verdicts[0].name.ends_with("Move active"));
        assert_eq!(report.sizes(), [10, 30, 509]);
    }

    #[test]
    fn one_size_has_nothing_to_grow_from() {
        let report = report(vec![cell(Test::MoveActive, 10, 1.0, 1.0)]);
        assert_eq!(report.verdicts.len(), 1);
        assert!(report.verdicts[0].met);
    }

    #[test]
    fn a_table_has_every_row_with_its_figures() {
        let mut report = report(vec![
            cell(Test::Map, 10, 0.0192, 0.0186),
            cell(Test::SlotSetup, 32_764, 16.1, 0.59),
            cell(Test::MoveActive, 40_000, 2e-5, 1e-5),
        ]);
        report.kvm_absent = Some("no such device".into());
        report.calls = vec![CallCost {
            call: Call::Move,
            slots: 32_764,
            array_copy: report.cells[2].array_copy,
            scalable: report.cells[2].scalable,
            kvm: None,
            kvm_slots: Some(509),
        }];
        let text = report.to_string();
        let line = |start: &str| {
            let line = text.lines().find(|line| line.starts_with(start));
            line.unwrap_or_else(|| panic!("{start} is missing in {text}"))
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert!(line("Map").starts_with("Map 19.2 ms (9.60 ms .. 38.4 ms) 18.6 ms"));
        assert!(line("Map").ends_with("3 % 3 19.2 ms -> 18.6 ms 3 %"));
        assert!(line("Slot setup").ends_with("96 % 3 16.1 s -> 590 ms 96 %"));
        assert!(line("Move active").ends_with("50 % 3 -"));
        assert_eq!(
            line("one move"),
            "one move 32764 20.0 us 10.0 us not measured with 509 slots"
        );
        assert_eq!(line("KVM"), "KVM was not measured: no such device");
    }

    #[test]
    fn seconds_have_three_digits() {
        let shown = [12.34, 1.0, 0.5, 0.0123, 0.000_999_4, 1.44e-5, 2e-7].map(seconds);
        let expected = [
            "12.3 s", "1.00 s", "500 ms", "12.3 ms", "999 us", "14.4 us", "0.20 us",
        ];
        assert_eq!(shown, expected);
    }
}
