//! One or two readers beside the writer, in all interleavings with few preemptions.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pageferry-memslot --profile stress --test loom`
//!
//! Under loom, nodes have four entries, and a leaf that is the whole tree by id has up to eight. A
//! model fails if a reader uses a slot or node that was freed too early. It also fails if a reader
//! sees a state that is neither old nor new. Each model returns the outcomes of its readers, and
//! the test names outcomes that must occur.
//!
//! Broken rules and the models that fail (tried by hand):
//! - the generation published before the cells, or nodes born a version early:
//!   `a_view_sees_a_move_wholly_or_not`, `a_view_sees_a_deletion_wholly_or_not`,
//!   `a_view_outlives_changes`, `a_leaf_splits_under_readers`;
//! - a moving slot taken from the old place before it is put at the new: the four moves over
//!   itself, `a_moved_slot_is_never_valid_at_both_places`;
//! - a slot marked invalid after the publication:
//!   `a_slot_that_goes_is_seen_valid_then_invalid_then_not`, `a_move_up_over_itself`,
//!   `a_moved_slot_is_never_valid_at_both_places`, `an_update_that_is_given_up`;
//! - flags changed without a mark: `flags_change_at_once_and_stay_changed`;
//! - the slot found last kept over epochs: `the_slot_found_last_is_not_found_after_it_has_gone`;
//! - places of the shared last-used slot not emptied, or one place for all epochs:
//!   `a_slot_that_another_reader_found_last`;
//! - two leaves read at the last complete version:
//!   `a_slot_that_came_stays_seen_from_the_next_leaf`;
//! - records used without a check of their version: `a_view_sees_a_move_wholly_or_not`,
//!   `a_view_outlives_changes`, `flags_change_at_once_and_stay_changed`.
#![cfg(loom)]

use loom::thread;
use pageferry_addr::{Gfn, Hva};
use pageferry_memslot::{
    Limits, Request, Slot, SlotFlags, SlotGuard, SlotReader, SlotView, SlotWriter,
};
use pageferry_testkit::model::explore;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;

/// The result of a look-up: the slot's first frame and data, and whether it is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Found {
    Nothing,
    Invalid(u64, u32),
    Valid(u64, u32),
}
use Found::{Invalid, Nothing, Valid};

fn found(slot: Option<&Slot<u32>>) -> Found {
    let Some(slot) = slot else { return Nothing };
    let start = slot.range.start().0;
    if slot.is_invalid() {
        Invalid(start, slot.data)
    } else {
        Valid(start, slot.data)
    }
}

fn slot(id: u16, start: u64, pages: u64, data: u32) -> Request<u32> {
    Request {
        gpa: Gfn(start).gpa(),
        size: pages << 12,
        // Slots with odd and with even ids share host memory.
        hva: Hva(u64::from(id % 2) << 20),
        data,
        ..Request::delete(0, id)
    }
}

fn host(id: u16) -> std::ops::Range<Hva> {
    let start = u64::from(id % 2) << 20;
    Hva(start)..Hva(start + 1)
}

/// Runs `body` on a reader's thread beside `write`, on a table of `slots`.
struct Model {
    slots: Vec<Request<u32>>,
    limits: Limits,
    preemptions: usize,
}

impl Model {
    fn of(slots: impl IntoIterator<Item = Request<u32>>) -> Self {
        Self {
            slots: slots.into_iter().collect(),
            limits: Limits::default(),
            preemptions: 3,
        }
    }

    /// Returns all outcomes of `read` on a view that is made beside `write`. It allows fewer
    /// preemptions, as views take more steps.
    fn views<O: Ord + Debug + Send + 'static>(
        mut self,
        read: impl Fn(SlotView<'_, u32>) -> O + Send + Sync + 'static,
        write: impl Fn(&mut SlotWriter<u32>) + Send + Sync + 'static,
    ) -> BTreeSet<O> {
        self.preemptions -= 1;
        self.explore(1, move |reader| read(reader.pin().view()), write)
    }

