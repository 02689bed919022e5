//! The runner of the comparisons with other crates: rounds of steps, in which the schemes take
//! turns, and the rows of their figures.
//!
//! All schemes do a step before the next step begins. So a disturbance of the machine affects all
//! of them.

use crate::BenchError;
use crate::kit::Samples;
use crate::row::{Bound, Conditions, Row};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// An operation that is measured.
pub(crate) trait Operation: Copy + Ord {
    /// The name of its case.
    fn case(self) -> &'static str;
    /// The unit of its figures.
    fn unit(self) -> &'static str {
        "ns"
    }
    /// The number of threads that do it at once.
    fn threads(self) -> u32 {
        1
    }
}

/// A comparison: the inputs that all schemes get.
pub(crate) trait Comparison {
    /// The operations that are measured.
    type Operation: Operation;
    /// A unit of measurement. It gives samples of one operation or of several.
    type Step: Copy + 'static;
    /// The steps of a round, in order.
    const STEPS: &'static [Self::Step];
}

/// A sample: the mean of one batch of operations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample<O> {
    pub(crate) operation: O,
    /// In the operation's unit.
    pub(crate) value: f64,
    /// TLB flushes that the scheme requested, per operation.
    pub(crate) flushes: f64,
    /// Whether a thread lost its core meanwhile, or two threads did not start together.
    pub(crate) disturbed: bool,
}

impl<O> Sample<O> {
    /// A sample of `operation`, undisturbed and without flushes.
    pub(crate) const fn new(operation: O, value: f64) -> Self {
        Self {
            operation,
            value,
            flushes: 0.0,
            disturbed: false,
        }
    }
}

/// The receiver of samples.
pub(crate) type Sink<'a, O> = &'a mut dyn FnMut(Sample<O>);

/// A scheme's answer was wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wrong;

/// A scheme that can be measured.
pub(crate) trait Subject<C: Comparison> {
    /// The scheme's name.
    fn name(&self) -> &'static str;

    /// Takes samples of `step`. A scheme that cannot do the step gives none.
    fn measure(
        &mut self,
        step: C::Step,
        input: &C,
        sink: Sink<'_, C::Operation>,
    ) -> Result<(), Wrong>;
}

/// All schemes of a comparison, in the order of the table's rows.
pub(crate) type Subjects<C> = Vec<Box<dyn Subject<C>>>;

/// A figure of one scheme.
#[derive(Debug)]
pub(crate) struct Figure<O> {
    pub(crate) operation: O,
    pub(crate) scheme: &'static str,
    /// The number of slots, in a comparison of slots.
    pub(crate) slots: Option<u32>,
    /// Those that count.
    samples: Samples,
    /// The number of samples that do not count: a thread lost its core to another process, or the
    /// two threads did not start together. If that holds for all samples of one thread, all count.
    left_out: usize,
    /// TLB flushes that the scheme requested, per operation. They are counted, not done.
    flushes: f64,
}

impl<O: Operation> Figure<O> {
    /// The figure of `samples`. `None` if no sample counts.
    pub(crate) fn of(
        operation: O,
        scheme: &'static str,
        slots: Option<u32>,
        all: &[Sample<O>],
    ) -> Option<Self> {
        let keep = operation.threads() == 1 && all.iter().all(|sample| sample.disturbed);
        let fit = all.iter().filter(|sample| keep || !sample.disturbed);
        let samples: Samples = fit.map(|sample| sample.value).collect();
        let flushes: f64 = all.iter().map(|sample| sample.flushes).sum();
        (!samples.is_empty()).then(|| Self {
            operation,
            scheme,
            slots,
            left_out: all.len() - samples.len(),
            samples,
            flushes: flushes / all.len() as f64,
        })
    }

    /// Its row.
    pub(crate) fn row(&self, note: &str) -> Row {
        let mut note = note.to_owned();
        if self.left_out > 0 {
            note.push_str(&format!(
                "; {} batches left out: a thread lost its core",
                self.left_out
            ));
        }
        if self.flushes > 0.0 {
            note.push_str(&format!(
                "; one TLB flush asked for per {:.0} pages",
                1.0 / self.flushes
            ));
        }
        let subject = match self.slots {
            Some(slots) => format!("{}, {slots} slots", self.scheme),
            None => self.scheme.to_owned(),
        };
        let how = Conditions::here(0, 0, note);
        self.samples
            .row(self.operation.case(), subject, self.operation.unit(), how)
    }
}

/// The aim of one of our operations: a bound on its figure, or on the ratio to that of another
/// scheme or of another operation.
pub(crate) struct Aim<O> {
    pub(crate) operation: O,
    pub(crate) baseline: Option<(&'static str, O)>,
    pub(crate) bound: Bound,
}

impl<O> Aim<O> {
    /// A bound on the figure.
    pub(crate) const fn of(operation: O, bound: Bound) -> Self {
        Self {
            operation,
            baseline: None,
            bound,
        }
    }

