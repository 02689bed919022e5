//! Slots that go and come again to few places, their former ones and those of others, under views
//! of all versions in between.

use super::driver::{End, Pair};
use super::plain::compare_all;
use pageferry_addr::{Gfn, Hva};
use pageferry_memslot::{Limits, Request, SlotReader};
use pageferry_testkit::{Random, rotating_seeds};

/// The number of slots that stay.
const STAYING: u16 = 7;
const IDS: u16 = 3;
const FRAMES: u64 = 24;
const HOST_PAGES: u64 = 24;

fn request(id: u16, start: u64, pages: u64, page: u64, data: u32) -> Request<u32> {
    Request {
        gpa: Gfn(start).gpa(),
        size: pages * 4096,
        hva: Hva(page * 4096),
        data,
        ..Request::delete(0, id)
    }
}

/// A random request about one of few slots, at one of few places.
fn any(pair: &Pair, random: &mut Random, data: u32) -> Request<u32> {
    let id = STAYING + random.below(u64::from(IDS)) as u16;
    let start = 12 + 2 * random.below(4);
    match pair.model.get(0, id) {
        Some(_) if random.below(2) == 0 => Request::delete(0, id),
        Some(old) => request(id, start, old.pages, old.hva / 4096, data),
        // Two pages, and rarely five, which hold the beginnings of others.
        None => {
            let pages = if random.below(6) == 0 { 5 } else { 2 };
            request(id, start, pages, 16 + 2 * random.below(2), data)
        }
    }
}

#[test]
fn what_comes_again_is_seen_in_its_own_versions() {
    const STEPS: usize = 14;
    let limits = Limits {
        max_slots: STAYING + IDS,
        address_spaces: 1,
        // The writer must never wait.
        max_retired: usize::MAX,
        ..Limits::default()
    };
    let seeds = if cfg!(miri) { 1 } else { 500 };
    for seed in rotating_seeds("PAGEFERRY_SLOT_SEEDS", seeds, 1500) {
        let (mut pair, mut random) = (Pair::new(limits), Random::new(seed));
        for id in 0..STAYING {
            let at = u64::from(id);
            assert!(pair.step(request(id, at, 1, at, 0), End::Set));
        }
        let table = pair.writer.table();
        let mut readers: Vec<_> = (0..STEPS).map(|_| table.reader()).collect();
        // The guards come before all changes, so that nothing is freed.
        let guards: Vec<_> = readers.iter_mut().map(SlotReader::pin).collect();
        let mut views = Vec::new();
        for (step, guard) in (0..).zip(&guards) {
            views.push((guard.view(), pair.model.clone()));
            pair.step(any(&pair, &mut random, step), End::Set);
        }
        for (view, model) in views {
            compare_all(view, &model, FRAMES, HOST_PAGES);
        }
    }
}