    /// Returns all outcomes of `readers` readers.
    fn explore<O: Ord + Debug + Send + 'static>(
        self,
        readers: usize,
        read: impl Fn(&mut SlotReader<u32>) -> O + Send + Sync + 'static,
        write: impl Fn(&mut SlotWriter<u32>) + Send + Sync + 'static,
    ) -> BTreeSet<O> {
        let read = Arc::new(read);
        let seen = explore(self.preemptions, move || {
            let mut writer = SlotWriter::new(self.limits);
            for request in &self.slots {
                writer.set(*request).unwrap();
            }
            assert_eq!(writer.reclaim(), 0);
            let threads: Vec<_> = (0..readers)
                .map(|_| {
                    let (mut reader, read) = (writer.table().reader(), Arc::clone(&read));
                    thread::spawn(move || read(&mut reader))
                })
                .collect();
            write(&mut writer);
            let outcomes: Vec<O> = threads.into_iter().map(|t| t.join().unwrap()).collect();
            assert_eq!(writer.reclaim(), 0, "nobody reads any more");
            outcomes
        });
        seen.into_iter().flatten().collect()
    }
}

/// The results of all look-ups of one view for slot `id`: at two frames, by id, and by host
/// address.
fn all_of(view: SlotView<'_, u32>, id: u16, frames: [u64; 2]) -> [Found; 4] {
    let mut in_host = view.iter_hva(host(id)).filter(|slot| slot.id == id);
    let by_hva = found(in_host.next());
    assert!(in_host.next().is_none(), "one slot twice");
    let [first, second] = frames.map(|gfn| found(view.lookup(Gfn(gfn))));
    [first, second, found(view.by_id(id)), by_hva]
}

/// The same without the marks, which may change under a view.
fn unmarked<const N: usize>(all: [Found; N]) -> [Found; N] {
    all.map(|found| match found {
        Invalid(start, data) => Valid(start, data),
        other => other,
    })
}

fn see(guard: &SlotGuard<'_, u32>, gfn: u64) -> Found {
    found(guard.lookup(Gfn(gfn)))
}

#[test]
fn a_slot_that_comes_is_seen_or_not() {
    let model = Model::of([]);
    let seen = model.explore(
        1,
        |reader| {
            let guard = reader.pin();
            [see(&guard, 10), see(&guard, 11)]
        },
        |writer| {
            writer.set(slot(1, 10, 2, 7)).unwrap();
        },
    );
    let new = Valid(10, 7);
    assert_eq!(
        seen,
        BTreeSet::from([[Nothing, Nothing], [Nothing, new], [new, new]])
    );
}

/// Looks twice for a new slot that is the last of one leaf. A look-up of its last frame goes to the
/// next leaf.
fn comes_before_the_next_leaf(frames: [u64; 2]) {
    let starts = [0, 10, 20, 30, 40, 50];
    let mut slots: Vec<_> = (0..6)
        .map(|i| slot(i, starts[usize::from(i)], 1, 0))
        .collect();
    // The second leaf still begins at frame 40, and the first has room.
    slots.push(Request::delete(0, 4));
    slots.push(Request::delete(0, 1));
    let seen = Model::of(slots).explore(
        1,
        move |reader| {
            let guard = reader.pin();
            let first = see(&guard, frames[0]);
            // Make another slot the one found last.
            let _ = see(&guard, 0);
            [first, see(&guard, frames[1])]
        },
        |writer| {
            writer.set(slot(1, 38, 4, 7)).unwrap();
        },
    );
    let new = Valid(38, 7);
    assert_eq!(
        seen,
        BTreeSet::from([[Nothing, Nothing], [Nothing, new], [new, new]])
    );
}

#[test]
fn a_slot_that_came_stays_seen_from_the_next_leaf() {
    comes_before_the_next_leaf([38, 41]);
}

#[test]
fn a_slot_that_was_seen_from_the_next_leaf_stays_seen() {
    comes_before_the_next_leaf([41, 38]);
}

#[test]
fn a_slot_that_goes_is_seen_valid_then_invalid_then_not() {
    let model = Model::of([slot(1, 10, 2, 7)]);
    let seen = model.explore(
        1,
        |reader| {
            let guard = reader.pin();
            let first = guard.lookup(Gfn(10));
            let both = [found(first), see(&guard, 11)];
            // The record may be used at any progress of the writer.
            assert!(first.is_none_or(|slot| slot.data == 7));
            both
        },
        |writer| {
            writer.set(Request::delete(0, 1)).unwrap();
            writer.reclaim();
        },
    );
    let (valid, invalid) = (Valid(10, 7), Invalid(10, 7));
    let possible = BTreeSet::from([
        [valid, valid],
        [valid, invalid],
        [valid, Nothing],
        [invalid, invalid],
        [invalid, Nothing],
        [Nothing, Nothing],
    ]);
    assert_eq!(seen, possible);
}

