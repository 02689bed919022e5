//! A lack of memory is an error that leaves everything unchanged.

use crate::allocator::{live, with_allocations};
use crate::model::driver::{End, Pair};
use crate::model::plain::{compare_newest, compare_sample_newest, compare_whole};
use crate::model::random::{Churn, Shape};
use pageferry_addr::{Gfn, Hva};
use pageferry_memslot::{Limits, Request, SlotError, SlotWriter};
use pageferry_testkit::Random;

const LIMITS: Limits = Limits {
    address_spaces: 1,
    max_slots: 2000,
    max_slot_pages: 1 << 20,
    gfn_limit: Gfn(1 << 30),
    shared_last_used: false,
    max_retired: usize::MAX,
};

fn is_out_of_memory(error: &SlotError) -> bool {
    matches!(error, SlotError::OutOfMemory(_))
}

/// Tries `request` with no allocation, then with one, and so on, until it succeeds. After each
/// failure the table must be unchanged. Returns the number of failures.
fn step(pair: &mut Pair, request: Request<u32>) -> usize {
    let refused = (0..)
        .find(|&allocations| {
            let before = (
                pair.writer.generation(),
                pair.writer.len(),
                pair.writer.pages(),
            );
            let begun = with_allocations(allocations, || pair.writer.begin(request).map(drop));
            let Err(error) = begun else {
                // The update was aborted, which takes a generation unless the request changes
                // nothing.
                if pair.writer.generation() != before.0 {
                    pair.model.give_up();
                }
                return true;
            };
            if !is_out_of_memory(&error) {
                return true;
            }
            let after = (
                pair.writer.generation(),
                pair.writer.len(),
                pair.writer.pages(),
            );
            assert_eq!(before, after, "{request:?}");
            compare_sample_newest(&pair.reader.pin(), &pair.model, request.gpa.gfn().0);
            false
        })
        .expect("some number of allocations suffices");
    // Now the whole operation. The commit uses memory that the update has reserved, so it allocates
    // nothing.
    let old = pair.model.get(request.address_space, request.id).copied();
    let plan = pair.model.plan(&request);
    let done = match (pair.writer.begin(request), plan) {
        (Ok(update), Some(kind)) => {
            let change = with_allocations(0, || update.commit());
            crate::model::plain::assert_change(change, kind, old, &request);
            Some(kind)
        }
        (Err(_), None) => None,
        (done, plan) => panic!("{request:?} gave {:?}, not {plan:?}", done.is_ok()),
    };
    if let Some(kind) = done {
        pair.model.apply(&request, kind);
    }
    assert_eq!(pair.writer.generation().number(), pair.model.generation());
    refused
}

/// Grows an empty table to a tree of several levels and shrinks it again. At each size it makes
/// random changes, with and without a reader's guard.
#[test]
fn an_operation_without_memory_changes_nothing() {
    let sizes: &[usize] = if cfg!(miri) {
        &[6]
    } else {
        &[3, 20, 70, 140, 600, 1500]
    };
    let before = live();
    for (&size, guarded) in sizes.iter().flat_map(|size| [(size, false), (size, true)]) {
        let shape = Shape {
            ids: 2 * size as u16,
            frames: 6 * size as u64,
            host_pages: 2 * size as u64,
            most_pages: 12,
        };
        let (mut pair, mut churn) = (Pair::new(LIMITS), Churn::new(shape, size as u64));
        let mut holder = pair.writer.table().reader();
        let guard = guarded.then(|| holder.pin());
        let mut refused = 0;
        let churns = if cfg!(miri) { 10 } else { 3 * size + 200 };
        for (creations, deletions, steps) in [(7, 1, 3 * size), (3, 3, churns), (1, 6, 4 * size)] {
            for _ in 0..steps {
                let request = churn.request(&pair.model, creations, deletions);
                refused += step(&mut pair, request);
            }
            compare_whole(pair.writer.view(), &pair.model, 0);
            compare_newest(&pair.reader.pin(), &pair.model, shape.frames);
        }
        let left: Vec<_> = pair.model.slots().copied().collect();
        for slot in left {
            refused += step(&mut pair, Request::delete(slot.space, slot.id));
        }
        assert!(pair.writer.is_empty());
        assert!(refused > size, "{refused} refusals at {size}");
        drop(guard);
    }
    assert_eq!(live(), before, "memory is left behind");
}

