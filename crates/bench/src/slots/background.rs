//! Work next to another thread that reads or changes the map.
//!
//! The other thread runs before the work begins. It has ended when the call returns, even by a
//! panic.

use crate::kit::{CacheLine, Random, shuffle};
use crate::slots::input::{KEYS, Keys, PlainSlot, SlotSet};
use crate::slots::scheme::{ByGfn, Change, Reader};
use pageferry_addr::Gfn;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Sets its flag when it is dropped.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The other thread's progress.
#[derive(Debug)]
pub(crate) struct Background {
    /// The number of operations that the other thread has done. It has a cache line of its own, so
    /// that it disturbs only its readers.
    done: CacheLine<AtomicU64>,
}

/// If two successive readings of the clock are further apart, this thread has lost its core.
const DESCHEDULED: Duration = Duration::from_micros(100);
/// While the other thread has a core, it completes an operation in less than this.
const STRIDE: Duration = Duration::from_millis(10);

impl Background {
    /// The number of operations that the other thread has done.
    pub(crate) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    fn add(&self, count: u64) {
        // Only the other thread stores.
        self.done.store(self.done() + count, Ordering::Relaxed);
    }

    /// Waits until the other thread makes progress while this one runs, so that both have a core.
    /// Returns whether it did. Gives up after `patience`, as on a machine with one core.
    pub(crate) fn meet(&self, patience: Duration) -> bool {
        let begun = Instant::now();
        while begun.elapsed() < patience {
            let (seen, start) = (self.done(), Instant::now());
            let mut last = start;
            loop {
                let now = Instant::now();
                if now - last > DESCHEDULED || now - start > STRIDE {
                    break;
                }
                if self.done() != seen {
                    return true;
                }
                last = now;
            }
            // The scheduler wakes a sleeping thread on an idle core, if there is one.
            thread::sleep(Duration::from_micros(50));
        }
        false
    }
}

/// Calls `beside` in a loop on another thread while `work` runs on this one.
fn beside<T>(mut beside: impl FnMut(&Background) + Send, work: impl FnOnce(&Background) -> T) -> T {
    let (stop, running) = (AtomicBool::new(false), AtomicBool::new(false));
    let background = Background {
        done: CacheLine(AtomicU64::new(0)),
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            // If `beside` panics, this keeps the main thread from waiting for it.
            let _running = Stop(&running);
            while !stop.load(Ordering::Relaxed) {
                beside(&background);
                running.store(true, Ordering::Relaxed);
            }
        });
        let _stop = Stop(&stop);
        while !running.load(Ordering::Relaxed) {
            thread::yield_now();
        }
        work(&background)
    })
}

/// Does `work` while another thread looks up random frames. Each look-up takes the protection.
pub(crate) fn beside_reader<R: Reader, T>(
    mut reader: R,
    keys: &Keys,
    work: impl FnOnce(&Background) -> T,
) -> T {
    let mut at = 0;
    let look_up = |background: &Background| {
        for _ in 0..16 {
            black_box(reader.hold().by_gfn(keys.gfns[at % KEYS]));
            at += 1;
        }
        background.add(16);
    };
    beside(look_up, work)
}

/// Does `work` while another thread changes `scheme` at full speed. Returns that thread's changes
/// per second, and the result of `work`.
///
/// For each slot in turn, the thread deletes it, adds it again, moves it to a free place, and moves
/// it back. So at any time at most one slot is not where the set has it, and in the end none.
pub(crate) fn beside_writer<S: Change, T>(
    scheme: &mut S,
    order: &Order,
    work: impl FnOnce(&Background) -> T,
) -> (f64, T) {
    let mut at = 0;
    let change = |background: &Background| {
        let (slot, place) = order.pair(at);
        scheme.delete(slot);
        background.add(1);
        scheme.add(slot);
        background.add(1);
        let moved = scheme.relocate(slot, place);
        background.add(1);
        scheme.relocate(moved, slot.start);
        background.add(1);
        at += 1;
    };
    beside(change, |background| {
        let (begun, before) = (Instant::now(), background.done());
        let done = work(background);
        let changes = background.done() - before;
        (changes as f64 / begun.elapsed().as_secs_f64(), done)
    })
}

