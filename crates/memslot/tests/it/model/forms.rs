//! Tables that grow and shrink through all forms of a tree: one leaf of each room, leaves below a
//! root, and back. Older views outlive each change of form.

use super::driver::{End, Pair};
use super::plain::{
    compare_frame, compare_frames, compare_hva, compare_sample_newest, compare_whole,
};
use super::random::{Churn, Shape};
use pageferry_memslot::{Limits, Request};
use pageferry_testkit::Random;

const SHAPE: Shape = Shape {
    ids: 600,
    frames: 6000,
    host_pages: 4000,
    most_pages: 60,
};

/// Waves of growing and shrinking. The largest need leaves below a root, and the least fit one leaf
/// again.
const WAVES: [(usize, usize); 5] = [(20, 3), (70, 10), (140, 30), (400, 60), (150, 0)];

fn compare(pair: &mut Pair, random: &mut Random) {
    let view = pair.writer.view();
    compare_whole(view, &pair.model, 0);
    let guard = pair.reader.pin();
    for _ in 0..3 {
        let (gfn, page) = (random.below(SHAPE.frames), random.below(SHAPE.host_pages));
        compare_frame(view, &pair.model, 0, gfn);
        compare_frames(view, &pair.model, 0, gfn, 50);
        compare_hva(view, &pair.model, 0, page * 4096 + 4095, page * 4096 + 4097);
        compare_sample_newest(&guard, &pair.model, gfn);
    }
}

#[test]
#[cfg_attr(miri, ignore = "too slow there")]
fn all_forms_there_and_back_under_old_views() {
    let limits = Limits {
        max_retired: usize::MAX,
        ..Limits::default()
    };
    for seed in 0..2 {
        let (mut pair, mut random) = (Pair::new(limits), Random::new(seed));
        let mut churn = Churn::new(SHAPE, seed + 10);
        for (most, least) in WAVES {
            for (goal, creations, deletions) in [(most, 6, 1), (least, 1, 6)] {
                let up = goal == most;
                while (pair.model.slots().len() < goal) == up && pair.model.slots().len() != goal {
                    let mut reader = pair.writer.table().reader();
                    let guard = reader.pin();
                    let (old, before) = (guard.view(), pair.model.clone());
                    for _ in 0..25 {
                        if pair.model.slots().len() == goal {
                            break;
                        }
                        let request = churn.request(&pair.model, creations, deletions);
                        pair.step(request, End::Set);
                        compare(&mut pair, &mut random);
                    }
                    compare_whole(old, &before, 0);
                    let gfn = random.below(SHAPE.frames);
                    compare_frame(old, &before, 0, gfn);
                    compare_hva(old, &before, 0, gfn * 2048, gfn * 2048 + 9000);
                }
            }
        }
        // Delete the slots in order, so that roots are left with one child.
        let ids: Vec<u16> = pair.model.slots().map(|slot| slot.id).collect();
        for id in ids {
            pair.step(Request::delete(0, id), End::Set);
        }
        for id in (0..200).chain((200..400).rev()) {
            let mut request = churn.created();
            request.id = id;
            request.gpa = pageferry_addr::Gfn(u64::from(id) * 64).gpa();
            assert!(pair.step(request, End::Set));
            compare(&mut pair, &mut random);
        }
        for id in (0..150).chain((150..400).rev()) {
            assert!(pair.step(Request::delete(0, id), End::Set));
            compare(&mut pair, &mut random);
        }
        assert_eq!(pair.writer.reclaim(), 0);
    }
}
