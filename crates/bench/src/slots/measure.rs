//! The measurement of one scheme.

use crate::schemes::{self, Comparison, Sample, Subject, Wrong};
use crate::schemes::{Sampler, per_operation};
use crate::slots::Operation;
use crate::slots::background::{Order, beside_reader, beside_running_writer, beside_writer};
use crate::slots::input::{KEYS, Keys, PlainSlot, SlotSet};
use crate::slots::scheme::{ByGfn, Change, Floor, Lookup, Reader, Scheme};
use pageferry_addr::Gfn;
use std::cell::Cell;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// The inputs of all schemes, at one number of slots.
#[derive(Debug)]
pub(crate) struct Input {
    /// The slots.
    pub(crate) set: SlotSet,
    /// The keys.
    pub(crate) keys: Keys,
    /// The order of changes.
    pub(crate) order: Order,
    /// The settings for samples.
    pub(crate) sampler: Sampler,
}

impl Comparison for Input {
    type Operation = Operation;
    type Step = Operation;
    const STEPS: &'static [Operation] = &Operation::STEPS;
}

type Sink<'a> = schemes::Sink<'a, Operation>;

/// The largest number of changes that are timed together.
const BATCH: usize = 16;
/// The time to wait for the other thread to get its own core.
const PATIENCE: Duration = Duration::from_millis(20);
/// The time to try for one sample next to a reader.
const TRY: Duration = Duration::from_millis(60);
/// If a writer makes fewer changes per second, a chunk of look-ups does not show whether it is
/// running.
const SLOW_WRITER: f64 = 40_000.0;
/// A set-up that takes longer is not repeated.
const SLOW_SET_UP: Duration = Duration::from_millis(150);

/// A scheme that supports all operations.
#[derive(Debug)]
pub(crate) struct Measured<S> {
    scheme: S,
    set_up: Duration,
    reported: bool,
    batch: usize,
}

fn build<S: Change>(set: &SlotSet) -> (S, Duration) {
    let start = Instant::now();
    let mut scheme = S::empty();
    for slot in set.slots() {
        scheme.add(*slot);
    }
    (scheme, start.elapsed())
}

impl<S: Change> Measured<S> {
    /// Creates the scheme with all slots of `set`, and times that.
    pub(crate) fn new(set: &SlotSet) -> Self {
        let (scheme, set_up) = build(set);
        Self {
            scheme,
            set_up,
            reported: false,
            batch: 0,
        }
    }

    fn set_up(&mut self, input: &Input, sink: Sink<'_>) {
        let milliseconds = |spent: Duration| spent.as_secs_f64() * 1e3;
        if !self.reported {
            self.reported = true;
            sink(Sample::new(Operation::SetUp, milliseconds(self.set_up)));
        } else if self.set_up < SLOW_SET_UP {
            let begun = Instant::now();
            while begun.elapsed() < input.sampler.sample {
                let spent = build::<S>(&input.set).1;
                sink(Sample::new(Operation::SetUp, milliseconds(spent)));
            }
        }
    }

    /// Calls `change` with one batch after the other, until the time of a sample is over. Meanwhile
    /// another thread looks up frames.
    fn batches(&mut self, input: &Input, mut change: impl FnMut(&mut S, &[PlainSlot], &[Gfn])) {
        let (scheme, number) = (&mut self.scheme, &mut self.batch);
        beside_reader(scheme.reader(), &input.keys, |reader| {
            let (begun, first) = (Instant::now(), *number);
            while begun.elapsed() < input.sampler.sample
                || *number == first && begun.elapsed() < TRY
            {
                if reader.meet(PATIENCE) {
                    let (slots, places) = input.order.batch(*number, BATCH);
                    *number += 1;
                    change(scheme, slots, places);
                }
            }
        });
    }

    /// Deletes slots and adds them again, batch by batch.
    fn add_and_delete(&mut self, input: &Input, sink: Sink<'_>) {
        let mut samples = Vec::new();
        self.batches(input, |scheme, slots, _| {
            let start = Instant::now();
            slots.iter().for_each(|slot| scheme.delete(*slot));
            let deleted = start.elapsed();
            let start = Instant::now();
            slots.iter().for_each(|slot| scheme.add(*slot));
            samples.push((deleted, start.elapsed(), slots.len()));
        });
        for (deleted, added, count) in samples {
            let each = |spent| per_operation(spent, input.sampler.overhead, count);
            sink(Sample::new(Operation::Delete, each(deleted)));
            sink(Sample::new(Operation::Add, each(added)));
        }
    }