    /// The largest ratio to an operation of a scheme.
    pub(crate) const fn beside(operation: O, most: f64, scheme: &'static str, other: O) -> Self {
        Self {
            operation,
            baseline: Some((scheme, other)),
            bound: Bound::RatioAtMost(most),
        }
    }
}

/// The figures of a run.
pub(crate) struct Figures<O>(pub(crate) Vec<Figure<O>>);

impl<O: Operation> Figures<O> {
    /// The figure of an operation. All figures have the same number of slots.
    fn find(&self, scheme: &str, operation: O) -> Option<&Figure<O>> {
        let mut all = self.0.iter();
        all.find(|one| (one.scheme, one.operation) == (scheme, operation))
    }

    /// A row for each figure.
    pub(crate) fn rows(&self, note: &str) -> Vec<Row> {
        self.0.iter().map(|figure| figure.row(note)).collect()
    }

    /// A row for each aim of the scheme `ours` whose figures were measured.
    pub(crate) fn judge(
        &self,
        ours: &str,
        aims: impl IntoIterator<Item = Aim<O>>,
        note: &str,
    ) -> Vec<Row> {
        let judged = aims.into_iter().filter_map(|aim| {
            let mut row = self.find(ours, aim.operation)?.row(note);
            if let Some((scheme, operation)) = aim.baseline {
                let name = match operation == aim.operation {
                    true => scheme.to_owned(),
                    false => format!("{scheme}, {}", operation.case()),
                };
                row = row.against(name, self.find(scheme, operation)?.samples.median());
            }
            Some(row.aiming_at(aim.bound))
        });
        judged.collect()
    }
}

/// Measures all `subjects`, and returns the figures scheme by scheme. `begin` gets the name of each
/// round when it begins. The samples of round 0 do not count.
pub(crate) fn measure<C: Comparison>(
    input: &C,
    subjects: &mut Subjects<C>,
    slots: Option<u32>,
    rounds: RangeInclusive<u32>,
    mut begin: impl FnMut(&str),
) -> Result<Figures<C::Operation>, BenchError> {
    let mut samples = vec![BTreeMap::<C::Operation, Vec<_>>::new(); subjects.len()];
    let last = *rounds.end();
    for round in rounds {
        match round {
            0 => begin("warming up"),
            _ => begin(&format!("round {round} of {last}")),
        }
        for &step in C::STEPS {
            for (subject, samples) in subjects.iter_mut().zip(&mut samples) {
                let measured = subject.measure(step, input, &mut |sample| {
                    if round > 0 {
                        samples.entry(sample.operation).or_default().push(sample);
                    }
                });
                measured.map_err(|Wrong| {
                    let name = subject.name();
                    BenchError::WrongValue(format!("{name} gave a wrong answer to a look-up"))
                })?;
            }
        }
    }
    let mut figures = Vec::new();
    for (subject, samples) in subjects.iter().zip(samples) {
        for (operation, samples) in samples {
            figures.extend(Figure::of(operation, subject.name(), slots, &samples));
        }
    }
    Ok(Figures(figures))
}

/// The time that reading the clock adds to a batch: the minimum of many readings.
pub(crate) fn clock_overhead() -> Duration {
    (0..1000)
        .map(|_| Instant::now().elapsed())
        .min()
        .unwrap_or_default()
}

/// Nanoseconds per operation, of `count` operations in `spent`, without the clock's own cost.
pub(crate) fn per_operation(spent: Duration, overhead: Duration, count: usize) -> f64 {
    spent.saturating_sub(overhead).as_nanos() as f64 / count as f64
}

/// The length of a chunk of look-ups. It is far shorter than a time slice. So even on a busy
/// machine most chunks run undisturbed, and the median is that of an undisturbed chunk.
const CHUNK: Duration = Duration::from_micros(100);
/// [`Sampler::look_ups`] calls `before` again after this many chunks.
const CHUNKS: usize = 8;
/// The longest warm-up of the caches, in samples.
const WARM_UP: u32 = 6;

/// The settings for samples.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sampler {
    /// The length of a sample.
    pub(crate) sample: Duration,
    /// The cost of reading the clock.
    pub(crate) overhead: Duration,
}

