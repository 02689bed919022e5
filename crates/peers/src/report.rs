//! What a comparison found: figures, and whether ours keep their bounds.

use crate::run::Sample;
use pageferry_bench::kit::Verdict;
use serde::Serialize;
use std::time::Duration;

/// What a scheme is measured at.
pub trait Operation: Copy + Ord + Serialize {
    /// A name for a sentence.
    fn name(self) -> &'static str;
    /// The unit of its figures.
    fn unit(self) -> &'static str;
    /// How many threads do it at once.
    fn threads(self) -> u32;
}

/// One figure. The names of the keys are stable.
#[derive(Clone, Debug, Serialize)]
pub struct Figure<O> {
    /// What was measured.
    pub operation: O,
    /// Of which scheme.
    pub scheme: &'static str,
    /// With how many slots, where the comparison is of slots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots: Option<u32>,
    /// The median.
    pub value: f64,
    /// The mean. It includes costs that few samples bear for all, such as memory given back.
    pub mean: f64,
    /// The unit of both.
    pub unit: &'static str,
    /// The smallest sample.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// How many samples the median is of. A sample is itself the mean of a batch of operations.
    pub samples: usize,
    /// How many more were left out: a thread lost its core to another process meanwhile, or the
    /// two did not begin together. Where all samples with one thread are like that, none is
    /// left out.
    pub left_out: usize,
    /// TLB flushes that were asked for, an operation. Flushes are counted here, not done.
    pub flushes: f64,
}

impl<O: Operation> Figure<O> {
    /// The figure of `samples`; none where no sample is fit for it.
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

/// What a run found. `E` is what one comparison has beside the others.
#[derive(Clone, Debug, Serialize)]
pub struct Report<O, E> {
    /// Cores this process may run on. There are no figures with two threads where the two never
    /// ran at once.
    pub cores: usize,
    /// How long the run took, in seconds.
    pub seconds: f64,
    /// What only this comparison has.
    #[serde(flatten)]
    pub extra: E,
    /// The figures.
    pub figures: Vec<Figure<O>>,
    /// What is asked of ours, and whether this run met it.
    pub verdicts: Vec<Verdict>,
}

impl<O: Operation, E> Report<O, E> {
    /// A report that `verdicts` judges.
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

    /// The median of `operation` by `scheme`, with so many slots where there are slots, if it was
    /// measured.
    pub(crate) fn median(&self, operation: O, scheme: &str, slots: Option<u32>) -> Option<f64> {
        let found = self.figures.iter().find(|figure| {
            figure.operation == operation && figure.scheme == scheme && figure.slots == slots
        });
        found.map(|figure| figure.value)
    }
}

/// Three digits, and a `k` or `M` where the number needs it; a dash for none.
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
