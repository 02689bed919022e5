//! Few frames and few host pages, so that slots often collide. Every look-up is compared after
//! every step.

use super::driver::{End, Pair};
use super::plain::{Model, Plain, compare_all, compare_newest};
use pageferry_addr::{Gfn, Gpa, Hva};
use pageferry_memslot::{Limits, Request, SlotFlags};
use proptest::prelude::*;

/// The bounds of the slots.
#[derive(Clone, Copy)]
struct World {
    ids: u16,
    frames: u64,
    host_pages: u64,
    steps: usize,
    /// The number of steps between two comparisons of all look-ups.
    every: usize,
}

/// Trees of one leaf.
const SMALL: World = World {
    ids: 12,
    frames: 40,
    host_pages: 24,
    steps: 60,
    every: 1,
};

/// Trees of a few leaves, over host memory that many slots share.
const LARGER: World = World {
    ids: 150,
    frames: 330,
    host_pages: 30,
    steps: 500,
    every: 7,
};

const SPACES: u16 = 2;

/// One step: a random request, or a request for an existing slot with one change, which random
/// requests rarely make.
#[derive(Clone, Debug)]
enum Step {
    Any(Request<u32>),
    Create {
        id: u16,
        gfn: u64,
        pages: u64,
        page: u64,
    },
    Move {
        index: usize,
        by: i64,
        flags: u32,
    },
    Flags {
        index: usize,
        flags: u32,
        bitmap: u64,
    },
    Delete {
        index: usize,
    },
    /// A slot as it was before a recent request.
    Again {
        index: usize,
    },
    Nothing {
        index: usize,
    },
    Reclaim,
}

fn limits(world: World) -> Limits {
    Limits {
        address_spaces: SPACES,
        max_slots: world.ids,
        max_slot_pages: 5,
        gfn_limit: Gfn(world.frames),
        ..Limits::default()
    }
}

/// Mostly valid flags, and sometimes any bits.
fn flags() -> impl Strategy<Value = u32> {
    prop_oneof![
        8 => Just(0u32),
        4 => prop_oneof![Just(1u32), Just(8), Just(9), Just(2), Just(4), Just(12)],
        1 => 0..40u32
    ]
}

/// Two valid bitmaps, one that is not aligned, and one that passes the end.
fn bitmaps() -> impl Strategy<Value = Option<Hva>> {
    prop_oneof![
        2 => Just(None),
        4 => Just(Some(Hva(0x1000))),
        2 => Just(Some(Hva(0x2008))),
        1 => Just(Some(Hva(0x2004))),
        1 => Just(Some(Hva(u64::MAX - 7))),
    ]
}

fn requests(world: World) -> impl Strategy<Value = Request<u32>> {
    let place = (
        0..SPACES + 1,
        0..world.ids + 1,
        0..world.frames + 2,
        prop_oneof![12 => 0..world.host_pages, 1 => Just((u64::MAX >> 12) - 1)],
    );
    let size = prop_oneof![1 => Just(0u64), 8 => 1..7u64];
    let odd = prop_oneof![20 => Just((0, 0, 0)), 1 => Just((1, 0, 0)), 1 => Just((0, 8, 0)), 1 => Just((0, 0, 0xfff))];
    (place, size, odd, flags(), bitmaps(), any::<u32>()).prop_map(
        |((address_space, id, gfn, page), pages, odd, flags, userfault_bitmap, data)| Request {
            address_space,
            id,
            gpa: Gpa(gfn * 4096 + odd.0),
            size: pages * 4096 + odd.1,
            hva: Hva(page * 4096 + odd.2),
            flags: SlotFlags(flags),
            userfault_bitmap,
            data,
        },
    )
}

fn steps(world: World) -> impl Strategy<Value = Vec<(Step, End)>> {
    let index = 0..1024usize;
    // Runs of short slots fill the frames. Longer slots collide.
    let create = (0..world.ids, 0..world.frames, 1..4u64, 0..world.host_pages).prop_map(
        |(id, gfn, pages, page)| Step::Create {
            id,
            gfn,
            pages,
            page,
        },
    );
    let step = prop_oneof![
        4 => requests(world).prop_map(Step::Any),
        6 => create,
        3 => (index.clone(), -6..7i64, flags()).prop_map(|(index, by, flags)| Step::Move { index, by, flags }),
        2 => (index.clone(), 0..16u32, 0..3u64).prop_map(|(index, flags, bitmap)| Step::Flags { index, flags, bitmap }),
        2 => index.clone().prop_map(|index| Step::Delete { index }),
        1 => index.prop_map(|index| Step::Nothing { index }),
        4 => (0..6usize).prop_map(|index| Step::Again { index }),
        1 => Just(Step::Reclaim),
    ];
    let end = prop_oneof![
        6 => Just(End::Set),
        4 => Just(End::Commit),
        2 => Just(End::Drop),
        1 => Just(End::Forget),
    ];
    prop::collection::vec((step, end), 1..world.steps)
}

