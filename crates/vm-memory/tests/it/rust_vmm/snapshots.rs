//! Changes of the memory while other threads hold snapshots.

use super::kinds::against_both;
use super::kinds::{Kind, PAGE, map, region};
use pageferry_testkit::{LIMIT, Stop};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion};

against_both!(
    a_held_snapshot_does_not_change,
    a_clone_shows_what_its_original_shows,
    readers_beside_a_writer_see_one_version_each,
);

fn starts<M: GuestMemoryBackend>(memory: &M) -> Vec<u64> {
    memory.iter().map(|r| r.start_addr().0).collect()
}

fn a_held_snapshot_does_not_change<K: Kind>() {
    let space = map::<(), K>(&[(0, PAGE), (0x10_0000, PAGE)]);
    let before = space.memory();
    before.write_slice(b"old", GuestAddress(0x10_0000)).unwrap();
    for base in [0x8000, 0x4000, 0xc000] {
        assert!(K::insert(&space, Arc::new(region(base, PAGE))));
    }
    assert!(!K::insert(&space, Arc::new(region(0x8000, PAGE))));
    assert!(K::remove(&space, 0x10_0000, PAGE).is_some());
    assert!(K::relocate(&space, 0, PAGE, 0x20_0000));

    assert_eq!(starts(&*before), [0, 0x10_0000]);
    let mut bytes = [0; 3];
    before
        .read_slice(&mut bytes, GuestAddress(0x10_0000))
        .unwrap();
    assert_eq!(
        &bytes, b"old",
        "a removed region stays mapped for its snapshots"
    );
    let after = space.memory();
    assert_eq!(starts(&*after), [0x4000, 0x8000, 0xc000, 0x20_0000]);
    assert_eq!(space.clone().memory().num_regions(), 4);
}

fn a_clone_shows_what_its_original_shows<K: Kind>() {
    let space = map::<(), K>(&[(0, PAGE), (0x1000, PAGE)]);
    let clone = {
        let original = space.memory();
        assert!(K::remove(&space, 0, PAGE).is_some());
        original.clone()
    };
    assert!(K::remove(&space, 0x1000, PAGE).is_some());
    assert_eq!(starts(&*clone), [0, 0x1000]);
    clone.write_slice(&[1; 0x1800], GuestAddress(0)).unwrap();
    assert_eq!(space.memory().num_regions(), 0);
}

/// One region always exists, at one of many places. Another comes and goes. Every snapshot must
/// show the first exactly once, with its mark at its start, and must give the same answers again.
fn readers_beside_a_writer_see_one_version_each<K: Kind>() {
    const PLACES: u64 = 40;
    const MARK: u64 = 0x6d61_726b;
    let space = map::<(), K>(&[(0, PAGE), (0x100_0000, PAGE)]);
    space.memory().write_obj(MARK, GuestAddress(0)).unwrap();
    let (stop, looks) = (Stop::new(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.is_stopped() {
                    let memory = space.memory();
                    let found: Vec<u64> = (0..PLACES)
                        .map(|place| place * PAGE)
                        .filter(|&base| memory.find_region(GuestAddress(base)).is_some())
                        .collect();
                    let [base] = found[..] else {
                        panic!("the region is at {found:x?}");
                    };
                    assert_eq!(memory.read_obj::<u64>(GuestAddress(base)).unwrap(), MARK);
                    let listed = starts(&*memory);
                    assert_eq!(listed[0], base);
                    assert!(listed[1..] == [0x100_0000] || listed[1..] == [0x80_0000, 0x100_0000]);
                    assert_eq!(memory.last_addr(), GuestAddress(0x100_0fff));
                    looks.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let stopping = stop.on_drop();
        let end = Instant::now() + Duration::from_millis(400);
        let (mut at, mut rounds) = (0, 0u64);
        while Instant::now() < end || looks.load(Ordering::Relaxed) < 50 {
            assert!(Instant::now() < end + LIMIT, "readers make no progress");
            let to = (at + 7) % PLACES;
            assert!(K::relocate(&space, at * PAGE, PAGE, to * PAGE));
            at = to;
            rounds += 1;
            if rounds % 3 == 0 {
                assert!(K::insert(&space, Arc::new(region(0x80_0000, PAGE))));
            } else if rounds % 3 == 1 && rounds > 1 {
                assert!(K::remove(&space, 0x80_0000, PAGE).is_some());
            }
        }
        drop(stopping);
    });
}
