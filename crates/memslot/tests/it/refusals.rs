//! One test for each rule that a request can break, with the values that the error must have.

use core::ops::Range;
use pageferry_addr::{Gfn, GfnRange, Gpa, Hva};
use pageferry_memslot::{Change, Limits, Request, SlotError, SlotFlags, SlotWriter};

const MIB: u64 = 1 << 20;
/// A bitmap, which is ignored without the flag `USERFAULT`.
const BITMAP: Hva = Hva(0x6000_0000);

/// Slot 3: 1 MiB at frame 0x100, backed at 0x7000_0000.
fn valid() -> Request<()> {
    Request {
        address_space: 0,
        id: 3,
        gpa: Gpa(0x10_0000),
        size: MIB,
        hva: Hva(0x7000_0000),
        flags: SlotFlags::EMPTY,
        userfault_bitmap: Some(BITMAP),
        data: (),
    }
}

fn with_flags(flags: SlotFlags) -> Request<()> {
    Request { flags, ..valid() }
}

fn with_bitmap(userfault_bitmap: Option<Hva>) -> Request<()> {
    Request {
        userfault_bitmap,
        ..with_flags(SlotFlags::USERFAULT)
    }
}

fn table_of(requests: impl IntoIterator<Item = Request<()>>) -> SlotWriter<()> {
    let mut writer = SlotWriter::new(Limits::default());
    for request in requests {
        writer.set(request).expect("the test's own slots are valid");
    }
    writer
}

/// Makes a request that must be refused. Returns the error, after checking that the table is
/// unchanged.
fn refused(writer: &mut SlotWriter<()>, request: Request<()>) -> SlotError {
    let before = (writer.generation(), writer.len(), writer.pages());
    let error = writer.set(request).expect_err("the request breaks a rule");
    assert_eq!(before, (writer.generation(), writer.len(), writer.pages()));
    assert!(!writer.generation().in_progress());
    assert!(writer.view().iter().all(|slot| !slot.is_invalid()));
    error
}

#[test]
fn unknown_flags() {
    let mut table = table_of([]);
    for bit in 4..32 {
        let request = with_flags(SlotFlags(1 << bit | 1));
        let unknown = SlotFlags(1 << bit);
        assert_eq!(
            refused(&mut table, request),
            SlotError::UnknownFlags { unknown }
        );
    }
}

#[test]
fn guest_memfd_with_dirty_logging_or_read_only() {
    let mut table = table_of([]);
    for refused_flag in [SlotFlags::LOG_DIRTY_PAGES, SlotFlags::READONLY] {
        let request = with_flags(SlotFlags::GUEST_MEMFD | SlotFlags::USERFAULT | refused_flag);
        let error = SlotError::GuestMemfdFlags {
            refused: refused_flag,
        };
        assert_eq!(refused(&mut table, request), error);
    }
}

#[test]
fn unaligned_size_gpa_and_hva() {
    let mut table = table_of([]);
    for off in [1, 0x800, 0xfff] {
        let size = MIB + off;
        let request = Request { size, ..valid() };
        assert_eq!(
            refused(&mut table, request),
            SlotError::UnalignedSize { size }
        );
        let gpa = Gpa(0x10_0000 + off);
        let request = Request { gpa, ..valid() };
        assert_eq!(
            refused(&mut table, request),
            SlotError::UnalignedGpa { gpa }
        );
        let hva = Hva(0x7000_0000 + off);
        let request = Request { hva, ..valid() };
        assert_eq!(
            refused(&mut table, request),
            SlotError::UnalignedHva { hva }
        );
    }
}

#[test]
fn a_host_range_that_wraps() {
    let hva = Hva(u64::MAX - 0xfff);
    let request = Request { hva, ..valid() };
    let error = SlotError::HvaOverflow { hva, size: MIB };
    assert_eq!(refused(&mut table_of([]), request), error);
}

#[test]
fn a_host_range_that_is_not_canonical() {
    let half = 1 << 59;
    for hva in [
        half,
        half - 0x1000,
        1 << 63,
        u64::MAX - half - 0xfff,
        0xff << 56 ^ half,
    ] {
        let hva = Hva(hva);
        let request = Request { hva, ..valid() };
        let error = SlotError::HvaNotCanonical { hva, size: MIB };
        assert_eq!(refused(&mut table_of([]), request), error);
    }
}