/// A request that asks for `slot` as it is.
fn same(slot: &Plain) -> Request<u32> {
    Request {
        address_space: slot.space,
        id: slot.id,
        gpa: Gfn(slot.start).gpa(),
        size: slot.pages * 4096,
        hva: Hva(slot.hva),
        flags: SlotFlags(slot.flags),
        userfault_bitmap: slot.bitmap.map(Hva),
        data: slot.data.wrapping_add(1),
    }
}

fn request_of(step: &Step, model: &Model, past: &[Plain]) -> Option<Request<u32>> {
    let existing = |index: usize| model.slots().nth(index % model.slots().len().max(1));
    Some(match *step {
        Step::Any(request) => request,
        Step::Create {
            id,
            gfn,
            pages,
            page,
        } => Request {
            gpa: Gfn(gfn).gpa(),
            size: pages * 4096,
            hva: Hva(page * 4096),
            data: u32::from(id) << 16,
            ..Request::delete(0, id)
        },
        Step::Move { index, by, flags } => {
            let old = existing(index)?;
            Request {
                gpa: Gfn(old.start.checked_add_signed(by)?).gpa(),
                flags: SlotFlags(if by % 3 == 0 { flags } else { old.flags }),
                ..same(old)
            }
        }
        Step::Flags {
            index,
            flags,
            bitmap,
        } => Request {
            flags: SlotFlags(flags),
            userfault_bitmap: Some(Hva(0x1000 + 8 * bitmap)),
            ..same(existing(index)?)
        },
        Step::Delete { index } => {
            let old = existing(index)?;
            Request::delete(old.space, old.id)
        }
        Step::Nothing { index } => Request {
            data: 1,
            ..same(existing(index)?)
        },
        Step::Again { index } => same(past.iter().rev().nth(index)?),
        Step::Reclaim => return None,
    })
}

fn run(world: World, steps: &[(Step, End)]) {
    let (mut pair, mut past) = (Pair::new(limits(world)), Vec::new());
    let compare = |pair: &mut Pair| {
        compare_all(
            pair.writer.view(),
            &pair.model,
            world.frames,
            world.host_pages,
        );
        assert_eq!(pair.writer.pages(), pair.model.pages());
        let guard = pair.reader.pin();
        compare_all(guard.view(), &pair.model, world.frames, world.host_pages);
        compare_newest(&guard, &pair.model, world.frames);
    };
    for (count, (step, end)) in steps.iter().enumerate() {
        if matches!(step, Step::Reclaim) {
            assert_eq!(pair.writer.reclaim(), 0, "nobody reads");
        }
        if let Some(request) = request_of(step, &pair.model, &past) {
            past.extend(pair.model.get(request.address_space, request.id));
            pair.step(request, *end);
        }
        if count % world.every == 0 {
            compare(&mut pair);
        }
    }
    compare(&mut pair);
}

proptest! {
    #![proptest_config(super::cases(64))]

    #[test]
    #[cfg_attr(miri, ignore = "too slow there")]
    fn every_look_up_agrees_after_every_step(steps in steps(SMALL)) {
        run(SMALL, &steps);
    }
}

proptest! {
    #![proptest_config(super::cases(12))]

    #[test]
    #[cfg_attr(miri, ignore = "too slow there")]
    fn trees_of_several_leaves_agree(steps in steps(LARGER)) {
        run(LARGER, &steps);
    }
}

#[test]
fn the_model_can_refuse() {
    // Otherwise the comparison would prove nothing.
    let mut model = Model::new(limits(SMALL));
    let first = Request {
        size: 0x2000,
        ..Request::delete(0, 1)
    };
    let created = super::plain::Kind::Created;
    assert_eq!(model.plan(&first), Some(created));
    model.apply(&first, created);
    let second = Request { id: 2, ..first };
    assert_eq!(model.plan(&second), None);
    let mut pair = Pair::new(limits(SMALL));
    assert!(pair.step(first, End::Set));
    assert!(!pair.step(second, End::Set));
}
