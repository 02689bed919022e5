//! The cases of Linux's `tools/testing/selftests/kvm/set_memory_region_test.c` that are about slots alone,
//! re-expressed: what a vCPU's access would find is asked of the look-ups.

use pageferry_addr::{Gfn, Gpa, Hva};
use pageferry_memslot::{Change, LastUsed, Limits, Request, SlotError, SlotFlags, SlotTable};
use std::sync::Arc;

// The selftest's own constants.
const MEM_REGION_GPA: u64 = 0xc000_0000;
const MEM_REGION_SIZE: u64 = 0x20_0000;
const MEM_REGION_SLOT: u16 = 10;

fn region(id: u16, gpa: u64, hva: u64) -> Request<u32> {
    Request {
        address_space: 0,
        id,
        gpa: Gpa(gpa),
        size: MEM_REGION_SIZE,
        hva: Hva(hva),
        flags: SlotFlags::EMPTY,
        data: 7,
    }
}

fn gfn(gpa: u64) -> Gfn {
    Gpa(gpa).gfn()
}

#[test]
fn zero_memory_regions() {
    let table = SlotTable::<u32>::default();
    assert!(table.is_empty() && table.generation() == 0 && table.pages() == 0);
    assert!(table.lookup(gfn(0)).is_none());
    assert!(table.lookup_or_below(Gfn::MAX).is_none());
    assert!(LastUsed::default().lookup(&table, Gfn(0)).is_none());
}

#[test]
fn move_memory_region() {
    let table = SlotTable::default();
    let (table, _) = table
        .apply(region(MEM_REGION_SLOT, MEM_REGION_GPA, 0x7000_0000))
        .unwrap();
    // One page down: its old and new place overlap, which is no overlap with another slot.
    let down = MEM_REGION_GPA - 0x1000;
    let (moved, change) = table
        .apply(region(MEM_REGION_SLOT, down, 0x7000_0000))
        .unwrap();
    let Change::Moved { old, new } = change else {
        panic!("a new base is a move");
    };
    assert_eq!(old.range.start(), gfn(MEM_REGION_GPA));
    assert_eq!(new.range.start(), gfn(down));
    assert_eq!(old.range.pages(), new.range.pages());
    assert_eq!(moved.generation(), 2);
    let last = gfn(MEM_REGION_GPA + MEM_REGION_SIZE - 0x1000);
    assert!(moved.lookup(last).is_none() && moved.lookup(gfn(down)).is_some());
    // Who still reads the old version sees all of the old state.
    assert!(table.lookup(last).is_some() && table.lookup(gfn(down)).is_none());
    // And back up, as the test's main thread does.
    let (back, _) = moved
        .apply(region(MEM_REGION_SLOT, MEM_REGION_GPA, 0x7000_0000))
        .unwrap();
    assert_eq!(
        back.lookup(last).unwrap().hva_of(last),
        Some(Hva(0x7000_0000 + MEM_REGION_SIZE - 0x1000))
    );
}

#[test]
fn moving_onto_another_slot_is_refused() {
    let (table, _) = SlotTable::default()
        .apply(region(1, MEM_REGION_GPA, 0x7000_0000))
        .unwrap();
    let (table, _) = table
        .apply(region(2, MEM_REGION_GPA + MEM_REGION_SIZE, 0x7000_0000))
        .unwrap();
    let error = table
        .apply(region(1, MEM_REGION_GPA + 0x1000, 0x7000_0000))
        .unwrap_err();
    assert!(matches!(error, SlotError::Overlap { other: 2, .. }));
}

#[test]
fn delete_memory_region() {
    let (table, change) = SlotTable::default()
        .apply(region(MEM_REGION_SLOT, MEM_REGION_GPA, 0x7000_0000))
        .unwrap();
    let Change::Created { new } = change else {
        panic!("nothing was there");
    };
    let (empty, change) = table.apply(Request::delete(0, MEM_REGION_SLOT)).unwrap();
    let Change::Deleted { old } = change else {
        panic!("size 0 deletes");
    };
    assert!(Arc::ptr_eq(&old, &new));
    assert!(empty.is_empty() && empty.pages() == 0 && empty.generation() == 2);
    assert!(empty.lookup(gfn(MEM_REGION_GPA)).is_none());
    assert!(empty.by_id(MEM_REGION_SLOT).is_none());
    let again = empty.apply(Request::delete(0, MEM_REGION_SLOT));
    assert!(matches!(again, Err(SlotError::NothingToDelete { .. })));
}