#[test]
fn the_slot_found_last_is_not_found_after_it_has_gone() {
    let model = Model::of([slot(1, 10, 2, 7)]);
    let seen = model.explore(
        1,
        |reader| [10, 11, 10].map(|gfn| see(&reader.pin(), gfn)),
        |writer| {
            writer.set(Request::delete(0, 1)).unwrap();
            writer.reclaim();
        },
    );
    let rank = |found: &Found| match found {
        Valid(..) => 0,
        Invalid(..) => 1,
        Nothing => 2,
    };
    assert!(
        seen.iter().all(|seen| seen.is_sorted_by_key(rank)),
        "{seen:?}"
    );
    assert!(seen.contains(&[Valid(10, 7); 3]) && seen.contains(&[Nothing; 3]));
    assert!(seen.contains(&[Valid(10, 7), Nothing, Nothing]));
}

/// Two readers share the slot that they found last.
#[test]
fn a_slot_that_another_reader_found_last() {
    let mut model = Model::of([slot(1, 10, 2, 7)]);
    model.limits.shared_last_used = true;
    let seen = model.explore(
        2,
        |reader| see(&reader.pin(), 10),
        |writer| {
            writer.set(Request::delete(0, 1)).unwrap();
            writer.reclaim();
        },
    );
    assert_eq!(
        seen,
        BTreeSet::from([Nothing, Invalid(10, 7), Valid(10, 7)])
    );
}

/// Moves a slot so that frames 12 and 13 are in it before and after.
fn overlapping_move(from: u64, to: u64) {
    let seen = Model::of([slot(1, from, 4, 1)]).explore(
        1,
        |reader| {
            let guard = reader.pin();
            [see(&guard, 12), see(&guard, 10), see(&guard, 13)]
        },
        move |writer| {
            writer.set(slot(1, to, 4, 2)).unwrap();
            writer.reclaim();
        },
    );
    for [first, only_one, last] in &seen {
        assert!(*first != Nothing && *last != Nothing, "{seen:?}");
        // Frame 10 is only in the lower one of the two.
        let (old, new) = (Valid(from, 1), Valid(to, 2));
        match first {
            f if *f == new => {
                assert_ne!(*only_one, old, "valid at both places");
                assert_ne!(*last, old, "valid at both places");
            }
            Invalid(..) => assert!(*only_one != old && *last != old, "{seen:?}"),
            _ => assert_eq!(*first, old),
        }
    }
    let firsts: BTreeSet<_> = seen.iter().map(|seen| seen[0]).collect();
    assert_eq!(
        firsts,
        BTreeSet::from([Valid(from, 1), Invalid(from, 1), Valid(to, 2)])
    );
}

#[test]
fn a_move_up_over_itself() {
    overlapping_move(10, 12);
}

#[test]
fn a_move_down_over_itself() {
    overlapping_move(12, 10);
}

/// The same with the two places in two leaves: frames from 40 on are in the second.
fn overlapping_move_between_leaves(from: u64, to: u64) {
    let mut slots: Vec<_> = [0, 10, 20, 30, 40, 50]
        .iter()
        .enumerate()
        .map(|(i, &start)| slot(i as u16, start, 1, 0))
        .collect();
    slots.push(Request::delete(0, 4));
    slots.push(Request::delete(0, 1));
    slots.push(slot(1, from, 4, 1));
    let seen = Model::of(slots).explore(
        1,
        |reader| {
            let guard = reader.pin();
            [see(&guard, 41), see(&guard, 41)]
        },
        move |writer| {
            writer.set(slot(1, to, 4, 2)).unwrap();
            writer.reclaim();
        },
    );
    let rank = |found: &Found| match found {
        Valid(_, 1) => 0,
        Invalid(_, 1) => 1,
        Valid(_, 2) => 2,
        _ => panic!("neither old nor new: {found:?}"),
    };
    assert!(
        seen.iter().all(|seen| seen.is_sorted_by_key(rank)),
        "{seen:?}"
    );
    let firsts: BTreeSet<_> = seen.iter().map(|seen| seen[0]).collect();
    assert_eq!(firsts.len(), 3, "{seen:?}");
}