#[test]
fn host_ranges_up_to_the_ends_of_both_halves() {
    let half = 1 << 59;
    let mut table = table_of([]);
    let ends = [
        0,
        half - MIB,
        0_u64.wrapping_sub(half),
        u64::MAX - 0xfff - MIB,
    ];
    for (id, hva) in (0..).zip(ends) {
        let request = Request {
            id,
            gpa: Gpa(u64::from(id) * MIB),
            hva: Hva(hva),
            ..valid()
        };
        assert!(table.set(request).is_ok(), "{hva:#x}");
    }
    let found = |range: Range<u64>| -> Vec<u16> {
        let slots = table.view().iter_hva(Hva(range.start)..Hva(range.end));
        slots.map(|slot| slot.id).collect()
    };
    assert_eq!(found(0..u64::MAX), [0, 1, 2, 3]);
    assert_eq!(found(MIB..half - MIB), [] as [u16; 0]);
    assert_eq!(found(MIB..half - MIB + 1), [1]);
    assert_eq!(found(half..ends[2]), [] as [u16; 0]);
    assert_eq!(found(half - 1..1 << 63), [1]);
    assert_eq!(found(1 << 63..ends[2] + 1), [2]);
    assert_eq!(found(ends[3] + MIB - 1..u64::MAX), [3]);
    assert_eq!(found(ends[3] + MIB..u64::MAX), [] as [u16; 0]);
}

#[test]
fn an_address_space_that_does_not_exist() {
    let request = Request {
        address_space: 1,
        ..valid()
    };
    let error = SlotError::NoSuchAddressSpace {
        address_space: 1,
        count: 1,
    };
    assert_eq!(refused(&mut table_of([]), request), error);
}

#[test]
fn an_id_past_the_limit() {
    let error = |id| SlotError::IdTooLarge {
        id,
        max_slots: 32764,
    };
    let with_id = |id| Request { id, ..valid() };
    assert_eq!(refused(&mut table_of([]), with_id(32764)), error(32764));
    assert_eq!(
        refused(&mut table_of([]), with_id(u16::MAX)),
        error(u16::MAX)
    );
    assert_eq!(table_of([with_id(32763)]).len(), 1);
}

#[test]
fn a_guest_range_past_the_limit_or_past_64_bits() {
    let limit = Gfn(1 << 38);
    let mut table = SlotWriter::new(Limits {
        gfn_limit: limit,
        ..Limits::default()
    });
    let at = |gpa| Request { gpa, ..valid() };
    let error = |gpa, limit| SlotError::GpaTooHigh {
        gpa,
        size: MIB,
        limit,
    };
    let last = Gpa((1 << 50) - MIB);
    assert!(table.set(at(last)).is_ok());
    let above = Gpa(last.0 + 0x1000);
    assert_eq!(refused(&mut table, at(above)), error(above, limit));
    let wraps = Gpa(u64::MAX - 0xfff);
    let all = Gfn(Gfn::MAX.0 + 1);
    let mut table = SlotWriter::new(Limits {
        gfn_limit: Limits::ALL_FRAMES,
        ..Limits::default()
    });
    assert_eq!(refused(&mut table, at(wraps)), error(wraps, all));
    assert!(table.set(at(Gpa(u64::MAX - 0xf_ffff))).is_ok());
}

/// By default, a slot is where tables of four levels reach: also when it moves there.
#[test]
fn a_slot_behind_48_bits_is_refused_by_default() {
    let limit = Gfn(1 << 36);
    assert_eq!(Limits::default().gfn_limit, limit);
    let at = |gpa| Request { gpa, ..valid() };
    for gpa in [1 << 48, (1 << 48) - MIB + 0x1000, 1 << 52, 1 << 63] {
        let error = SlotError::GpaTooHigh {
            gpa: Gpa(gpa),
            size: MIB,
            limit,
        };
        assert_eq!(refused(&mut table_of([]), at(Gpa(gpa))), error);
        let mut moved = table_of([valid()]);
        assert_eq!(refused(&mut moved, at(Gpa(gpa))), error);
    }
    assert_eq!(table_of([at(Gpa((1 << 48) - MIB))]).len(), 1);
}

