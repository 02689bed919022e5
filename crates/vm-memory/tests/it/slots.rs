//! Features that only slots have: ids, flags, moves, two-step changes, look-up by host address, and
//! the release of memory.

use pageferry_addr::Hva;
use pageferry_memslot::{Limits, SlotError, SlotFlags};
use pageferry_testkit::{Stop, skip};
use pageferry_vm_memory::{Barrier, RegionError, SlotMemory, SlotSnapshot};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use vm_memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap,
};

const PAGE: u64 = 0x1000;
type Memory = SlotMemory<GuestRegionMmap>;

fn region(base: u64, pages: u64) -> Arc<GuestRegionMmap> {
    let bytes = (pages * PAGE) as usize;
    Arc::new(GuestRegionMmap::from_range(GuestAddress(base), bytes, None).unwrap())
}

fn a(addr: u64) -> GuestAddress {
    GuestAddress(addr)
}

#[test]
fn ids_are_the_lowest_free_ones_and_survive_moves() {
    let memory = Memory::new();
    let mut writer = memory.lock();
    for id in 0..5 {
        let base = 0x10_0000 - u64::from(id) * PAGE;
        assert_eq!(writer.insert_region(region(base, 1)).unwrap(), id);
    }
    writer.remove_region(a(0x10_0000 - 3 * PAGE), PAGE).unwrap();
    writer.remove_region(a(0x10_0000 - PAGE), PAGE).unwrap();
    // A refused or abandoned insertion takes no id.
    assert!(writer.insert_region(region(0x10_0000, 1)).is_err());
    drop(writer.begin_insert(region(0, 1), SlotFlags::EMPTY).unwrap());
    assert_eq!(writer.insert_region(region(0, 1)).unwrap(), 1);
    assert_eq!(writer.insert_region(region(0x1000, 1)).unwrap(), 3);
    assert_eq!(writer.insert_region(region(0x2000, 1)).unwrap(), 5);
    let old = region(0, 1);
    drop(old);
    let moved = memory.memory().find_region(a(0x1000)).unwrap().get_mmap();
    let moved = Arc::new(GuestRegionMmap::with_arc(moved, a(0x20_0000)).unwrap());
    writer.move_region(a(0x1000), moved).unwrap();
    assert_eq!(memory.memory().find_slot(a(0x20_0000)).unwrap().id, 3);
    assert_eq!(writer.num_regions(), 6);
}

/// No second-stage tables bound the places of regions, unless the limits do.
#[test]
fn a_region_lies_anywhere_in_64_bits() {
    for base in [1 << 48, 1 << 60, u64::MAX - 0xffff] {
        let memory = Memory::new();
        memory.lock().insert_region(region(base, 2)).unwrap();
        assert!(memory.memory().find_region(a(base + 0x1fff)).is_some());
        let limited = Memory::with_limits(Limits::default());
        assert!(limited.lock().insert_region(region(base, 2)).is_err());
    }
}

#[test]
fn refusals_say_what_was_wrong() {
    let limits = Limits {
        max_slots: 2,
        ..Limits::default()
    };
    let memory = Memory::with_limits(limits);
    let mut writer = memory.lock();
    writer.insert_region(region(0x4000, 2)).unwrap();
    assert!(matches!(
        writer.insert_region(region(0x5000, 1)),
        Err(RegionError::Slot(SlotError::Overlap { other: 0, .. }))
    ));
    let uneven = GuestRegionMmap::from_range(a(0), 0x1800, None).unwrap();
    assert_eq!(
        writer.insert_region(Arc::new(uneven)),
        Err(RegionError::Slot(SlotError::UnalignedSize { size: 0x1800 }))
    );
    assert!(matches!(
        writer.insert_region(region(0x800, 1)),
        Err(RegionError::Slot(SlotError::UnalignedGpa { .. }))
    ));
    let (base, size) = (a(0x4000), PAGE);
    assert_eq!(
        writer.remove_region(base, size).unwrap_err(),
        RegionError::NoSuchRegion { base, size }
    );
    // Other host memory means another region, not a move.
    assert!(matches!(
        writer.move_region(a(0x4000), region(0x8000, 2)),
        Err(RegionError::Slot(SlotError::HvaChanged { id: 0, .. }))
    ));
    assert!(matches!(
        writer.set_flags(a(0x4000), 2 * PAGE, SlotFlags::READONLY),
        Err(RegionError::Slot(SlotError::FixedFlags { .. }))
    ));
    writer.insert_region(region(0, 1)).unwrap();
    assert_eq!(
        writer.insert_region(region(0x10_0000, 1)),
        Err(RegionError::NoFreeSlot { max_slots: 2 })
    );
    assert_eq!(writer.num_regions(), 2);
}