#[test]
fn a_move_up_over_itself_into_the_next_leaf() {
    overlapping_move_between_leaves(38, 40);
}

#[test]
fn a_move_down_over_itself_into_the_leaf_before() {
    overlapping_move_between_leaves(40, 38);
}

/// Moves slot 1 of `slots` from frame 10 to `to`. In the newest state it is at one of the places,
/// and never valid at both.
fn moves_far(slots: Vec<Request<u32>>, to: u64) {
    let seen = Model::of(slots).explore(
        1,
        move |reader| {
            let guard = reader.pin();
            [see(&guard, to), see(&guard, 10), see(&guard, to)]
        },
        move |writer| {
            writer.set(slot(1, to, 1, 2)).unwrap();
            writer.reclaim();
        },
    );
    let (old, new) = (Valid(10, 1), Valid(to, 2));
    for [first, at_old, last] in &seen {
        assert!(*first == Nothing || *first == new, "{seen:?}");
        if *first == new {
            assert!(*at_old != old && *last == new, "{seen:?}");
        }
        if *at_old == Nothing {
            assert_eq!(*last, new, "gone and nowhere: {seen:?}");
        }
    }
    assert!(seen.contains(&[Nothing, old, Nothing]) && seen.contains(&[new, Nothing, new]));
}

#[test]
fn a_moved_slot_is_never_valid_at_both_places() {
    moves_far(in_order(5), 90);
}

/// All look-ups of one view return one version. Here a slot moves, and all trees have two levels.
#[test]
fn a_view_sees_a_move_wholly_or_not() {
    let slots = (0..5).map(|i| slot(i, u64::from(i) * 10, 1, 1));
    let seen = Model::of(slots).explore(
        1,
        |reader| {
            let guard = reader.pin();
            let view = guard.view();
            let all = all_of(view, 1, [10, 90]);
            (view.generation().number() - 5, unmarked(all))
        },
        |writer| {
            writer.set(slot(1, 90, 1, 2)).unwrap();
            writer.reclaim();
        },
    );
    let (old, new) = (Valid(10, 1), Valid(90, 2));
    let possible = BTreeSet::from([(0, [old, Nothing, old, old]), (1, [Nothing, new, new, new])]);
    assert_eq!(seen, possible);
}

/// A slot moves behind all others of another leaf, which has room. An older view must not find it
/// there.
#[test]
fn a_view_sees_a_move_to_the_end_of_another_leaf_wholly_or_not() {
    let seen = Model::of(in_order(6)).views(
        |view| {
            let frames = [10, 60].map(|gfn| found(view.lookup(Gfn(gfn))));
            assert_eq!(view.iter().count(), 6);
            unmarked(frames)
        },
        |writer| {
            writer.set(slot(1, 60, 1, 2)).unwrap();
        },
    );
    let (old, new) = (Valid(10, 1), Valid(60, 2));
    assert_eq!(seen, BTreeSet::from([[old, Nothing], [Nothing, new]]));
}

#[test]
fn a_view_sees_a_deletion_wholly_or_not() {
    let slots = [slot(1, 10, 1, 1), slot(3, 30, 1, 3)];
    let seen = Model::of(slots).explore(
        1,
        |reader| {
            let guard = reader.pin();
            let all = all_of(guard.view(), 1, [10, 30]);
            unmarked(all)
        },
        |writer| {
            writer.set(Request::delete(0, 1)).unwrap();
            writer.reclaim();
        },
    );
    let (old, other) = (Valid(10, 1), Valid(30, 3));
    let possible = BTreeSet::from([[old, other, old, old], [Nothing, other, Nothing, Nothing]]);
    assert_eq!(seen, possible);
}

