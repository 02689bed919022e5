//! The runner of all comparisons: rounds of steps, in which the schemes take turns.
//!
//! All schemes do a step before the next step begins. So a disturbance of the machine affects all
//! of them.

use crate::report::{Figure, Operation};
use crate::slots::SlotSet;
use crate::tables::{self, scheme::TABLE_PAGES};
use std::collections::BTreeMap;

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

/// The reasons why there is no report.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RunError {
    /// The number of slots is out of range.
    #[error("cannot measure {0} slots: expected {min} to {max}", min = SlotSet::MIN_SLOTS, max = SlotSet::MAX_SLOTS)]
    Slots(u32),
    /// There are no numbers of slots, or no rounds.
    #[error("nothing to measure: at least one number of slots and one round are needed")]
    Nothing,
    /// The system refuses address space for the slots.
    #[error("the system refuses {bytes} bytes of address space: raise the address-space limit (ulimit -v)", bytes = crate::slots::RESERVED_BYTES)]
    AddressSpace,
    /// The numbers of pages, chunks or rounds cannot be measured.
    #[error(
        "cannot measure {pages} pages in chunks of {chunk} and {pair_chunk}, {rounds} times: chunks must be multiples of \
         {TABLE_PAGES} pages, pages must be a multiple of both chunks and at most {most}, and rounds at least 1",
        most = tables::Config::MOST_PAGES
    )]
    Pages {
        /// Pages per thread.
        pages: u64,
        /// Pages per chunk.
        chunk: u64,
        /// Pages per chunk with two threads.
        pair_chunk: u64,
        /// Rounds.
        rounds: u32,
    },
    /// A scheme did not find an entry that it had stored, or found one that it had removed.
    #[error("{scheme} gave a wrong answer to a look-up")]
    Wrong {
        /// The scheme's name.
        scheme: &'static str,
    },
}

/// The number of rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounds {
    /// The rounds whose samples count.
    pub(crate) counted: u32,
    /// Whether a round whose samples do not count comes first.
    pub(crate) warm_up: bool,
}

/// Measures all `subjects`, and returns the figures scheme by scheme. `begin` gets the name of each
/// round when it begins.
pub(crate) fn measure<C: Comparison>(
    input: &C,
    subjects: &mut Subjects<C>,
    slots: Option<u32>,
    rounds: Rounds,
    mut begin: impl FnMut(&str),
) -> Result<Vec<Figure<C::Operation>>, RunError> {
    let mut samples = vec![BTreeMap::<C::Operation, Vec<_>>::new(); subjects.len()];
    for round in u32::from(!rounds.warm_up)..=rounds.counted {
        match round {
            0 => begin("warming up"),
            _ => begin(&format!("round {round} of {}", rounds.counted)),
        }
        for &step in C::STEPS {
            for (subject, samples) in subjects.iter_mut().zip(&mut samples) {
                let measured = subject.measure(step, input, &mut |sample| {
                    if round > 0 {
                        samples.entry(sample.operation).or_default().push(sample);
                    }
                });
                measured.map_err(|Wrong| RunError::Wrong {
                    scheme: subject.name(),
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
    Ok(figures)
}