    /// Looks up frames while another thread changes slots.
    fn beside_writer(&mut self, input: &Input, sink: Sink<'_>) {
        let (keys, mut reader) = (&input.keys, self.scheme.reader());
        let mut chunks = Vec::new();
        let (rate, ()) = beside_writer(&mut self.scheme, &input.order, |writer| {
            let last = Cell::new((Instant::now(), writer.done()));
            let meet = || {
                writer.meet(PATIENCE);
                last.set((Instant::now(), writer.done()));
            };
            let look_up = |key: usize| reader.hold().by_gfn(keys.gfns[key]);
            input.sampler.look_ups::<KEYS, _>(meet, look_up, |cost| {
                let (then, before) = last.replace((Instant::now(), writer.done()));
                let (now, after) = last.get();
                chunks.push((cost, (after - before) as f64 / (now - then).as_secs_f64()));
            });
        });
        let slow = rate < SLOW_WRITER;
        let mut rates = Vec::new();
        for (cost, rate) in beside_running_writer(&chunks, slow) {
            sink(Sample::new(Operation::BesideWriter, cost));
            rates.push(rate);
        }
        rates.sort_unstable_by(f64::total_cmp);
        if let Some(median) = rates.get(rates.len() / 2) {
            let rate = if slow { rate } else { *median };
            sink(Sample::new(Operation::WriterRate, rate));
        }
    }

    /// Moves slots to free places and back, batch by batch.
    fn relocate(&mut self, input: &Input, sink: Sink<'_>) {
        let mut samples = Vec::new();
        self.batches(input, |scheme, slots, places| {
            let mut moved = [slots[0]; BATCH];
            let start = Instant::now();
            for ((slot, place), moved) in slots.iter().zip(places).zip(&mut moved) {
                *moved = scheme.relocate(*slot, *place);
            }
            samples.push((start.elapsed(), slots.len()));
            let start = Instant::now();
            for (slot, moved) in slots.iter().zip(moved) {
                scheme.relocate(moved, slot.start);
            }
            samples.push((start.elapsed(), slots.len()));
        });
        for (spent, count) in samples {
            let each = per_operation(spent, input.sampler.overhead, count);
            sink(Sample::new(Operation::Move, each));
        }
    }
}

impl<S> Subject<Input> for Measured<S>
where
    S: Change,
    for<'a> <S::Reader as Reader>::Held<'a>: Lookup,
{
    fn name(&self) -> &'static str {
        S::NAME
    }

    fn measure(&mut self, step: Operation, input: &Input, sink: Sink<'_>) -> Result<(), Wrong> {
        let (keys, sampler) = (&input.keys, input.sampler);
        let mut reader = self.scheme.reader();
        match step {
            Operation::SetUp => self.set_up(input, sink),
            Operation::ByHva | Operation::FirstByHva => {
                let look_up = |key: usize| {
                    let mut frames = 0;
                    reader.hold().by_hva(keys.hvas[key], |gfn| {
                        frames += gfn.0;
                        match step {
                            Operation::FirstByHva => ControlFlow::Break(()),
                            _ => ControlFlow::Continue(()),
                        }
                    });
                    frames
                };
                sampler.look_ups::<KEYS, _>(|| (), look_up, |cost| sink(Sample::new(step, cost)));
            }
            Operation::ById => {
                if <<S::Reader as Reader>::Held<'_> as Lookup>::HAS_IDS {
                    let look_up = |key: usize| reader.hold().by_id(keys.ids[key]);
                    sampler.look_ups::<KEYS, _>(
                        || (),
                        look_up,
                        |cost| sink(Sample::new(step, cost)),
                    );
                }
            }
            Operation::Add | Operation::Delete => self.add_and_delete(input, sink),
            Operation::Move => self.relocate(input, sink),
            Operation::BesideWriter | Operation::WriterRate => {
                self.beside_writer(input, sink);
            }
            Operation::ByGfn | Operation::ByGfnHeld | Operation::Again | Operation::AgainHeld => {
                by_gfn(reader, step, input, sink);
            }
        }
        Ok(())
    }
}

/// Measures the look-ups that every scheme has.
fn by_gfn<R: Reader>(mut reader: R, step: Operation, input: &Input, sink: Sink<'_>) {
    let (keys, sampler) = match step {
        Operation::ByGfn | Operation::ByGfnHeld => (&input.keys.gfns, input.sampler),
        _ => (&input.keys.same, input.sampler),
    };
    let sink = |cost| sink(Sample::new(step, cost));
    match step {
        Operation::ByGfn | Operation::Again => {
            sampler.look_ups::<KEYS, _>(|| (), |key| reader.hold().by_gfn(keys[key]), sink);
        }
        Operation::ByGfnHeld | Operation::AgainHeld => {
            let held = reader.hold();
            sampler.look_ups::<KEYS, _>(|| (), |key| held.by_gfn(keys[key]), sink);
        }
        _ => {}
    }
}

impl Subject<Input> for Floor {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn measure(&mut self, step: Operation, input: &Input, sink: Sink<'_>) -> Result<(), Wrong> {
        by_gfn(self.reader(), step, input, sink);
        Ok(())
    }
}