#[test]
fn a_slot_of_too_many_pages() {
    let max_pages = (1 << 31) - 1;
    let of = |pages: u64| Request {
        size: pages << 12,
        ..valid()
    };
    let pages = 1 << 31;
    let error = SlotError::TooManyPages { pages, max_pages };
    assert_eq!(refused(&mut table_of([]), of(pages)), error);
    assert_eq!(table_of([of(max_pages)]).pages(), max_pages);
}

#[test]
fn deleting_what_is_not_there() {
    let error = SlotError::NothingToDelete {
        address_space: 0,
        id: 4,
    };
    assert_eq!(
        refused(&mut table_of([valid()]), Request::delete(0, 4)),
        error
    );
}

#[test]
#[cfg_attr(miri, ignore = "too slow there")]
fn a_total_past_64_bits() {
    // Only thousands of address spaces, each nearly full, can reach this limit.
    const PAGES: u64 = 1 << 47;
    const EACH: u64 = 31;
    let mut table = SlotWriter::new(Limits {
        address_spaces: 5000,
        max_slot_pages: u64::MAX,
        gfn_limit: Limits::ALL_FRAMES,
        ..Limits::default()
    });
    let nth = |n: u64| Request {
        address_space: (n / EACH) as u16,
        id: (n % EACH) as u16,
        gpa: Gpa((n % EACH) * (PAGES << 12)),
        size: PAGES << 12,
        hva: Hva(0),
        ..valid()
    };
    let most = u64::MAX / PAGES;
    for n in 0..most {
        table.set(nth(n)).unwrap();
    }
    let total = most * PAGES;
    assert_eq!(table.pages(), total);
    let error = SlotError::TotalPagesOverflow {
        total,
        pages: PAGES,
    };
    assert_eq!(refused(&mut table, nth(most)), error);
}

#[test]
fn another_size_for_an_existing_slot() {
    let mut table = table_of([valid()]);
    for size in [MIB / 2, MIB * 2] {
        let request = Request { size, ..valid() };
        let error = SlotError::SizeChanged {
            id: 3,
            old: 256,
            new: size >> 12,
        };
        assert_eq!(refused(&mut table, request), error);
    }
}

#[test]
fn another_host_address_for_an_existing_slot() {
    let new = Hva(0x8000_0000);
    let request = Request {
        hva: new,
        ..valid()
    };
    let error = SlotError::HvaChanged {
        id: 3,
        old: valid().hva,
        new,
    };
    assert_eq!(refused(&mut table_of([valid()]), request), error);
}

#[test]
fn toggling_read_only_or_guest_memfd() {
    for fixed in [SlotFlags::READONLY, SlotFlags::GUEST_MEMFD] {
        for (old, new) in [(SlotFlags::EMPTY, fixed), (fixed, SlotFlags::EMPTY)] {
            let mut table = table_of([with_flags(old)]);
            // A flag that may change does not hide one that may not.
            let new = new | SlotFlags::USERFAULT;
            let error = SlotError::FixedFlags {
                id: 3,
                old,
                new,
                toggled: fixed,
            };
            assert_eq!(refused(&mut table, with_flags(new)), error);
        }
    }
}

#[test]
fn moving_a_guest_memfd_slot() {
    let mut table = table_of([with_flags(SlotFlags::GUEST_MEMFD)]);
    let request = Request {
        gpa: Gpa(0x20_0000),
        ..with_flags(SlotFlags::GUEST_MEMFD)
    };
    let error = SlotError::GuestMemfdMoved {
        id: 3,
        old: Gfn(0x100),
        new: Gfn(0x200),
    };
    assert_eq!(refused(&mut table, request), error);
    // Only late userfault may change.
    let late = with_flags(SlotFlags::GUEST_MEMFD | SlotFlags::USERFAULT);
    let change = table.set(late).unwrap();
    assert!(matches!(change, Change::FlagsChanged { .. }));
}