impl Sampler {
    /// Measures `look_up`, which gets the indices of `keys` keys in turn. `sink` gets nanoseconds
    /// per call, once per chunk.
    ///
    /// Calls `before` before the first chunk and before every [`CHUNKS`] further ones, untimed. The
    /// warm-up looks up all keys once, or as many as [`WARM_UP`] samples allow. So the caches hold
    /// the data of this scheme, not of the previous one.
    #[inline]
    pub(crate) fn look_ups<const KEYS: usize, T>(
        self,
        mut before: impl FnMut(),
        mut look_up: impl FnMut(usize) -> T,
        mut sink: impl FnMut(f64),
    ) {
        let mut at = 0usize;
        let mut run = |count: usize| {
            let start = Instant::now();
            for _ in 0..count {
                black_box(look_up(at % KEYS));
                at += 1;
            }
            start.elapsed()
        };
        let (begun, mut count, mut warmed) = (Instant::now(), 1, 0);
        while begun.elapsed() < WARM_UP * self.sample && warmed < KEYS {
            warmed += count;
            if run(count) < CHUNK / 2 {
                count *= 2;
            }
        }
        let begun = Instant::now();
        loop {
            before();
            for _ in 0..CHUNKS {
                sink(per_operation(run(count), self.overhead, count));
                if begun.elapsed() >= self.sample {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    enum Test {
        Alone,
        Together,
    }

    impl Operation for Test {
        fn case(self) -> &'static str {
            "test"
        }

        fn threads(self) -> u32 {
            1 + u32::from(self == Self::Together)
        }
    }

    fn figure(
        operation: Test,
        scheme: &'static str,
        values: &[(f64, bool)],
    ) -> Option<Figure<Test>> {
        let sample = |&(value, disturbed): &_| Sample {
            flushes: 0.5,
            disturbed,
            ..Sample::new(operation, value)
        };
        let samples: Vec<_> = values.iter().map(sample).collect();
        Figure::of(operation, scheme, None, &samples)
    }

    #[test]
    fn a_figure_is_the_median_of_what_was_not_disturbed() {
        let values = [(6.0, false), (1.0, false), (90.0, true), (2.0, false)];
        let row = figure(Test::Alone, "a", &values)
            .expect("a figure")
            .row("how");
        assert_eq!(
            (row.value, row.min, row.max, row.samples),
            (2.0, 1.0, 6.0, 3)
        );
        let note = &row.conditions.note;
        assert!(
            note.contains("1 batches left out") && note.contains("per 2 pages"),
            "{note}"
        );
    }

    #[test]
    fn one_thread_has_a_figure_in_any_case_and_two_have_none_of_disturbed_samples() {
        let disturbed = [(7.0, true), (9.0, true)];
        let alone = figure(Test::Alone, "a", &disturbed).expect("a figure");
        assert_eq!((alone.row("").value, alone.left_out), (9.0, 0));
        assert!(figure(Test::Together, "a", &disturbed).is_none());
    }

    #[test]
    fn aims_are_judged_where_their_figures_were_measured() {
        let of = |operation, scheme, value| figure(operation, scheme, &[(value, false)]);
        let all = [
            of(Test::Alone, "ours", 30.0),
            of(Test::Together, "ours", 60.0),
            of(Test::Alone, "floor", 20.0),
        ];
        let figures = Figures(all.into_iter().flatten().collect());
        let aims = [
            Aim::of(Test::Alone, Bound::AtMost(25.0)),
            Aim::beside(Test::Alone, 1.5, "floor", Test::Alone),
            Aim::beside(Test::Together, 1.9, "ours", Test::Alone),
            Aim::beside(Test::Together, 1.0, "floor", Test::Together),
        ];
        let rows = figures.judge("ours", aims, "");
        let seen: Vec<_> = rows.iter().map(|row| (row.ratio, row.met)).collect();
        let expected = [
            (None, Some(false)),
            (Some(1.5), Some(true)),
            (Some(2.0), Some(false)),
        ];
        assert_eq!(seen, expected);
        assert_eq!(rows[2].baseline.as_deref(), Some("ours, test"));
    }

    #[test]
    fn a_call_costs_what_it_waits() {
        let wait = Duration::from_micros(200);
        let (mut keys, mut asked, mut samples) = (Vec::new(), 0, Vec::new());
        let sampler = Sampler {
            sample: Duration::from_millis(8),
            overhead: Duration::ZERO,
        };
        sampler.look_ups::<65_536, _>(
            || asked += 1,
            |key| {
                keys.push(key);
                let start = Instant::now();
                while start.elapsed() < wait {}
            },
            |cost| samples.push(cost),
        );
        assert!(!samples.is_empty() && samples.iter().all(|&cost| cost >= 200_000.0));
        assert_eq!(asked, samples.len().div_ceil(CHUNKS));
        assert!(keys.iter().copied().eq(0..keys.len()));
    }

    #[test]
    fn the_clock_s_own_cost_is_taken_off_and_never_more() {
        let ns = Duration::from_nanos;
        assert_eq!(per_operation(ns(1040), ns(40), 10), 100.0);
        assert_eq!(per_operation(ns(10), ns(40), 10), 0.0);
    }
}
