//! The results of a comparison: figures and verdicts.

use crate::kit::Verdict;
use crate::run::Sample;
use serde::Serialize;
use std::time::Duration;

/// An operation that is measured.
pub(crate) trait Operation: Copy + Ord + Serialize {
    /// The name for use in a sentence.
    fn name(self) -> &'static str;
    /// The unit of its figures: `ns`, `ms`, or `k/s` (thousands per second).
    fn unit(self) -> &'static str;
    /// The number of threads that do it at once.
    fn threads(self) -> u32;
}

/// One figure. The names of its JSON keys are stable.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure<O> {
    /// The operation.
    pub(crate) operation: O,
    /// The scheme's name.
    pub(crate) scheme: &'static str,
    /// The number of slots, in a comparison of slots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) slots: Option<u32>,
    /// The median of the samples, in `unit`.
    pub(crate) value: f64,
    /// The mean of the samples, in `unit`. It includes costs that occur in few samples, such as
    /// freeing memory.
    pub(crate) mean: f64,
    /// The unit of `value`, `mean`, `min` and `max`.
    pub(crate) unit: &'static str,
    /// The smallest sample, in `unit`.
    pub(crate) min: f64,
    /// The largest sample, in `unit`.
    pub(crate) max: f64,
    /// The number of samples that count. Each is the mean of a batch of operations.
    pub(crate) samples: usize,
    /// The number of samples that do not count: a thread lost its core to another process, or the
    /// two threads did not start together. If that holds for all samples of one thread, all of them
    /// count.
    pub(crate) left_out: usize,
    /// TLB flushes that the scheme requested, per operation. They are counted, not done.
    pub(crate) flushes: f64,
}

impl<O: Operation> Figure<O> {
    /// The figure of `samples`. `None` if no sample counts.
    pub(crate) fn of(
        operation: O,
        scheme: &'static str,
        slots: Option<u32>,
        samples: &[Sample<O>],
    ) -> Option<Self> {
        let all = operation.threads() == 1 && samples.iter().all(|sample| sample.disturbed);
        let fit = samples.iter().filter(|sample| all || !sample.disturbed);
        let mut values: Vec<f64> = fit.map(|sample| sample.value).collect();
        values.sort_unstable_by(f64::total_cmp);
        let flushes: f64 = samples.iter().map(|sample| sample.flushes).sum();
        Some(Self {
            operation,
            scheme,
            slots,
            value: *values.get(values.len() / 2)?,
            mean: values.iter().sum::<f64>() / values.len() as f64,
            unit: operation.unit(),
            min: *values.first()?,
            max: *values.last()?,
            samples: values.len(),
            left_out: samples.len() - values.len(),
            flushes: flushes / samples.len() as f64,
        })
    }
}

/// The results of a run. `E` has the parts that only one comparison has.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report<O, E> {
    /// The number of cores that this process may use. Without two threads running at once, there
    /// are no figures of two threads.
    pub(crate) cores: usize,
    /// The length of the run, in seconds.
    pub(crate) seconds: f64,
    /// The parts that only this comparison has.
    #[serde(flatten)]
    pub(crate) extra: E,
    /// The figures.
    pub(crate) figures: Vec<Figure<O>>,
    /// The bounds on our schemes, and whether this run met them.
    pub(crate) verdicts: Vec<Verdict>,
}

impl<O: Operation, E> Report<O, E> {
    /// A report with the verdicts that `verdicts` returns for it.
    pub(crate) fn judged(
        figures: Vec<Figure<O>>,
        extra: E,
        spent: Duration,
        verdicts: impl FnOnce(&Self) -> Vec<Verdict>,
    ) -> Self {
        let mut report = Self {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            seconds: spent.as_secs_f64(),
            extra,
            figures,
            verdicts: Vec::new(),
        };
        report.verdicts = verdicts(&report);
        report
    }

    /// The median of `operation` by `scheme` with `slots` slots, if it was measured. `None` for
    /// comparisons without slots.
    pub(crate) fn median(&self, operation: O, scheme: &str, slots: Option<u32>) -> Option<f64> {
        let found = self.figures.iter().find(|figure| {
            figure.operation == operation && figure.scheme == scheme && figure.slots == slots
        });
        found.map(|figure| figure.value)
    }
}

/// Formats a number with three digits, and `k` or `M` if it is large. A dash stands for no number.
pub(crate) fn short(value: Option<f64>) -> String {
    let Some(value) = value else {
        return "-".to_owned();
    };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
    enum Test {
        Alone,
        Together,
    }

    impl Operation for Test {
        fn name(self) -> &'static str {
            "test"
        }

        fn unit(self) -> &'static str {
            "ns"
        }

        fn threads(self) -> u32 {
            1 + u32::from(self == Self::Together)
        }
    }

    fn figure(operation: Test, values: &[(f64, bool)]) -> Option<Figure<Test>> {
        let sample = |&(value, disturbed): &_| Sample {
            flushes: 0.5,
            disturbed,
            ..Sample::new(operation, value)
        };
        let samples: Vec<_> = values.iter().map(sample).collect();
        Figure::of(operation, "a", None, &samples)
    }

    #[test]
    fn numbers_have_three_digits() {
        let shown = [
            0.512, 1.234, 12.34, 99.96, 512.4, 9994.0, 9996.0, 66_900.0, 2.23e6,
        ];
        assert_eq!(
            shown.map(|value| short(Some(value))),
            [
                "0.51", "1.23", "12.3", "100", "512", "9994", "10.0k", "66.9k", "2.23M"
            ]
        );
        assert_eq!(short(None), "-");
    }

    #[test]
    fn a_figure_is_the_median_of_what_was_not_disturbed() {
        let values = [(6.0, false), (1.0, false), (90.0, true), (2.0, false)];
        let figure = figure(Test::Alone, &values).expect("a figure");
        assert_eq!((figure.value, figure.mean), (2.0, 3.0));
        assert_eq!((figure.min, figure.max, figure.flushes), (1.0, 6.0, 0.5));
        assert_eq!((figure.samples, figure.left_out, figure.unit), (3, 1, "ns"));
    }

    #[test]
    fn one_thread_has_a_figure_in_any_case_and_two_have_none_of_disturbed_samples() {
        let disturbed = [(7.0, true), (9.0, true)];
        let alone = figure(Test::Alone, &disturbed).expect("a figure");
        assert_eq!((alone.value, alone.samples, alone.left_out), (9.0, 2, 0));
        assert!(figure(Test::Together, &disturbed).is_none());
    }
}
