//! Random requests against a plain model: a `BTreeMap` by id, and linear scans for everything else.

use pageferry_addr::{Gfn, GfnRange, Gpa, Hva};
use pageferry_memslot::{Change, LastUsed, Limits, Request, Slot, SlotError, SlotFlags, SlotTable};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

const SPACES: u16 = 2;
const IDS: u16 = 12;
/// All slots lie below this frame, so that they often meet.
const FRAMES: u64 = 40;
/// All host memory lies below this page.
const HOST_PAGES: u64 = 24;

type Model = BTreeMap<(u16, u16), Slot<u32>>;

fn requests() -> impl Strategy<Value = Request<u32>> {
    let place = (0..SPACES, 0..IDS, 0..FRAMES, 0..HOST_PAGES);
    let size = prop_oneof![1 => Just(0u64), 6 => 1..6u64];
    // Mostly sane flags; now and then anything at all.
    let flags = prop_oneof![
        8 => Just(0u32),
        3 => prop_oneof![Just(1u32), Just(8), Just(9), Just(2), Just(4), Just(12)],
        1 => 0..32u32
    ];
    (place, size, flags, any::<u32>()).prop_map(
        |((address_space, id, gfn, page), pages, flags, data)| Request {
            address_space,
            id,
            gpa: Gfn(gfn).gpa(),
            size: pages << 12,
            hva: Hva(page << 12),
            flags: SlotFlags(flags),
            data,
        },
    )
}