#[test]
fn frames_another_slot_holds() {
    let taken = GfnRange::new(Gfn(0x100), 0x100).unwrap();
    let new_at = |gfn: u64, pages: u64| Request {
        id: 4,
        gpa: Gfn(gfn).gpa(),
        size: pages << 12,
        ..valid()
    };
    let mut table = table_of([valid()]);
    for (gfn, pages) in [
        (0xff, 2),
        (0x100, 0x100),
        (0x1ff, 1),
        (0x180, 1),
        (0, 0x1000),
    ] {
        let error = SlotError::Overlap {
            range: GfnRange::new(Gfn(gfn), pages).unwrap(),
            other: 3,
            taken,
        };
        assert_eq!(refused(&mut table, new_at(gfn, pages)), error);
    }
    // Adjacent slots do not overlap, and the same host memory may back both.
    for (gfn, pages) in [(0xff, 1), (0x200, 1)] {
        let mut table = table_of([valid()]);
        assert!(table.set(new_at(gfn, pages)).is_ok());
    }
}

/// A slot that moves may overlap its old place, but not another slot.
#[test]
fn moves_into_another_slot() {
    let other = Request {
        id: 4,
        gpa: Gfn(0x210).gpa(),
        ..valid()
    };
    let mut table = table_of([valid(), other]);
    let to = |gfn: u64| Request {
        gpa: Gfn(gfn).gpa(),
        ..valid()
    };
    let error = SlotError::Overlap {
        range: GfnRange::new(Gfn(0x180), 0x100).unwrap(),
        other: 4,
        taken: GfnRange::new(Gfn(0x210), 0x100).unwrap(),
    };
    assert_eq!(refused(&mut table, to(0x180)), error);
    assert!(matches!(table.set(to(0x110)), Ok(Change::Moved { .. })));
}

#[test]
fn userfault_without_a_bitmap() {
    let error = SlotError::NoUserfaultBitmap { id: 3 };
    assert_eq!(refused(&mut table_of([]), with_bitmap(None)), error);
    // Late userfault and a move that sets it need a bitmap too. A deletion does not.
    assert_eq!(refused(&mut table_of([valid()]), with_bitmap(None)), error);
    let moved = Request {
        gpa: Gpa(0),
        ..with_bitmap(None)
    };
    let mut table = table_of([valid()]);
    assert_eq!(refused(&mut table, moved), error);
    let delete = Request {
        size: 0,
        ..with_bitmap(None)
    };
    assert!(matches!(table.set(delete), Ok(Change::Deleted { .. })));
}

#[test]
fn a_bitmap_of_broken_words() {
    for off in [1, 2, 4, 7] {
        let bitmap = Hva(BITMAP.0 + off);
        let error = SlotError::UnalignedBitmap { bitmap };
        assert_eq!(refused(&mut table_of([]), with_bitmap(Some(bitmap))), error);
        // Without the flag the bitmap is ignored.
        let without = Request {
            userfault_bitmap: Some(bitmap),
            ..valid()
        };
        let table = table_of([without]);
        assert_eq!(table.view().by_id(3).unwrap().userfault_bitmap(), None);
    }
}

#[test]
fn a_bitmap_past_64_bits() {
    // 256 pages need four words.
    let bitmap = Hva(u64::MAX - 31);
    let error = SlotError::BitmapOverflow { bitmap, bytes: 32 };
    assert_eq!(refused(&mut table_of([]), with_bitmap(Some(bitmap))), error);
    let fits = Hva(bitmap.0 - 8);
    let table = table_of([with_bitmap(Some(fits))]);
    assert_eq!(
        table.view().by_id(3).unwrap().userfault_bitmap(),
        Some(fits)
    );
}

#[test]
fn another_bitmap_while_userfault_stays() {
    let new = Hva(BITMAP.0 + 8);
    let error = SlotError::BitmapChanged {
        id: 3,
        old: BITMAP,
        new,
    };
    let mut table = table_of([with_bitmap(Some(BITMAP))]);
    assert_eq!(refused(&mut table, with_bitmap(Some(new))), error);
    let moved = Request {
        gpa: Gpa(0),
        ..with_bitmap(Some(new))
    };
    assert_eq!(refused(&mut table, moved), error);
    // Clear the flag and set it again.
    table.set(valid()).unwrap();
    table.set(with_bitmap(Some(new))).unwrap();
    assert_eq!(table.view().by_id(3).unwrap().userfault_bitmap(), Some(new));
}

