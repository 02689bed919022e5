//! The cases of Linux's `tools/testing/selftests/kvm/set_memory_region_test.c` that concern only
//! slots, and `memslot_modification_stress_test.c`. Look-ups take the place of vCPU accesses.

use pageferry_addr::{Gfn, GfnRange, Gpa, Hva};
use pageferry_memslot::{Change, Limits, Request, SlotError, SlotFlags, SlotWriter};
use pageferry_testkit::{LIMIT, Stop};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

// The constants of the selftest.
const MEM_REGION_GPA: u64 = 0xc000_0000;
const MEM_REGION_SIZE: u64 = 0x20_0000;
const MEM_REGION_SLOT: u16 = 10;

fn region(id: u16, gpa: u64, hva: u64) -> Request<u32> {
    Request {
        gpa: Gpa(gpa),
        size: MEM_REGION_SIZE,
        hva: Hva(hva),
        data: 7,
        ..Request::delete(0, id)
    }
}

fn gfn(gpa: u64) -> Gfn {
    Gpa(gpa).gfn()
}

fn empty() -> SlotWriter<u32> {
    SlotWriter::new(Limits::default())
}

fn with(request: Request<u32>) -> SlotWriter<u32> {
    let mut writer = empty();
    writer.set(request).expect("the test's own slot is valid");
    writer
}

#[test]
fn zero_memory_regions() {
    let writer = empty();
    assert!(writer.is_empty() && writer.generation().number() == 0 && writer.pages() == 0);
    let mut reader = writer.table().reader();
    let guard = reader.pin();
    for view in [writer.view(), guard.view()] {
        assert!(view.is_empty() && view.lookup(gfn(0)).is_none());
        assert!(view.lookup_or_below(Gfn::MAX).is_none() && view.by_id(0).is_none());
        assert_eq!(view.iter_hva(Hva(0)..Hva(u64::MAX)).count(), 0);
        let all = GfnRange::new(Gfn(0), Gfn::MAX.0 + 1).unwrap();
        assert_eq!(view.iter_gfn(all).count(), 0);
    }
    assert!(guard.lookup(Gfn(0)).is_none());
}

#[test]
fn move_memory_region() {
    let mut writer = with(region(MEM_REGION_SLOT, MEM_REGION_GPA, 0x7000_0000));
    let table = writer.table();
    let mut reader = table.reader();
    let before = reader.pin();
    let old_view = before.view();
    let down = MEM_REGION_GPA - 0x1000;
    // Move it one page down. Its old and new place overlap, which is no overlap with another slot.
    let change = writer.set(region(MEM_REGION_SLOT, down, 0x7000_0000));
    let Ok(Change::Moved { old, new }) = change else {
        panic!("a new base is a move");
    };
    assert_eq!(old.range.start(), gfn(MEM_REGION_GPA));
    assert_eq!(new.range.start(), gfn(down));
    assert_eq!(old.range.pages(), new.range.pages());
    assert!(old.is_invalid() && !new.is_invalid());
    assert_eq!(writer.generation().number(), 2);
    let last = gfn(MEM_REGION_GPA + MEM_REGION_SIZE - 0x1000);
    let moved = writer.view();
    assert!(moved.lookup(last).is_none() && moved.lookup(gfn(down)).is_some());
    // A reader of the old version sees all of the old state, and sees that the slot is invalid.
    assert!(old_view.lookup(gfn(down)).is_none());
    assert!(old_view.lookup(last).unwrap().is_invalid());
    drop(before);
    // Move it back up, as the test's main thread does.
    let back = region(MEM_REGION_SLOT, MEM_REGION_GPA, 0x7000_0000);
    writer.set(back).unwrap();
    assert_eq!(
        reader.pin().lookup(last).unwrap().hva_of(last),
        Some(Hva(0x7000_0000 + MEM_REGION_SIZE - 0x1000))
    );
}

/// The selftest's vCPU reads one address while its slot is moved away and back. Each access returns
/// the value or faults. After a fault the vCPU finds the address again when the slot is back.
#[test]
fn move_memory_region_while_a_vcpu_reads_it() {
    let (least_moves, least_hits) = if cfg!(miri) { (10, 1) } else { (2000, 100) };
    let home = region(MEM_REGION_SLOT, MEM_REGION_GPA, 0x7000_0000);
    let mut writer = with(home);
    let mut reader = writer.table().reader();
    let (stop, hits) = (Stop::new(), AtomicU64::new(0));
    thread::scope(|scope| {
        let stop_on_drop = stop.on_drop();
        let vcpu = scope.spawn(|| {
            let frame = gfn(MEM_REGION_GPA);
            let mut faults = 0_u64;
            while !stop.is_stopped() {
                let guard = reader.pin();
                match guard.lookup(frame) {
                    // The slot moves up by 0x20_0000. Then it does not hold this frame.
                    Some(slot) if !slot.is_invalid() => {
                        assert_eq!(slot.hva_of(frame), Some(Hva(0x7000_0000)));
                        hits.fetch_add(1, Ordering::Relaxed);
                    }
                    _ => faults += 1,
                }
            }
            faults
        });
        let begun = Instant::now();
        let mut moves = 0;
        while moves < least_moves || hits.load(Ordering::Relaxed) < least_hits {
            assert!(begun.elapsed() < LIMIT, "the slot was never seen");
            let away = region(MEM_REGION_SLOT, MEM_REGION_GPA + 0x20_0000, 0x7000_0000);
            for request in [away, home] {
                assert!(matches!(writer.set(request), Ok(Change::Moved { .. })));
            }
            moves += 1;
        }
        drop(stop_on_drop);
        vcpu.join()
            .expect("each look-up sees one of the two states");
    });
    assert_eq!(
        reader.pin().lookup(gfn(MEM_REGION_GPA)).unwrap().id,
        MEM_REGION_SLOT
    );
}