/// Slots that come in ascending order fill leaves and add levels. Deletions from both ends remove
/// them.
#[test]
fn slots_in_order_come_and_go_without_memory() {
    let slots: u16 = if cfg!(miri) { 20 } else { 2000 };
    let request = |id: u16| Request {
        gpa: Gfn(u64::from(id) * 4).gpa(),
        size: 2 << 12,
        hva: Hva(u64::from(id) << 14),
        ..Request::delete(0, id)
    };
    let mut random = Random::new(5);
    for backwards in [false, true] {
        let mut pair = Pair::new(LIMITS);
        let in_order = |id: u16| if backwards { slots - 1 - id } else { id };
        for id in (0..slots).map(in_order) {
            step(&mut pair, request(id));
        }
        // Move a slot to another leaf, and behind all others.
        for _ in 0..slots / 8 {
            let id = random.below(u64::from(slots)) as u16;
            let frame = (u64::from(slots) + random.below(40)) * 4;
            step(
                &mut pair,
                Request {
                    gpa: Gfn(frame).gpa(),
                    ..request(id)
                },
            );
        }
        compare_whole(pair.writer.view(), &pair.model, 0);
        for id in 0..slots {
            step(&mut pair, Request::delete(0, id));
        }
        assert!(pair.writer.is_empty());
    }
}

/// Each refused allocation of a new table is an error that leaves no memory behind.
#[test]
fn a_table_without_memory_is_an_error() {
    let many = Limits {
        address_spaces: 3,
        shared_last_used: true,
        ..LIMITS
    };
    for (limits, least) in [(LIMITS, 3), (many, 3 * 4)] {
        let before = live();
        let refused = (0..).find(|&count| {
            let made = with_allocations(count, || SlotWriter::<u32>::try_new(limits, None));
            let done = match made {
                Ok(mut writer) => writer.set(Request::delete(0, 1)).is_err(),
                Err(error) => {
                    assert!(is_out_of_memory(&error), "{error}");
                    false
                }
            };
            assert_eq!(live(), before, "memory is left behind after {count}");
            done
        });
        assert!(
            refused.is_some_and(|refused| refused > least),
            "{refused:?}"
        );
    }
}

#[test]
fn a_reader_without_memory_is_an_error() {
    let mut writer = SlotWriter::<()>::new(Limits::default());
    let table = writer.table();
    let refused = with_allocations(0, || table.try_reader().map(drop)).unwrap_err();
    assert!(is_out_of_memory(&refused), "{refused}");
    assert!(
        refused.to_string().contains("refused 128 bytes"),
        "{refused}"
    );
    let one = Request {
        size: 1 << 12,
        ..Request::delete(0, 1)
    };
    writer.set(one).unwrap();
    let mut reader = table.try_reader().expect("there is memory now");
    assert!(reader.pin().lookup(Gfn(0)).is_some());
    // The record of a dropped reader serves the next one without memory.
    drop(reader);
    let again = with_allocations(0, || table.try_reader().map(drop));
    assert!(again.is_ok());
}

/// Without memory for the list of retired things, nothing is freed too early, and everything is
/// freed later.
#[test]
fn what_waits_is_kept_without_memory() {
    const COUNT: u16 = if cfg!(miri) { 20 } else { 100 };
    let mut pair = Pair::new(LIMITS);
    let mut holder = pair.writer.table().reader();
    let request = |id: u16| Request {
        gpa: Gfn(u64::from(id) * 4).gpa(),
        size: 1 << 12,
        hva: Hva(u64::from(id) << 12),
        ..Request::delete(0, id)
    };
    for id in 0..COUNT {
        pair.step(request(id), End::Set);
    }
    let guard = holder.pin();
    let view = guard.view();
    for id in 0..COUNT {
        pair.step(Request::delete(0, id), End::Set);
        let left = with_allocations(0, || pair.writer.reclaim());
        assert!(left > usize::from(id));
    }
    assert_eq!(view.iter().count(), usize::from(COUNT));
    drop(guard);
    assert_eq!(pair.writer.reclaim(), 0);
}