#[test]
fn a_change_is_made_when_it_is_committed_and_not_before() {
    let memory = Memory::from_regions([region(0, 1)]).unwrap();
    let mut writer = memory.lock();
    let hotplugged = region(0x10_0000, 4);
    let update = writer
        .begin_insert(Arc::clone(&hotplugged), SlotFlags::LOG_DIRTY_PAGES)
        .unwrap();
    let told = update.kernel_slot();
    assert_eq!((told.id, told.flags), (1, 1));
    assert_eq!(
        (told.guest_phys_addr, told.memory_size),
        (0x10_0000, 4 * PAGE)
    );
    assert_eq!(told.userspace_addr, hotplugged.as_ptr() as u64);
    assert_eq!(memory.memory().num_regions(), 1);
    assert_eq!(update.commit(), 1);
    let shown = memory.memory();
    assert_eq!(shown.num_regions(), 2);
    assert_eq!(
        shown.find_slot(a(0x10_3fff)).unwrap().flags,
        SlotFlags::LOG_DIRTY_PAGES
    );

    let update = writer.begin_remove(a(0x10_0000), 4 * PAGE).unwrap();
    assert_eq!(update.kernel_slot().memory_size, 0);
    assert!(memory.memory().find_region(a(0x10_0000)).is_some());
    drop(update); // the kernel refused
    assert!(memory.memory().find_region(a(0x10_0000)).is_some());

    let moved = GuestRegionMmap::with_arc(hotplugged.get_mmap(), a(0x20_0000)).unwrap();
    let update = writer.begin_move(a(0x10_0000), Arc::new(moved)).unwrap();
    assert_eq!(update.kernel_slot().guest_phys_addr, 0x20_0000);
    assert_eq!(update.kernel_slot().flags, 1, "a move keeps the flags");
    assert!(memory.memory().find_region(a(0x10_0000)).is_some());
    update.commit();
    assert!(memory.memory().find_region(a(0x10_0000)).is_none());
    assert!(memory.memory().find_region(a(0x20_0000)).is_some());
    writer
        .set_flags(a(0x20_0000), 4 * PAGE, SlotFlags::EMPTY)
        .unwrap();
    assert_eq!(
        memory.memory().find_slot(a(0x20_0000)).unwrap().flags,
        SlotFlags::EMPTY
    );
}

#[test]
fn host_addresses_lead_back_to_regions() {
    let one = region(0x1000, 2);
    let twin = Arc::new(GuestRegionMmap::with_arc(one.get_mmap(), a(0x10_0000)).unwrap());
    let memory = Memory::from_regions([Arc::clone(&one), region(0x4000, 1), twin]).unwrap();
    let snapshot = memory.memory();
    let host = one.as_ptr() as u64;
    let mut found: Vec<u64> = snapshot
        .regions_at_host(Hva(host + 0x1fff)..Hva(host + 0x2000))
        .map(|r| r.start_addr().0)
        .collect();
    found.sort_unstable();
    assert_eq!(
        found,
        [0x1000, 0x10_0000],
        "both guest ranges of one mapping"
    );
    assert_eq!(
        snapshot.regions_at_host(Hva(0x1000)..Hva(0x2000)).count(),
        0
    );
}

#[test]
fn a_mapping_goes_when_nobody_can_see_it() {
    let memory = Memory::from_regions([region(0, 1), region(0x1000, 1)]).unwrap();
    let held = memory.memory();
    let weak = Arc::downgrade(&memory.lock().remove_region(a(0x1000), PAGE).unwrap());
    let mut writer = memory.lock();
    assert!(writer.reclaim() > 0, "a snapshot shows the region");
    held.write_slice(b"still here", a(0x1000)).unwrap();
    assert!(weak.upgrade().is_some());
    // From another thread, through a clone.
    let clone = held.clone();
    drop(held);
    thread::spawn(move || clone.write_slice(b"and here", a(0x1000)).unwrap())
        .join()
        .unwrap();
    assert_eq!(writer.reclaim(), 0);
    assert!(weak.upgrade().is_none(), "the last snapshot is gone");
}