/// Selects the chunks of look-ups during which the writer had a core: its rate was at least a third
/// of its best. The others show the cost of look-ups while the writer waits for a core. The result
/// is empty if the writer had no core during any chunk.
///
/// `chunks` are pairs of a cost in nanoseconds and a rate in changes per second. With `slow`, the
/// writer needs longer than a chunk for a change. Then a chunk does not show whether the writer had
/// a core, and all chunks count.
pub(crate) fn beside_running_writer(
    chunks: &[(f64, f64)],
    slow: bool,
) -> impl Iterator<Item = (f64, f64)> {
    let best = chunks.iter().map(|chunk| chunk.1).fold(0.0, f64::max);
    chunks
        .iter()
        .copied()
        .filter(move |chunk| slow || (chunk.1 > 0.0 && chunk.1 * 3.0 >= best))
}

/// The slots and the free places of a set, in random order.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    slots: Vec<PlainSlot>,
    free: Vec<Gfn>,
}

impl Order {
    /// The order that `seed` determines.
    pub(crate) fn new(set: &SlotSet, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let (mut slots, mut free) = (set.slots().to_vec(), set.free().to_vec());
        shuffle(&mut random, &mut slots);
        shuffle(&mut random, &mut free);
        Self { slots, free }
    }

    /// Pair number `at` of a slot and a free place. Any number is valid.
    pub(crate) fn pair(&self, at: usize) -> (PlainSlot, Gfn) {
        (
            self.slots[at % self.slots.len()],
            self.free[at % self.free.len()],
        )
    }

    /// Batch number `number`: at most `most` different slots, and as many different places. It has
    /// at most half of all slots, and at least one. Any number is valid.
    pub(crate) fn batch(&self, number: usize, most: usize) -> (&[PlainSlot], &[Gfn]) {
        let size = most.min(self.slots.len() / 2).min(self.free.len()).max(1);
        let at = |len: usize| number % (len / size) * size;
        let (slot, place) = (at(self.slots.len()), at(self.free.len()));
        (
            &self.slots[slot..slot + size],
            &self.free[place..place + size],
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slots::host;
    use crate::slots::scheme::{LockedTree, Scheme};

    fn built(count: u32) -> (SlotSet, LockedTree) {
        let set = SlotSet::new(count, host::base().expect("address space"), 1);
        let mut tree = LockedTree::empty();
        set.slots().iter().for_each(|slot| tree.add(*slot));
        (set, tree)
    }

    #[test]
    fn a_writer_leaves_the_layout_as_it_was_and_counts_its_changes() {
        let (set, mut tree) = built(20);
        let order = Order::new(&set, 1);
        let (rate, done) = beside_writer(&mut tree, &order, |writer| {
            let (begun, before) = (Instant::now(), writer.done());
            while writer.done() < before + 8 && begun.elapsed() < Duration::from_secs(20) {
                thread::yield_now();
            }
            writer.done() - before
        });
        assert!(done >= 8 && rate > 0.0, "{done} {rate}");
        let mut reader = tree.reader();
        for slot in set.slots() {
            assert_eq!(reader.hold().by_gfn(slot.start), Some(slot.hva));
        }
    }

    #[test]
    fn chunks_without_their_writer_do_not_count() {
        let chunks = [(30.0, 9e5), (10.0, 0.0), (31.0, 8e5), (11.0, 1e5)];
        let costs = |slow| beside_running_writer(&chunks, slow).map(|chunk| chunk.0);
        assert!(costs(false).eq([30.0, 31.0]));
        assert!(costs(true).eq([30.0, 10.0, 31.0, 11.0]));
        assert_eq!(beside_running_writer(&[(10.0, 0.0)], false).count(), 0);
    }

    #[test]
    fn a_panic_in_the_work_ends_the_reader_too() {
        let (set, tree) = built(10);
        let keys = Keys::new(&set, 1);
        let work = || beside_reader(tree.reader(), &keys, |_| panic!("on purpose"));
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        assert!(result.is_err());
    }

    #[test]
    fn batches_hold_different_slots_and_places() {
        for count in [4, 10, 100] {
            let order = Order::new(&built(count).0, 2);
            for number in 0..50 {
                let (slots, places) = order.batch(number, 16);
                assert!(!slots.is_empty() && slots.len() == places.len());
                assert!(slots.len() <= 16 && slots.len() * 2 <= count as usize);
                let ids: std::collections::BTreeSet<u16> = slots.iter().map(|s| s.id).collect();
                assert_eq!(ids.len(), slots.len());
            }
        }
    }
}