/// A view stays at its version over two changes. The second change reuses memory of the first.
#[test]
fn a_view_outlives_changes() {
    let seen = Model::of([slot(1, 10, 1, 1)]).views(
        |view| {
            let first = unmarked(all_of(view, 1, [10, 30]));
            let again = unmarked(all_of(view, 1, [10, 30]));
            assert_eq!(first, again);
            first
        },
        |writer| {
            writer.set(slot(1, 30, 1, 2)).unwrap();
            writer.reclaim();
            writer.set(Request::delete(0, 1)).unwrap();
            writer.reclaim();
        },
    );
    let (old, new) = (Valid(10, 1), Valid(30, 2));
    let possible = BTreeSet::from([
        [old, Nothing, old, old],
        [Nothing, new, new, new],
        [Nothing; 4],
    ]);
    assert_eq!(seen, possible);
}

/// A slot is deleted, created again at the same place, and deleted again.
#[test]
fn a_view_sees_a_slot_that_goes_and_comes_again() {
    let slots = in_order(3);
    let seen = Model::of(slots).views(
        |view| {
            let all = unmarked(all_of(view, 1, [10, 10]));
            assert_eq!(all, [all[0]; 4]);
            (view.generation().number() - 3, all[0])
        },
        |writer| {
            writer.set(Request::delete(0, 1)).unwrap();
            writer.set(slot(1, 10, 1, 2)).unwrap();
            writer.reclaim();
            writer.set(Request::delete(0, 1)).unwrap();
            writer.reclaim();
        },
    );
    let possible = [
        (0, Valid(10, 1)),
        (1, Nothing),
        (2, Valid(10, 2)),
        (3, Nothing),
    ];
    assert_eq!(seen, BTreeSet::from(possible));
}

/// A slot moves to the former place of another, and back.
#[test]
fn a_view_sees_a_slot_that_moves_to_where_another_was() {
    let seen = Model::of(in_order(4)).views(
        |view| {
            let places = [10, 20].map(|gfn| unmarked([found(view.lookup(Gfn(gfn)))])[0]);
            let by_id = [1, 2].map(|id| unmarked([found(view.by_id(id))])[0]);
            assert_eq!(view.iter_hva(host(1)).count(), 2);
            (view.generation().number() - 4, places, by_id)
        },
        |writer| {
            writer.set(Request::delete(0, 2)).unwrap();
            writer.set(slot(1, 20, 1, 7)).unwrap();
            writer.reclaim();
            writer.set(slot(1, 10, 1, 8)).unwrap();
            writer.reclaim();
        },
    );
    let (one, two) = (Valid(10, 1), Valid(20, 1));
    let possible = [
        (0, [one, two], [one, two]),
        (1, [one, Nothing], [one, Nothing]),
        (2, [Nothing, Valid(20, 7)], [Valid(20, 7), Nothing]),
        (3, [Valid(10, 8), Nothing], [Valid(10, 8), Nothing]),
    ];
    assert_eq!(seen, BTreeSet::from(possible));
}

/// Two slots come behind the others of a leaf. A reader that sees the second sees the first too.
#[test]
fn slots_that_come_in_order_are_seen_in_order() {
    let seen = Model::of([slot(1, 10, 1, 1)]).explore(
        1,
        |reader| {
            let guard = reader.pin();
            // Make another slot the one found last.
            assert_eq!(see(&guard, 10), Valid(10, 1));
            [see(&guard, 30), see(&guard, 20)]
        },
        |writer| {
            writer.set(slot(2, 20, 1, 2)).unwrap();
            writer.set(slot(3, 30, 1, 3)).unwrap();
        },
    );
    let (first, second) = (Valid(20, 2), Valid(30, 3));
    assert_eq!(
        seen,
        BTreeSet::from([[Nothing, Nothing], [Nothing, first], [second, first]])
    );
}

/// The same under a view, which sees the slots that had come when it was made.
#[test]
fn a_view_sees_no_slot_that_comes_into_its_leaf() {
    let mut model = Model::of([slot(1, 10, 1, 1)]);
    // A third preemption takes three times as long, and one finds the broken rule.
    model.preemptions = 2;
    let seen = model.explore(
        1,
        |reader| {
            let guard = reader.pin();
            let view = guard.view();
            let come = view.generation().number() - 1;
            // The new slots have the same host memory as slot 1.
            assert_eq!(view.iter_hva(host(1)).count() as u64, 1 + come);
            assert_eq!(view.iter().count() as u64, 1 + come);
            let last = 10 * (1 + come);
            let floor = view.lookup_or_below(Gfn(35)).unwrap();
            assert_eq!(floor.range.start(), Gfn(last));
            come
        },
        |writer| {
            writer.set(slot(3, 20, 1, 7)).unwrap();
            writer.set(slot(5, 30, 1, 7)).unwrap();
        },
    );
    assert_eq!(seen, BTreeSet::from([0, 1, 2]));
}

