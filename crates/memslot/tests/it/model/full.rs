//! The full number of slots that the kernel allows: in several orders, in waves, and with random
//! changes.

use super::driver::{End, Pair};
use super::plain::{
    compare_frame, compare_frames, compare_hva, compare_sample_newest, compare_whole,
};
use super::random::{Churn, Shape, shuffle};
use pageferry_addr::{Gfn, Hva};
use pageferry_memslot::{Limits, Request};
use pageferry_testkit::{Random, sized};

const SLOTS: u16 = 32_764;
/// The distance from one slot to the next, in frames.
const STRIDE: u64 = 8;

const SHAPE: Shape = Shape {
    ids: SLOTS,
    frames: SLOTS as u64 * STRIDE * 2,
    host_pages: 1 << 16,
    most_pages: 2000,
};

/// The layout of slots in host memory.
#[derive(Clone, Copy)]
enum Host {
    /// Disjoint, in the order of ids.
    Apart,
    /// Disjoint, in the opposite order.
    Opposite,
    /// All at one address.
    Same,
    /// At random places, with overlaps.
    Scattered,
}

fn request(id: u16, host: Host) -> Request<u32> {
    let number = u64::from(id);
    let page = match host {
        Host::Apart => number * 16,
        Host::Opposite => (u64::from(SLOTS) - number) * 16,
        Host::Same => 5,
        Host::Scattered => number * 40_503 % 9973,
    };
    Request {
        gpa: Gfn(number * STRIDE).gpa(),
        size: (1 + number * 7 % (STRIDE - 1)) * 4096,
        hva: Hva(page * 4096),
        data: u32::from(id) * 3,
        ..Request::delete(0, id)
    }
}

fn compare(pair: &mut Pair, random: &mut Random) {
    let view = pair.writer.view();
    compare_whole(view, &pair.model, 0);
    assert_eq!(pair.writer.pages(), pair.model.pages());
    sample(pair, random, 12);
}

/// A few look-ups of each kind, through the writer's view, a reader's, and the newest state.
fn sample(pair: &mut Pair, random: &mut Random, times: u64) {
    let guard = pair.reader.pin();
    for _ in 0..times {
        let frames = [0; 4].map(|_| random.below(SHAPE.frames));
        let page = random.below(1 << 16) * 4096;
        for view in [pair.writer.view(), guard.view()] {
            for frame in frames {
                compare_frame(view, &pair.model, 0, frame);
            }
            compare_frames(view, &pair.model, 0, frames[0], frames[1] % 100);
            compare_hva(view, &pair.model, 0, page + 4095, page + 4097);
        }
        for frame in frames {
            compare_sample_newest(&guard, &pair.model, frame);
        }
    }
}

fn fill(pair: &mut Pair, ids: impl IntoIterator<Item = u16>, host: Host) {
    for id in ids {
        assert!(pair.step(request(id, host), End::Set));
    }
}

fn empty(pair: &mut Pair, ids: impl IntoIterator<Item = u16>) {
    for id in ids {
        assert!(pair.step(Request::delete(0, id), End::Set));
    }
}

/// All ids in a random order.
fn shuffled(random: &mut Random) -> Vec<u16> {
    let mut ids: Vec<_> = (0..SLOTS).collect();
    shuffle(random, &mut ids);
    ids
}

#[test]
#[cfg_attr(miri, ignore = "too slow there")]
fn filled_and_emptied_in_all_orders() {
    let mut random = Random::new(1);
    let random = &mut random;
    let mut pair = Pair::new(Limits::default());
    let pair = &mut pair;

    fill(pair, 0..SLOTS, Host::Apart);
    compare(pair, random);
    // Delete from one end to the other, so that roots collapse. Then create one slot in an empty
    // tree.
    empty(pair, 0..SLOTS - 40);
    compare(pair, random);
    empty(pair, (SLOTS - 40..SLOTS).rev());
    compare(pair, random);

    fill(pair, (0..SLOTS).rev(), Host::Opposite);
    compare(pair, random);
    empty(pair, (5..SLOTS).rev());
    compare(pair, random);
    empty(pair, 0..5);

    fill(pair, shuffled(random), Host::Same);
    compare(pair, random);
    // Most slots go in random order, and come again elsewhere in host memory.
    let order = shuffled(random);
    let (gone, left) = order.split_at(order.len() - 700);
    empty(pair, gone.iter().copied());
    compare(pair, random);
    fill(pair, gone.iter().rev().copied(), Host::Scattered);
    compare(pair, random);
    empty(pair, left.iter().copied());
    compare(pair, random);
    assert_eq!(pair.writer.reclaim(), 0);
}

#[test]
#[cfg_attr(miri, ignore = "too slow there")]
fn random_operations_and_waves_on_top_of_a_full_table() {
    let mut random = Random::new(2);
    let mut pair = Pair::new(Limits::default());
    fill(&mut pair, shuffled(&mut random), Host::Scattered);
    let mut churn = Churn::new(SHAPE, 3);
    let steps = sized(100, 250);
    for wave in 0..3 {
        let mut changed = 0;
        for _ in 0..steps {
            let request = churn.request(&pair.model, 3, 2);
            changed += u64::from(pair.step(request, End::Commit));
            sample(&mut pair, &mut random, 1);
        }
        assert!(changed > steps * 2 / 5, "only {changed} were allowed");
        compare(&mut pair, &mut random);
        // A run of ids, every other id, or half of all at random.
        let chosen: Vec<_> = match wave {
            0 => (4000..20_000).collect(),
            1 => (0..SLOTS).filter(|id| id % 2 == 0).collect(),
            _ => shuffled(&mut random)[..usize::from(SLOTS / 2)].to_vec(),
        };
        let there = |id: &u16| pair.model.get(0, *id).is_some();
        let gone: Vec<_> = chosen.into_iter().filter(there).collect();
        empty(&mut pair, gone.iter().copied());
        compare(&mut pair, &mut random);
        for id in gone {
            // Some of their places may be taken by now.
            pair.step(request(id, Host::Scattered), End::Set);
        }
        compare(&mut pair, &mut random);
    }
}