/// One step: a request as it comes, or one that names an existing slot and changes one thing of it, which a
/// random one seldom hits.
#[derive(Clone, Debug)]
enum Step {
    Any(Request<u32>),
    Move { index: usize, gfn: u64 },
    Flags { index: usize, flags: u32 },
    Delete { index: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let index = 0..64usize;
    let step = prop_oneof![
        5 => requests().prop_map(Step::Any),
        2 => (index.clone(), 0..FRAMES).prop_map(|(index, gfn)| Step::Move { index, gfn }),
        2 => (index.clone(), 0..16u32).prop_map(|(index, flags)| Step::Flags { index, flags }),
        1 => index.prop_map(|index| Step::Delete { index }),
    ];
    prop::collection::vec(step, 1..60)
}

fn request_of(step: &Step, model: &Model) -> Option<Request<u32>> {
    let existing = |index: usize| {
        let slot = model.values().nth(index % model.len().max(1))?;
        Some(Request {
            address_space: slot.address_space,
            id: slot.id,
            gpa: slot.range.start().gpa(),
            size: slot.range.pages() << 12,
            hva: slot.hva,
            flags: slot.flags,
            data: slot.data.wrapping_add(1),
        })
    };
    Some(match *step {
        Step::Any(request) => request,
        Step::Move { index, gfn } => Request {
            gpa: Gfn(gfn).gpa(),
            ..existing(index)?
        },
        Step::Flags { index, flags } => Request {
            flags: SlotFlags(flags),
            ..existing(index)?
        },
        Step::Delete { index } => {
            let slot = existing(index)?;
            Request::delete(slot.address_space, slot.id)
        }
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Nothing,
    Created,
    Deleted,
    Moved,
    FlagsChanged,
}

/// The rules once more, as plainly as they can be said.
fn apply_to_model(model: &mut Model, request: Request<u32>) -> Option<Kind> {
    let flags = request.flags.0;
    if flags >= 16 || flags & 4 != 0 && flags & 3 != 0 {
        return None;
    }
    let key = (request.address_space, request.id);
    let old = model.get(&key);
    if request.size == 0 {
        return model.remove(&key).map(|_| Kind::Deleted);
    }
    let start = request.gpa.0 >> 12;
    let pages = request.size >> 12;
    let kind = match old {
        None => Kind::Created,
        Some(old) => {
            let moved = old.range.start().0 != start;
            let kept = old.range.pages() == pages
                && old.hva == request.hva
                && (old.flags.0 ^ flags) & 6 == 0
                && !(flags & 4 != 0 && moved);
            match (kept, moved, old.flags.0 != flags) {
                (false, _, _) => return None,
                (_, true, _) => Kind::Moved,
                (_, _, true) => Kind::FlagsChanged,
                _ => return Some(Kind::Nothing),
            }
        }
    };
    let free = (start..start + pages).all(|gfn| {
        !model.values().any(|slot| {
            (slot.address_space, slot.id) != key
                && slot.address_space == key.0
                && slot.range.contains(Gfn(gfn))
        })
    });
    free.then(|| {
        model.insert(
            key,
            Slot {
                address_space: key.0,
                id: key.1,
                range: GfnRange::new(Gfn(start), pages).unwrap(),
                hva: request.hva,
                flags: request.flags,
                data: request.data,
            },
        );
        kind
    })
}

fn kind_of(change: &Change<u32>) -> Kind {
    match change {
        Change::Nothing => Kind::Nothing,
        Change::Created { .. } => Kind::Created,
        Change::Deleted { .. } => Kind::Deleted,
        Change::Moved { .. } => Kind::Moved,
        Change::FlagsChanged { .. } => Kind::FlagsChanged,
    }
}

fn by_frame(model: &Model, space: u16) -> Vec<&Slot<u32>> {
    let mut slots: Vec<_> = model
        .values()
        .filter(|s| s.address_space == space)
        .collect();
    slots.sort_by_key(|slot| slot.range.start());
    slots
}

fn owned<'a>(slots: impl Iterator<Item = &'a Arc<Slot<u32>>>) -> Vec<&'a Slot<u32>> {
    slots.map(|slot| &**slot).collect()
}

/// Compares every look-up at every frame, every range and every id.
fn compare(
    table: &SlotTable<u32>,
    model: &Model,
    last: &mut [LastUsed],
) -> Result<(), TestCaseError> {
    prop_assert_eq!(table.len(), model.len());
    let pages: u64 = model.values().map(|slot| slot.range.pages()).sum();
    prop_assert_eq!(table.pages(), pages);
    for space in 0..SPACES {
        let set = table.space(space).unwrap();
        let expected = by_frame(model, space);
        prop_assert_eq!(owned(set.iter()), expected.clone());
        for id in 0..=IDS {
            prop_assert_eq!(set.by_id(id).map(|slot| &**slot), model.get(&(space, id)));
        }
        for gfn in (0..FRAMES + 8).map(Gfn) {
            let holds = expected.iter().find(|slot| slot.range.contains(gfn));
            prop_assert_eq!(set.lookup(gfn).map(|slot| &**slot), holds.copied());
            let cached = last[usize::from(space)].lookup(table, gfn);
            prop_assert_eq!(cached.map(|slot| &**slot), holds.copied());
            let below = expected.iter().rfind(|slot| slot.range.start() <= gfn);
            prop_assert_eq!(set.lookup_or_below(gfn).map(|slot| &**slot), below.copied());
            for pages in [0, 1, 3, 17] {
                let range = GfnRange::new(gfn, pages).unwrap();
                let meets = |slot: &&&Slot<u32>| range.iter().any(|gfn| slot.range.contains(gfn));
                let expected: Vec<_> = expected.iter().filter(meets).copied().collect();
                prop_assert_eq!(owned(set.iter_gfn(range)), expected);
            }
        }
        for start in 0..HOST_PAGES + 6 {
            // Ends inside pages, and an empty range.
            for (low, high) in [(0, 0), (0, 0x1000), (0xfff, 0x1001), (0x800, 0x5800)] {
                let range = Hva((start << 12) + low)..Hva((start << 12) + high);
                let meets = |slot: &&&Slot<u32>| {
                    (range.start.0..range.end.0).any(|byte| {
                        let base = slot.hva.0;
                        base <= byte && byte < base + (slot.range.pages() << 12)
                    })
                };
                // Byte by byte is exact and slow: one frame in eight is enough.
                if start % 8 == 0 {
                    let expected: Vec<_> = expected.iter().filter(meets).copied().collect();
                    prop_assert_eq!(owned(set.iter_hva(range.clone())), expected);
                }
            }
        }
    }
    Ok(())
}

fn limits() -> Limits {
    Limits {
        address_spaces: SPACES,
        max_slots: IDS,
        ..Limits::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_look_up_agrees_after_every_step(steps in steps()) {
        let mut table = SlotTable::new(limits());
        let mut model = Model::new();
        let mut last = [LastUsed::new(0), LastUsed::new(1)];
        for step in &steps {
            let Some(request) = request_of(step, &model) else { continue };
            let mut next_model = model.clone();
            let expected = apply_to_model(&mut next_model, request);
            let result = table.apply(request);
            prop_assert_eq!(
                result.as_ref().ok().map(|(_, change)| kind_of(change)),
                expected,
                "{:?} gave {:?}", request, result.as_ref().err()
            );
            // The version before is as it was, whatever came of the request.
            compare(&table, &model, &mut last)?;
            if let Ok((next, _)) = result {
                let grows = u64::from(expected != Some(Kind::Nothing));
                prop_assert_eq!(next.generation(), table.generation() + grows);
                table = next;
                model = next_model;
                compare(&table, &model, &mut last)?;
            }
        }
    }
}

#[test]
fn random_order_at_thousands_of_slots() {
    const SLOTS: u16 = 4096;
    // An odd multiplier visits every residue once: a scattered order without a random generator.
    let order = || (0..SLOTS).map(|i| i.wrapping_mul(2731) % SLOTS);
    let request = |id: u16| Request {
        address_space: 0,
        id,
        gpa: Gfn(u64::from(id) * 4).gpa(),
        size: 3 << 12,
        hva: Hva(u64::from(id) << 20),
        flags: SlotFlags::EMPTY,
        data: id,
    };
    let mut table = SlotTable::default();
    for id in order() {
        table = table.apply(request(id)).unwrap().0;
    }
    assert_eq!(table.len(), usize::from(SLOTS));
    for id in 0..SLOTS {
        let first = u64::from(id) * 4;
        for offset in 0..3 {
            assert_eq!(table.lookup(Gfn(first + offset)).unwrap().data, id);
        }
        assert!(table.lookup(Gfn(first + 3)).is_none());
        assert_eq!(table.lookup_or_below(Gfn(first + 3)).unwrap().data, id);
        assert_eq!(table.by_id(id).unwrap().data, id);
        let hva = u64::from(id) << 20;
        let shared: Vec<_> = table.iter_hva(Hva(hva)..Hva(hva + 1)).collect();
        assert!(shared.len() == 1 && shared[0].data == id);
    }
    for (gone, id) in order().enumerate() {
        table = table.apply(Request::delete(0, id)).unwrap().0;
        assert!(table.by_id(id).is_none() && table.lookup(Gfn(u64::from(id) * 4)).is_none());
        assert_eq!(table.len(), usize::from(SLOTS) - gone - 1);
    }
    assert_eq!(table.pages(), 0);
}

#[test]
fn the_refusals_of_the_model_are_those_of_the_table() {
    // The model must be able to refuse, or the comparison above would prove nothing.
    let mut model = Model::new();
    let request = Request {
        address_space: 0,
        id: 1,
        gpa: Gpa(0),
        size: 0x2000,
        hva: Hva(0),
        flags: SlotFlags::EMPTY,
        data: 0,
    };
    assert_eq!(apply_to_model(&mut model, request), Some(Kind::Created));
    let second = Request { id: 2, ..request };
    assert_eq!(apply_to_model(&mut model, second), None);
    let table = SlotTable::new(limits()).apply(request).unwrap().0;
    assert!(matches!(
        table.apply(second),
        Err(SlotError::Overlap { .. })
    ));
}
