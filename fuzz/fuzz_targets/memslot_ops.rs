//! Sequences of operations on memory slots: no panic, and every look-up gives what a plain model
//! gives, in the newest version and in an old one that a reader keeps.
//!
//! Six bytes are one step: what to do and how it ends, an id, a frame, a size, a host page, and
//! flags.

#[path = "../../crates/memslot/tests/it/model/driver.rs"]
mod driver;
#[path = "../../crates/memslot/tests/it/model/plain.rs"]
mod plain;

use driver::{End, Pair};
use pageferry_addr::{Gfn, Gpa, Hva};
use pageferry_memslot::{Limits, Request, SlotFlags, SlotView};
use plain::{
    Model, compare_all, compare_frame, compare_frames, compare_hva, compare_newest,
    compare_sample_newest, compare_whole,
};

const STEP_BYTES: usize = 6;

const LIMITS: Limits = Limits {
    address_spaces: 2,
    max_slots: 200,
    max_slot_pages: 24,
    gfn_limit: Gfn(250),
    shared_last_used: true,
    // The thread that holds a guard is the one that writes.
    max_retired: usize::MAX,
};

pub(crate) fn run(data: &[u8]) {
    let (steps, _) = data.as_chunks::<STEP_BYTES>();
    let mut steps = steps.iter().enumerate();
    let mut pair = Pair::new(LIMITS);
    let mut keeper = pair.writer.table().reader();
    let mut more = true;
    while more {
        let old = pair.model.clone();
        let guard = keeper.pin();
        let view = guard.view();
        more = false;
        for (number, step) in steps.by_ref() {
            if step[0] & 15 == 15 {
                // Another old view from here on.
                more = true;
                break;
            }
            take(&mut pair, step);
            look(pair.writer.view(), &pair.model, step);
            look(view, &old, step);
            let reader = pair.reader.pin();
            compare_sample_newest(&reader, &pair.model, u64::from(step[2]));
            if number % 64 == 0 {
                compare_newest(&reader, &pair.model, 64);
            }
        }
        for space in 0..LIMITS.address_spaces {
            compare_whole(view, &old, space);
            compare_whole(pair.writer.view(), &pair.model, space);
        }
        assert_eq!(pair.writer.pages(), pair.model.pages());
    }
    compare_all(pair.writer.view(), &pair.model, 64, 8);
    assert_eq!(pair.writer.reclaim(), 0);
}

/// Does one step.
fn take(pair: &mut Pair, step: &[u8; STEP_BYTES]) {
    let &[kind, id, frame, size, page, flags] = step;
    let end = [End::Set, End::Commit, End::Drop, End::Forget][usize::from(kind >> 6)];
    let address_space = u16::from(kind >> 4 & 1);
    let id = u16::from(id);
    let asked = Request {
        address_space,
        id,
        gpa: Gfn(u64::from(frame)).gpa(),
        size: (1 + u64::from(size % 8)) << 12,
        hva: Hva(u64::from(page % 64) << 12),
        flags: SlotFlags::EMPTY,
        userfault_bitmap: Some(Hva(0x1000)),
        data: u32::from_le_bytes([id as u8, frame, size, page]),
    };
    let same = pair.model.get(address_space, id).map(|old| Request {
        size: old.pages << 12,
        hva: Hva(old.hva),
        flags: SlotFlags(old.flags),
        userfault_bitmap: old.bitmap.map(Hva),
        ..asked
    });
    let request = match kind & 15 {
        // As it is, for all that is wrong with it.
        0 => Request {
            address_space: address_space * 2,
            gpa: Gpa(asked.gpa.0 | u64::from(flags & 16)),
            size: u64::from(size) << 8,
            hva: Hva((u64::from(page) << 56) | asked.hva.0),
            flags: SlotFlags(u32::from(flags)),
            userfault_bitmap: Some(Hva(u64::from(page) << 2)),
            ..asked
        },
        1 => {
            pair.writer.reclaim();
            return;
        }
        2..=4 => Request::delete(address_space, id),
        5..=7 => same.unwrap_or(asked),
        8 | 9 => Request {
            flags: SlotFlags(u32::from(flags & 15)),
            userfault_bitmap: Some(Hva(0x1000 + (u64::from(flags & 16) >> 1))),
            gpa: pair
                .model
                .get(address_space, id)
                .map_or(asked.gpa, |old| Gfn(old.start).gpa()),
            ..same.unwrap_or(asked)
        },
        // A long one, over the starts of many others in host memory.
        10 => Request {
            size: (1 + u64::from(size % 25)) << 12,
            ..asked
        },
        _ => asked,
    };
    pair.step(request, end);
}

/// Compares look-ups at the place that the step is about.
fn look(view: SlotView<'_, u32>, model: &Model, step: &[u8; STEP_BYTES]) {
    let &[kind, _, frame, size, page, flags] = step;
    let space = u16::from(kind >> 4 & 1);
    let view = view.space(space).expect("there is this space");
    let frame = u64::from(frame) + u64::from(flags & 3);
    compare_frame(view, model, space, frame);
    compare_frames(view, model, space, frame, u64::from(size % 5));
    let start = (u64::from(page % 64) << 12) + u64::from(flags);
    compare_hva(view, model, space, start, start + (u64::from(size) << 5));
}