#[test]
fn a_snapshot_outlives_the_memory_it_came_from() {
    let (region, memory) = (region(0, 1), Memory::new());
    let weak = Arc::downgrade(&region);
    memory.lock().insert_region(region).unwrap();
    // When the memory goes, some readers are parked and some are in use.
    let held: Vec<_> = (0..20).map(|_| memory.memory()).collect();
    let kept = held[7].clone().into_inner();
    drop(held);
    drop(memory);
    kept.write_obj(7u32, a(0x10)).unwrap();
    assert_eq!(kept.read_obj::<u32>(a(0x10)).unwrap(), 7);
    drop(kept);
    assert!(weak.upgrade().is_none(), "parked readers keep nothing");
}

#[test]
fn a_detached_copy_holds_nothing_up() {
    let memory = Memory::from_regions([region(0, 1), region(0x1000, 1)]).unwrap();
    let copy = memory.memory().detach().unwrap();
    drop(memory.lock().remove_region(a(0), PAGE).unwrap());
    assert_eq!(memory.lock().reclaim(), 0);
    assert_eq!(copy.num_regions(), 2);
    copy.write_slice(&[1; 0x1001], a(0)).unwrap();
    memory.lock().remove_region(a(0x1000), PAGE).unwrap();
    assert!(
        memory.memory().detach().is_err(),
        "vm-memory has no empty collection"
    );
    assert_eq!(memory.memory().last_addr(), a(0));
}

/// One thread holds a snapshot and makes changes. With unlimited retirement, the default here, it
/// must not wait for itself.
#[test]
fn a_thread_may_change_what_it_holds_a_snapshot_of() {
    let memory = Memory::from_regions([region(0, 1)]).unwrap();
    let held = memory.memory();
    for round in 0..10_000u64 {
        let base = 0x10_0000 + (round % 7) * PAGE;
        let mut writer = memory.lock();
        writer.insert_region(region(base, 1)).unwrap();
        writer.remove_region(a(base), PAGE).unwrap();
    }
    assert_eq!(held.num_regions(), 1);
    drop(held);
    assert_eq!(memory.lock().reclaim(), 0);
}

#[test]
fn memory_and_snapshots_go_where_their_threads_go() {
    fn shared<T: Send + Sync + Clone + 'static>() {}
    shared::<Memory>();
    shared::<SlotSnapshot<GuestRegionMmap>>();
    shared::<<Memory as GuestAddressSpace>::T>();
}

/// Snapshots without fences, of memory whose regions come, go and are unmapped. A device that used
/// an unmapped region would fault.
#[test]
fn snapshots_without_fences_keep_what_they_show() {
    let barrier = Barrier::membarrier();
    if barrier.is_none() {
        skip("membarrier", "this kernel refuses it");
        return;
    }
    let memory = Memory::with_barrier(Limits::default(), barrier);
    memory.lock().insert_region(region(0, 1)).unwrap();
    let (stop, plugged) = (Stop::new(), a(0x10_0000));
    let written = thread::scope(|scope| {
        let device = scope.spawn(|| {
            let (mut looks, mut written) = (0_u64, 0_u64);
            while !stop.is_stopped() {
                let snapshot = memory.memory();
                looks += 1;
                if snapshot.find_region(plugged).is_some() {
                    snapshot.write_obj(looks, plugged).unwrap();
                    assert_eq!(snapshot.read_obj::<u64>(plugged).unwrap(), looks);
                    written += 1;
                } else {
                    snapshot.write_obj(looks, a(0)).unwrap();
                }
            }
            written
        });
        let stopping = stop.on_drop();
        for _ in 0..2000 {
            let mut writer = memory.lock();
            writer.insert_region(region(plugged.0, 4)).unwrap();
            drop(writer);
            // Wait until the device's guards are light again.
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_micros(100) {
                std::hint::spin_loop();
            }
            memory.lock().remove_region(plugged, 4 * PAGE).unwrap();
        }
        drop(stopping);
        device
            .join()
            .expect("the device finds memory where the snapshot shows it")
    });
    assert!(written > 0);
}