/// A leaf takes over the frames of a neighbour that goes, and a slot comes into it there. An older
/// view finds the neighbour.
#[test]
fn a_slot_comes_where_another_leaf_was() {
    let mut slots = in_order(9);
    // Leaves of one slot each, at frames 0, 40 and 80.
    slots.extend([1, 2, 3, 5, 6, 7].map(|id| Request::delete(0, id)));
    let before = slots.len() as u64;
    let seen = Model::of(slots).views(
        move |view| {
            let starts: Vec<u64> = view.iter().map(|slot| slot.range.start().0).collect();
            let below = view.lookup_or_below(Gfn(60)).unwrap();
            (
                view.generation().number() - before,
                starts,
                below.range.start().0,
            )
        },
        |writer| {
            writer.set(Request::delete(0, 4)).unwrap();
            writer.set(slot(1, 50, 1, 7)).unwrap();
            writer.reclaim();
        },
    );
    let possible = [
        (0, vec![0, 40, 80], 40),
        (1, vec![0, 80], 0),
        (2, vec![0, 50, 80], 50),
    ];
    assert_eq!(seen, BTreeSet::from(possible));
}

/// A slot comes behind the others of a leaf, and another record replaces it. An older view finds
/// neither.
#[test]
fn a_view_sees_nothing_of_a_slot_that_came_and_changed() {
    let mut model = Model::of([slot(1, 10, 1, 1)]);
    // One preemption finds the broken rule, in a quarter of the time that two take.
    model.preemptions = 2;
    let seen = model.views(
        |view| {
            let all = all_of(view, 3, [20, 20]);
            assert_eq!(all, [all[0]; 4]);
            assert_eq!(all_of(view, 1, [10, 10]), [Valid(10, 1); 4]);
            (view.generation().number() - 1, all[0])
        },
        |writer| {
            writer.set(slot(3, 20, 1, 7)).unwrap();
            let flags = SlotFlags::LOG_DIRTY_PAGES;
            let data = 8;
            writer
                .set(Request {
                    flags,
                    data,
                    ..slot(3, 20, 1, 7)
                })
                .unwrap();
            writer.reclaim();
        },
    );
    let possible = [(0, Nothing), (1, Valid(20, 7)), (2, Valid(20, 8))];
    assert_eq!(seen, BTreeSet::from(possible));
}

/// A leaf splits, and the root is replaced, under a view and a look-up of the newest state.
#[test]
fn a_leaf_splits_under_readers() {
    let slots = (0..4).map(|i| slot(i, u64::from(i) * 10, 1, 1));
    let seen = Model::of(slots).explore(
        1,
        |reader| {
            let guard = reader.pin();
            let newest = see(&guard, 15);
            let view = guard.view();
            assert_eq!(found(view.lookup(Gfn(30))), Valid(30, 1));
            assert_eq!(view.iter().count(), view.generation().number() as usize);
            (newest, found(view.lookup(Gfn(15))))
        },
        |writer| {
            writer.set(slot(5, 15, 1, 2)).unwrap();
            writer.reclaim();
        },
    );
    let new = Valid(15, 2);
    // A look-up of the newest state may be ahead of a view.
    let possible = [
        (Nothing, Nothing),
        (Nothing, new),
        (new, Nothing),
        (new, new),
    ];
    assert_eq!(seen, BTreeSet::from(possible));
}

/// Returns whether views find slot `changed` by id, in a tree whose form `write` changes. Views
/// must always find the three `others`. `before` changes come first.
fn forms(
    slots: Vec<Request<u32>>,
    changed: u16,
    others: [u16; 3],
    write: impl Fn(&mut SlotWriter<u32>) + Send + Sync + 'static,
) -> BTreeSet<(u64, bool)> {
    let before = slots.len() as u64;
    Model::of(slots).views(
        move |view| {
            for id in others {
                assert_eq!(view.by_id(id).map(|slot| slot.id), Some(id));
            }
            let there = view.by_id(changed).is_some();
            (view.generation().number() - before, there)
        },
        write,
    )
}