#[test]
fn moving_onto_another_slot_is_refused() {
    let mut writer = with(region(1, MEM_REGION_GPA, 0x7000_0000));
    writer
        .set(region(2, MEM_REGION_GPA + MEM_REGION_SIZE, 0x7000_0000))
        .unwrap();
    let error = writer
        .set(region(1, MEM_REGION_GPA + 0x1000, 0x7000_0000))
        .unwrap_err();
    assert!(matches!(error, SlotError::Overlap { other: 2, .. }));
    let own = writer.view().by_id(1).unwrap();
    assert!(!own.is_invalid() && own.range.start() == gfn(MEM_REGION_GPA));
}

#[test]
fn delete_memory_region() {
    let mut writer = with(region(MEM_REGION_SLOT, MEM_REGION_GPA, 0x7000_0000));
    let mut reader = writer.table().reader();
    assert!(reader.pin().lookup(gfn(MEM_REGION_GPA)).is_some());
    let Ok(Change::Deleted { old }) = writer.set(Request::delete(0, MEM_REGION_SLOT)) else {
        panic!("size 0 deletes");
    };
    assert_eq!((old.id, old.data), (MEM_REGION_SLOT, 7));
    assert!(writer.is_empty() && writer.pages() == 0);
    assert_eq!(writer.generation().number(), 2);
    assert!(writer.view().lookup(gfn(MEM_REGION_GPA)).is_none());
    assert!(writer.view().by_id(MEM_REGION_SLOT).is_none());
    // The reader must not answer with the slot that it found last.
    assert!(reader.pin().lookup(gfn(MEM_REGION_GPA)).is_none());
    let again = writer.set(Request::delete(0, MEM_REGION_SLOT));
    assert!(matches!(again, Err(SlotError::NothingToDelete { .. })));
}

#[test]
fn deletion_still_checks_flags_and_alignment() {
    // Like the kernel, the writer checks the size after flags and addresses.
    let mut writer = with(region(1, MEM_REGION_GPA, 0x7000_0000));
    let delete = Request::<u32>::delete(0, 1);
    let flags = SlotFlags(1 << 31);
    let error = writer.set(Request { flags, ..delete }).unwrap_err();
    assert!(matches!(error, SlotError::UnknownFlags { .. }));
    let gpa = Gpa(1);
    let error = writer.set(Request { gpa, ..delete }).unwrap_err();
    assert!(matches!(error, SlotError::UnalignedGpa { .. }));
    assert_eq!(writer.len(), 1);
}

/// Creates `KVM_CAP_NR_MEMSLOTS` adjacent slots, all with the same host memory. Then one more is
/// refused.
#[test]
#[cfg_attr(miri, ignore = "too slow there")]
fn add_max_memory_regions() {
    const MAX: u16 = 32_764;
    let mut writer = empty();
    let at = |id: u16| region(id, u64::from(id) * MEM_REGION_SIZE, 0x7000_0000);
    for id in 0..MAX {
        writer.set(at(id)).unwrap();
    }
    assert_eq!(writer.len(), usize::from(MAX));
    assert_eq!(writer.generation().number(), u64::from(MAX));
    assert_eq!(writer.pages(), u64::from(MAX) * (MEM_REGION_SIZE >> 12));
    let error = SlotError::IdTooLarge {
        id: MAX,
        max_slots: MAX,
    };
    assert_eq!(writer.set(at(MAX)).unwrap_err(), error);
    let mut reader = writer.table().reader();
    let guard = reader.pin();
    for id in 0..MAX {
        let frame = gfn(u64::from(id) * MEM_REGION_SIZE + 0x3000);
        assert_eq!(guard.lookup(frame).unwrap().id, id);
    }
    let page = Hva(0x7000_0000)..Hva(0x7000_1000);
    assert_eq!(guard.view().iter_hva(page).count(), usize::from(MAX));
}

