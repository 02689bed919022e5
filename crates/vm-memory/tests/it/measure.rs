//! The cost of look-ups, snapshots and changes next to that of `vm-memory`'s own memory. Run it
//! with `cargo test --release -p pageferry-vm-memory --test it measure -- --ignored --nocapture`.

use pageferry_testkit::Random;
use pageferry_vm_memory::SlotMemory;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;
use vm_memory::{
    Address, Bytes, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend,
    GuestMemoryMmap, GuestRegionMmap,
};

const PAGE: u64 = 0x1000;
const LOOKS: u64 = 1 << 20;

/// The least of five runs, in ns per operation.
fn ns(count: u64, mut run: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        run();
        best = best.min(start.elapsed().as_secs_f64() * 1e9 / count as f64);
    }
    best
}

/// Addresses in random order.
fn addresses(regions: u64) -> Vec<GuestAddress> {
    let mut random = Random::new(1);
    (0..4096)
        .map(|_| {
            let region = random.below(regions) * 2 * PAGE;
            GuestAddress(region + random.below(PAGE / 8 - 1) * 8)
        })
        .collect()
}

fn look_ups<M: GuestMemoryBackend>(memory: &M, at: &[GuestAddress]) -> (f64, f64) {
    let cycle = || at.iter().cycle().take(LOOKS as usize);
    let find = ns(LOOKS, || {
        for addr in cycle() {
            black_box(memory.find_region(*addr).is_some());
        }
    });
    let read = ns(LOOKS, || {
        for addr in cycle() {
            black_box(memory.read_obj::<u64>(*addr).unwrap());
        }
    });
    (find, read)
}

fn snapshots<S: GuestAddressSpace>(space: &S) -> f64 {
    ns(LOOKS, || {
        for _ in 0..LOOKS {
            black_box(&*space.memory());
        }
    })
}

#[test]
#[ignore = "measures: prints the cost beside vm-memory's"]
fn look_ups_snapshots_and_changes() {
    println!("regions  what          vm-memory      ours   (ns, least of five)");
    for count in [10, 509, 8194] {
        let region = |n: u64| {
            let start = GuestAddress(n * 2 * PAGE);
            GuestRegionMmap::<()>::from_range(start, PAGE as usize, None).unwrap()
        };
        let regions: Vec<_> = (0..count).map(|n| Arc::new(region(n))).collect();
        let theirs = GuestMemoryMmap::from_arc_regions(regions.clone()).unwrap();
        let theirs = GuestMemoryAtomic::new(theirs);
        let ours = SlotMemory::from_regions(regions).unwrap();
        let at = addresses(count);
        let near: Vec<_> = addresses(1)
            .iter()
            .map(|a| a.unchecked_add(count / 2 * 2 * PAGE))
            .collect();
        for (what, at) in [("random", &at), ("one region", &near)] {
            let (find, read) = look_ups(&*theirs.memory(), at);
            let (our_find, our_read) = look_ups(&*ours.memory(), at);
            println!("{count:7}  find_region   {find:9.1} {our_find:9.1}  {what}");
            println!("{count:7}  read_obj u64  {read:9.1} {our_read:9.1}  {what}");
        }
        let (snap, our_snap) = (snapshots(&theirs), snapshots(&ours));
        println!("{count:7}  memory()      {snap:9.1} {our_snap:9.1}");

        let extra = Arc::new(region(count));
        let base = GuestAddress(count * 2 * PAGE);
        const CHANGES: u64 = 1000;
        let change = ns(2 * CHANGES, || {
            for _ in 0..CHANGES {
                let guard = theirs.lock().unwrap();
                guard.replace(theirs.memory().insert_region(Arc::clone(&extra)).unwrap());
                let guard = theirs.lock().unwrap();
                guard.replace(theirs.memory().remove_region(base, PAGE).unwrap().0);
            }
        });
        let our_change = ns(2 * CHANGES, || {
            for _ in 0..CHANGES {
                ours.lock().insert_region(Arc::clone(&extra)).unwrap();
                ours.lock().remove_region(base, PAGE).unwrap();
            }
        });
        println!("{count:7}  change        {change:9.1} {our_change:9.1}");

        let held = ours.memory();
        let before = ours.lock().metadata_bytes();
        for _ in 0..CHANGES {
            ours.lock().insert_region(Arc::clone(&extra)).unwrap();
            ours.lock().remove_region(base, PAGE).unwrap();
        }
        let grown = ours.lock().metadata_bytes() - before;
        println!(
            "{count:7}  bytes a change leaves while a snapshot is held: {}",
            grown as u64 / 2 / CHANGES
        );
        drop(held);
    }
}
