//! The runner of all comparisons: rounds of steps, in which the schemes take turns.
//!
//! A disturbance of the machine meets all schemes, because each step is done by one scheme after
//! the other before the next step begins.

use crate::report::{Figure, Operation};
use crate::slots::SlotSet;
use crate::tables::{self, scheme::TABLE_PAGES};
use std::collections::BTreeMap;

/// What is compared: the inputs that all schemes get.
pub(crate) trait Comparison {
    /// What a scheme is measured at.
    type Operation: Operation;
    /// What is done in one go. It gives samples of one operation or of several.
    type Step: Copy + 'static;
    /// The steps of a round, in order.
    const STEPS: &'static [Self::Step];
}

/// The mean of one batch of operations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample<O> {
    pub(crate) operation: O,
    /// In the operation's unit.
    pub(crate) value: f64,
    /// TLB flushes that were asked for, an operation.
    pub(crate) flushes: f64,
    /// A thread lost its core meanwhile, or two threads did not begin together.
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

/// Where samples go.
pub(crate) type Sink<'a, O> = &'a mut dyn FnMut(Sample<O>);

/// A scheme gave a wrong answer.
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

/// All schemes of a comparison, in the order of a table's rows.
pub(crate) type Subjects<C> = Vec<Box<dyn Subject<C>>>;

/// Why there is no report.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    /// This number of slots cannot be measured.
    #[error("cannot measure {0} slots: expected {min} to {max}", min = SlotSet::MIN_SLOTS, max = SlotSet::MAX_SLOTS)]
    Slots(u32),
    /// Neither slots nor rounds.
    #[error("nothing to measure: at least one number of slots and one round are needed")]
    Nothing,
    /// No address space for the slots.
    #[error("the system refuses {bytes} bytes of address space: raise the address-space limit (ulimit -v)", bytes = crate::slots::RESERVED_BYTES)]
    AddressSpace,
    /// Pages or chunks that cannot be measured.
    #[error(
        "cannot measure {pages} pages in chunks of {chunk} and {pair_chunk}, {rounds} times: chunks must be multiples of \
         {TABLE_PAGES} pages, pages a multiple of both chunks and at most {most}, and rounds at least 1",
        most = tables::Config::MOST_PAGES
    )]
    Pages {
        /// Pages a thread.
        pages: u64,
        /// Pages a chunk.
        chunk: u64,
        /// Pages a chunk of two threads.
        pair_chunk: u64,
        /// Rounds.
        rounds: u32,
    },
    /// A scheme did not find what it had stored, or found what it had removed.
    #[error("{scheme} gave a wrong answer to a look-up")]
    Wrong {
        /// Which one.
        scheme: &'static str,
    },
}

/// How often everything is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounds {
    /// Rounds whose samples count.
    pub(crate) counted: u32,
    /// Whether a round that does not count comes first.
    pub(crate) warm_up: bool,
}

/// Measures all `subjects` and gives the figures, scheme by scheme. `begin` is called at the
/// beginning of each round with its name.
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