#[test]
fn flags_only_and_no_change_at_all() {
    let mut writer = with(region(1, MEM_REGION_GPA, 0x7000_0000));
    let mut reader = writer.table().reader();
    let guard = reader.pin();
    let first = guard.lookup(gfn(MEM_REGION_GPA)).unwrap();
    let change = writer.set(region(1, MEM_REGION_GPA, 0x7000_0000)).unwrap();
    assert!(matches!(change, Change::Nothing));
    assert_eq!(writer.generation().number(), 1);
    assert!(std::ptr::eq(
        guard.lookup(gfn(MEM_REGION_GPA)).unwrap(),
        first
    ));
    let logged = Request {
        flags: SlotFlags::LOG_DIRTY_PAGES | SlotFlags::USERFAULT,
        userfault_bitmap: Some(Hva(0x1000)),
        data: 8,
        ..region(1, MEM_REGION_GPA, 0x7000_0000)
    };
    let Ok(Change::FlagsChanged { old, new }) = writer.set(logged) else {
        panic!("only flags differ");
    };
    assert_eq!((old.data, new.data), (7, 8));
    assert!(new.flags == logged.flags && old.flags == SlotFlags::EMPTY);
    assert_eq!(new.userfault_bitmap(), Some(Hva(0x1000)));
    // The old record stays valid, but a reader finds the new one even if it found the old one last.
    assert!(!old.is_invalid());
    let found = guard.lookup(gfn(MEM_REGION_GPA)).unwrap();
    assert!(std::ptr::eq(found, new));
    drop(guard);
    // Without the flag the slot has no bitmap.
    let plain = region(1, MEM_REGION_GPA, 0x7000_0000);
    let off = Request {
        userfault_bitmap: Some(Hva(0x1000)),
        ..plain
    };
    let Ok(Change::FlagsChanged { new, .. }) = writer.set(off) else {
        panic!("flags differ");
    };
    assert_eq!(new.userfault_bitmap(), None);
    assert_eq!(writer.generation().number(), 3);
}

#[test]
fn address_spaces_do_not_see_each_other() {
    let mut writer = SlotWriter::new(Limits {
        address_spaces: 2,
        ..Limits::default()
    });
    writer.set(region(1, MEM_REGION_GPA, 0x7000_0000)).unwrap();
    let other = Request {
        address_space: 1,
        ..region(1, MEM_REGION_GPA, 0x8000_0000)
    };
    writer.set(other).unwrap();
    assert_eq!(writer.len(), 2);
    let frame = gfn(MEM_REGION_GPA);
    let mut reader = writer.table().reader();
    let guard = reader.pin();
    // Alternate, so that the slot found last is always in the other space.
    for _ in 0..2 {
        let hva_in = |space| guard.lookup_in(space, frame)?.hva_of(frame);
        assert_eq!(hva_in(0), Some(Hva(0x7000_0000)));
        assert_eq!(hva_in(1), Some(Hva(0x8000_0000)));
        assert_eq!(hva_in(2), None);
    }
    writer.set(Request::delete(1, 1)).unwrap();
    assert!(writer.view().lookup(frame).is_some());
    assert!(writer.view().space(1).unwrap().is_empty());
    assert!(writer.view().space(2).is_none());
}

/// `memslot_modification_stress_test`: vCPUs read their memory while adjacent slots come and go
/// without pause. They never miss one of their pages, and the other slots leave nothing behind.
#[test]
#[cfg_attr(miri, ignore = "too slow there")]
fn memslot_modification_stress() {
    // The selftest's dummy slot has one page, directly behind the memory of the vCPUs.
    const DUMMY_SLOT: u16 = 7;
    const VCPUS: u16 = 2;
    let mut writer = empty();
    for vcpu in 0..VCPUS {
        let start = u64::from(vcpu) * MEM_REGION_SIZE;
        writer.set(region(vcpu, start, start)).unwrap();
    }
    let dummy = Request {
        size: 0x1000,
        ..region(DUMMY_SLOT, u64::from(VCPUS) * MEM_REGION_SIZE, 0x7000_0000)
    };
    let stop = Stop::new();
    let table = writer.table();
    thread::scope(|scope| {
        let stop_on_drop = stop.on_drop();
        let vcpus: Vec<_> = (0..VCPUS)
            .map(|vcpu| {
                let (mut reader, stop) = (table.reader(), &stop);
                scope.spawn(move || {
                    let mut accesses = 0_u64;
                    let start = u64::from(vcpu) * MEM_REGION_SIZE;
                    while !stop.is_stopped() {
                        for offset in (0..MEM_REGION_SIZE).step_by(0x1000) {
                            let frame = gfn(start + offset);
                            let guard = reader.pin();
                            let slot = guard.lookup(frame).expect("never touched");
                            assert!(slot.id == vcpu && !slot.is_invalid());
                            assert_eq!(slot.hva_of(frame), Some(Hva(start + offset)));
                            accesses += 1;
                        }
                    }
                    accesses
                })
            })
            .collect();
        let begun = Instant::now();
        let mut changes = 0;
        while changes < 10_000 || begun.elapsed() < Duration::from_millis(300) {
            assert!(begun.elapsed() < LIMIT, "only {changes} changes");
            writer.set(dummy).unwrap();
            writer.set(Request::delete(0, DUMMY_SLOT)).unwrap();
            changes += 1;
        }
        drop(stop_on_drop);
        for vcpu in vcpus {
            assert!(vcpu.join().expect("the vCPU finds its memory") > 0);
        }
    });
    assert_eq!(writer.len(), usize::from(VCPUS));
    assert_eq!(writer.reclaim(), 0);
}