#[test]
fn deletion_still_checks_flags_and_alignment() {
    // As the kernel does: the size is looked at after flags and addresses.
    let (table, _) = SlotTable::default()
        .apply(region(1, MEM_REGION_GPA, 0x7000_0000))
        .unwrap();
    let delete = Request::<u32>::delete(0, 1);
    let flags = SlotFlags(1 << 31);
    let request = Request { flags, ..delete };
    assert!(matches!(
        table.apply(request),
        Err(SlotError::UnknownFlags { .. })
    ));
    let gpa = Gpa(1);
    let request = Request { gpa, ..delete };
    assert!(matches!(
        table.apply(request),
        Err(SlotError::UnalignedGpa { .. })
    ));
}

#[test]
fn add_max_memory_regions() {
    const MAX: u16 = 500;
    let mut table = SlotTable::new(Limits {
        max_slots: MAX,
        ..Limits::default()
    });
    let at = |id: u16| region(id, u64::from(id) * MEM_REGION_SIZE, 0x7000_0000);
    for id in 0..MAX {
        table = table.apply(at(id)).unwrap().0;
    }
    assert_eq!(table.len(), usize::from(MAX));
    assert_eq!(table.generation(), u64::from(MAX));
    assert_eq!(table.pages(), u64::from(MAX) * (MEM_REGION_SIZE >> 12));
    assert_eq!(
        table.apply(at(MAX)).unwrap_err(),
        SlotError::IdTooLarge {
            id: MAX,
            max_slots: MAX
        }
    );
    for id in 0..MAX {
        let slot = table.lookup(gfn(u64::from(id) * MEM_REGION_SIZE)).unwrap();
        assert_eq!(slot.id, id);
    }
}

#[test]
fn flags_only_and_no_change_at_all() {
    let (table, _) = SlotTable::default()
        .apply(region(1, MEM_REGION_GPA, 0x7000_0000))
        .unwrap();
    let (same, change) = table.apply(region(1, MEM_REGION_GPA, 0x7000_0000)).unwrap();
    assert!(matches!(change, Change::Nothing));
    assert_eq!(same.generation(), table.generation());
    assert!(Arc::ptr_eq(same.by_id(1).unwrap(), table.by_id(1).unwrap()));
    let logged = Request {
        flags: SlotFlags::LOG_DIRTY_PAGES | SlotFlags::USERFAULT,
        data: 8,
        ..region(1, MEM_REGION_GPA, 0x7000_0000)
    };
    let (next, change) = table.apply(logged).unwrap();
    let Change::FlagsChanged { old, new } = change else {
        panic!("only flags differ");
    };
    assert_eq!((old.data, new.data), (7, 8));
    assert!(new.flags.contains(logged.flags) && old.flags == SlotFlags::EMPTY);
    assert_eq!(next.generation(), table.generation() + 1);
    assert!(Arc::ptr_eq(next.lookup(gfn(MEM_REGION_GPA)).unwrap(), &new));
}

#[test]
fn address_spaces_do_not_see_each_other() {
    let table = SlotTable::new(Limits {
        address_spaces: 2,
        ..Limits::default()
    });
    let (table, _) = table.apply(region(1, MEM_REGION_GPA, 0x7000_0000)).unwrap();
    let other = Request {
        address_space: 1,
        ..region(1, MEM_REGION_GPA, 0x8000_0000)
    };
    let (table, _) = table.apply(other).unwrap();
    assert_eq!(table.len(), 2);
    let frame = gfn(MEM_REGION_GPA);
    let hva_in = |space: u16| {
        let slot = LastUsed::new(space).lookup(&table, frame)?;
        slot.hva_of(frame)
    };
    assert_eq!(hva_in(0), Some(Hva(0x7000_0000)));
    assert_eq!(hva_in(1), Some(Hva(0x8000_0000)));
    assert_eq!(hva_in(2), None);
    let (table, _) = table.apply(Request::delete(1, 1)).unwrap();
    assert!(table.lookup(frame).is_some());
    assert!(table.space(1).unwrap().is_empty());
}