fn in_order(count: u16) -> Vec<Request<u32>> {
    (0..count)
        .map(|id| slot(id, u64::from(id) * 10, 1, 1))
        .collect()
}

/// The tree by id is one leaf of up to eight slots. It has room for four at first.
#[test]
fn one_leaf_grows_under_a_view() {
    let seen = forms(in_order(4), 4, [0, 1, 3], |writer| {
        writer.set(slot(4, 40, 1, 1)).unwrap();
        writer.reclaim();
    });
    assert_eq!(seen, BTreeSet::from([(0, false), (1, true)]));
}

#[test]
fn one_leaf_becomes_a_tree_under_a_view() {
    let seen = forms(in_order(8), 8, [0, 4, 7], |writer| {
        writer.set(slot(8, 80, 1, 1)).unwrap();
        writer.reclaim();
    });
    assert_eq!(seen, BTreeSet::from([(0, false), (1, true)]));
}

#[test]
fn a_tree_becomes_one_leaf_under_a_view() {
    let mut slots = in_order(9);
    // Leaves of three slots, one and one, by id.
    slots.extend([4, 5, 6, 0].map(|id| Request::delete(0, id)));
    let seen = forms(slots, 7, [1, 3, 8], |writer| {
        writer.set(Request::delete(0, 7)).unwrap();
        writer.reclaim();
    });
    assert_eq!(seen, BTreeSet::from([(0, true), (1, false)]));
}

#[test]
fn flags_change_at_once_and_stay_changed() {
    let model = Model::of([slot(1, 10, 2, 1)]);
    let seen = model.explore(
        1,
        |reader| {
            let guard = reader.pin();
            let seen = [10, 11].map(|gfn| see(&guard, gfn));
            let view = guard.view();
            let all = all_of(view, 1, [10, 11]);
            assert!(all.iter().all(|found| *found == all[0]), "{all:?}");
            (seen, all[0])
        },
        |writer| {
            let flags = SlotFlags::LOG_DIRTY_PAGES;
            let request = Request {
                flags,
                ..slot(1, 10, 2, 2)
            };
            writer.set(request).unwrap();
            writer.reclaim();
        },
    );
    let (old, new) = (Valid(10, 1), Valid(10, 2));
    let seen: BTreeSet<_> = seen.into_iter().map(|(newest, _)| newest).collect();
    assert_eq!(seen, BTreeSet::from([[old, old], [old, new], [new, new]]));
}

/// A reader that loads the same generation before and after, with nothing in progress, saw that
/// version.
#[test]
fn a_generation_that_has_not_changed_vouches_for_what_was_seen() {
    let model = Model::of([slot(1, 10, 1, 1)]);
    let seen = model.explore(
        1,
        |reader| {
            let guard = reader.pin();
            let before = guard.generation();
            let seen = [see(&guard, 10), see(&guard, 30)];
            let same = guard.generation() == before && !before.in_progress();
            same.then_some((before.number(), seen))
        },
        |writer| {
            writer.set(slot(1, 30, 1, 2)).unwrap();
            writer.reclaim();
        },
    );
    let vouched: BTreeSet<_> = seen.into_iter().flatten().collect();
    let (old, new) = (Valid(10, 1), Valid(30, 2));
    // In the first outcome, the slot's mark may come before the second load of the generation.
    assert!(vouched.contains(&(1, [old, Nothing])) && vouched.contains(&(2, [Nothing, new])));
    assert_eq!(vouched.len(), 2, "{vouched:?}");
}

/// An aborted update leaves the slot as it was. During the update the slot was invalid.
#[test]
fn an_update_that_is_given_up() {
    let model = Model::of([slot(1, 10, 1, 1)]);
    let seen = model.explore(
        1,
        |reader| {
            let guard = reader.pin();
            [see(&guard, 10), see(&guard, 10)]
        },
        |writer| drop(writer.begin(slot(1, 30, 1, 2)).unwrap()),
    );
    let (valid, invalid) = (Valid(10, 1), Invalid(10, 1));
    let possible = [
        [valid, valid],
        [valid, invalid],
        [invalid, invalid],
        [invalid, valid],
    ];
    assert_eq!(seen, BTreeSet::from(possible));
}