/// The rule that answers a request which breaks several. Each step repairs the rule that answered.
#[test]
fn rules_are_checked_in_one_order() {
    let taken = Request {
        id: 9,
        gpa: Gpa(0),
        ..valid()
    };
    let mut table = table_of([valid(), taken]);
    let mut request = Request {
        address_space: 1,
        id: u16::MAX,
        gpa: Gpa(u64::MAX),
        size: u64::MAX,
        hva: Hva(u64::MAX),
        flags: SlotFlags(0x1f),
        userfault_bitmap: None,
        data: (),
    };
    let mut next = |repair: &dyn Fn(&mut Request<()>)| {
        let error = refused(&mut table, request);
        repair(&mut request);
        error
    };
    assert!(matches!(
        next(&|r| r.flags = SlotFlags(0xf)),
        SlotError::UnknownFlags { .. }
    ));
    assert!(matches!(
        next(&|r| r.flags = SlotFlags(0xc)),
        SlotError::GuestMemfdFlags { .. }
    ));
    assert!(matches!(
        next(&|r| r.size = 1 << 44),
        SlotError::UnalignedSize { .. }
    ));
    assert!(matches!(
        next(&|r| r.gpa = Gpa(!0xfff)),
        SlotError::UnalignedGpa { .. }
    ));
    assert!(matches!(
        next(&|r| r.hva = Hva(!0xfff)),
        SlotError::UnalignedHva { .. }
    ));
    assert!(matches!(
        next(&|r| r.hva = Hva(0x1000)),
        SlotError::HvaOverflow { .. }
    ));
    let bitmap = |address| move |r: &mut Request<()>| r.userfault_bitmap = Some(Hva(address));
    assert!(matches!(
        next(&bitmap(1)),
        SlotError::NoUserfaultBitmap { .. }
    ));
    assert!(matches!(
        next(&bitmap(!7)),
        SlotError::UnalignedBitmap { .. }
    ));
    assert!(matches!(next(&bitmap(8)), SlotError::BitmapOverflow { .. }));
    assert!(matches!(
        next(&|r| r.address_space = 0),
        SlotError::NoSuchAddressSpace { .. }
    ));
    assert!(matches!(next(&|r| r.id = 3), SlotError::IdTooLarge { .. }));
    assert!(matches!(
        next(&|r| r.gpa = Gpa(0x1000)),
        SlotError::GpaTooHigh { .. }
    ));
    assert!(matches!(
        next(&|r| r.size = 0x2000),
        SlotError::TooManyPages { .. }
    ));
    assert!(matches!(
        next(&|r| r.size = MIB),
        SlotError::SizeChanged { .. }
    ));
    assert!(matches!(
        next(&|r| r.hva = valid().hva),
        SlotError::HvaChanged { .. }
    ));
    assert!(matches!(
        next(&|r| r.flags = SlotFlags(8)),
        SlotError::FixedFlags { .. }
    ));
    assert!(matches!(
        next(&|r| r.gpa = valid().gpa),
        SlotError::Overlap { other: 9, .. }
    ));
    assert!(matches!(
        table.set(request),
        Ok(Change::FlagsChanged { .. })
    ));
}

#[test]
fn messages_say_what_was_wrong_and_what_would_be_right() {
    let range = GfnRange::new(Gfn(0x180), 0x10).unwrap();
    let taken = GfnRange::new(Gfn(0x100), 0x100).unwrap();
    let overlap = SlotError::Overlap {
        range,
        other: 3,
        taken,
    };
    assert_eq!(
        overlap.to_string(),
        "frames 0x180..0x190 overlap slot 3 at 0x100..0x200; choose free frames"
    );
    let flags = SlotError::UnknownFlags {
        unknown: SlotFlags(0x30),
    };
    assert_eq!(
        flags.to_string(),
        "unknown slot flags 0x30; the known flags are LOG_DIRTY_PAGES|READONLY|GUEST_MEMFD|USERFAULT"
    );
}
