//! The promises of `vm-memory` for a memory backend. The same code checks its own memory and ours.

use super::kinds::against_both;
use super::kinds::{Kind, PAGE, file_map, map, region, tempfile};
use std::io::{Read, Seek, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vm_memory::bitmap::{AtomicBitmap, Bitmap};
use vm_memory::iommu::{Error as IommuError, IotlbIterator, IovaRange};
use vm_memory::{
    Address, ByteValued, Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend,
    GuestMemoryError, GuestMemoryRegion, Iommu, IommuMemory, Iotlb, MemoryRegionAddress,
    Permissions,
};

against_both!(
    regions_are_shown_in_order,
    addresses_are_found_or_not,
    offsets_that_leave_memory_or_overflow_are_refused,
    ranges_may_cross_touching_regions_but_no_hole,
    bytes_cross_regions_and_stop_at_holes,
    objects_are_whole_or_refused,
    nothing_is_always_possible,
    files_are_read_and_written_through,
    slices_stay_inside_a_region,
    slices_cover_a_range_until_its_hole,
    try_access_visits_regions_in_order,
    atomics_need_their_alignment_and_their_memory,
    host_addresses_follow_the_region,
    the_backing_file_is_known,
    overlapping_regions_are_refused,
    removal_wants_the_exact_region,
    a_region_moves_with_its_bytes,
    writes_are_tracked_in_the_regions_bitmap,
    memory_is_reached_through_the_iova_trait_too,
    the_highest_region_is_reached,
    an_iommu_leads_into_the_regions,
);

fn a(addr: u64) -> GuestAddress {
    GuestAddress(addr)
}

/// Regions at 0x1000 (one page), 0x2000 (two pages, touching) and 0x8000 (one page).
const THREE: [(u64, u64); 3] = [(0x1000, PAGE), (0x2000, 2 * PAGE), (0x8000, PAGE)];

fn regions_are_shown_in_order<K: Kind>() {
    // The regions do not come in the order of addresses.
    let space = map::<(), K>(&[THREE[2], THREE[0], THREE[1]]);
    let memory = space.memory();
    let shown: Vec<_> = memory.iter().map(|r| (r.start_addr().0, r.len())).collect();
    assert_eq!(shown, THREE);
    assert_eq!(memory.num_regions(), 3);
    assert_eq!(memory.last_addr(), a(0x8fff));
}

fn addresses_are_found_or_not<K: Kind>() {
    let space = map::<(), K>(&THREE);
    let memory = space.memory();
    for (addr, found) in [
        (0, None),
        (0xfff, None),
        (0x1000, Some((0x1000, 0))),
        (0x1fff, Some((0x1000, 0xfff))),
        (0x2000, Some((0x2000, 0))),
        (0x3abc, Some((0x2000, 0x1abc))),
        (0x3fff, Some((0x2000, 0x1fff))),
        (0x4000, None),
        (0x7fff, None),
        (0x8000, Some((0x8000, 0))),
        (0x8fff, Some((0x8000, 0xfff))),
        (0x9000, None),
        (u64::MAX, None),
    ] {
        let inside = found.is_some();
        assert_eq!(
            memory
                .to_region_addr(a(addr))
                .map(|(region, offset)| (region.start_addr().0, offset.0)),
            found,
            "{addr:#x}"
        );
        assert_eq!(
            memory.find_region(a(addr)).map(|r| r.start_addr().0),
            found.map(|(start, _)| start)
        );
        assert_eq!(memory.address_in_range(a(addr)), inside);
        assert_eq!(memory.check_address(a(addr)), inside.then_some(a(addr)));
    }
}

fn offsets_that_leave_memory_or_overflow_are_refused<K: Kind>() {
    let space = map::<(), K>(&THREE);
    let memory = space.memory();
    assert_eq!(memory.checked_offset(a(0x1000), 0xfff), Some(a(0x1fff)));
    // Over a hole into another region: only the end counts.
    assert_eq!(memory.checked_offset(a(0x1000), 0x7000), Some(a(0x8000)));
    assert_eq!(memory.checked_offset(a(0x1000), 0x3000), None);
    assert_eq!(memory.checked_offset(a(0x1000), usize::MAX), None);
}

fn ranges_may_cross_touching_regions_but_no_hole<K: Kind>() {
    let space = map::<(), K>(&THREE);
    let memory = space.memory();
    let check = |base, len| GuestMemoryBackend::check_range(&*memory, a(base), len);
    assert!(check(0x1000, 0));
    assert!(check(0x1000, 0x1000));
    assert!(check(0x1000, 0x3000));
    assert!(check(0x1fff, 2));
    assert!(!check(0x1000, 0x3001));
    assert!(!check(0x1000, 0x8000));
    assert!(!check(0x4000, 1));
    assert!(check(0x8000, 0x1000));
    assert!(!check(0x8000, 0x1001));
    assert!(!check(0x1000, usize::MAX));
}

fn bytes_cross_regions_and_stop_at_holes<K: Kind>() {
    let space = map::<(), K>(&THREE);
    let memory = space.memory();
    let sample: Vec<u8> = (1..=200).collect();
    assert_eq!(memory.write(&sample, a(0x1f9c)).unwrap(), 200);
    let mut back = [0; 200];
    assert_eq!(memory.read(&mut back, a(0x1f9c)).unwrap(), 200);
    assert_eq!(back[..], sample[..]);
    // Each region has its part.
    let second = memory.find_region(a(0x2000)).unwrap();
    let mut part = [0; 100];
    second
        .read_slice(&mut part, MemoryRegionAddress(0))
        .unwrap();
    assert_eq!(part[..], sample[100..]);

    assert_eq!(memory.write(&sample, a(0x3fff)).unwrap(), 1);
    let mut back = [0; 200];
    assert_eq!(memory.read(&mut back, a(0x3fff)).unwrap(), 1);
    assert_eq!(back[..2], [1, 0]);
    assert!(matches!(
        memory.write(&sample, a(0x4000)),
        Err(GuestMemoryError::InvalidGuestAddress(addr)) if addr == a(0x4000)
    ));
    assert!(matches!(
        memory.write_slice(&sample, a(0x3f9c)),
        Err(GuestMemoryError::PartialBuffer {
            expected: 200,
            completed: 100
        })
    ));
    assert!(matches!(
        memory.read_slice(&mut back, a(0x8fff)),
        Err(GuestMemoryError::PartialBuffer {
            expected: 200,
            completed: 1
        })
    ));
}

#[derive(Clone, Copy, Default, Debug, PartialEq)]
#[repr(C)]
struct Descriptor {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}
mod plain {
    #![expect(unsafe_code, reason = "ByteValued is an unsafe trait")]
    // SAFETY: repr(C) integers, 8 + 4 + 2 + 2 bytes without padding: any bytes are a value.
    unsafe impl vm_memory::ByteValued for super::Descriptor {}
}

fn objects_are_whole_or_refused<K: Kind>() {
    let space = map::<(), K>(&THREE);
    let memory = space.memory();
    let wanted = Descriptor {
        addr: 0x1122_3344_5566_7788,
        len: 9,
        flags: 10,
        next: 11,
    };
    for at in [0x1008, 0x1ff9, 0x3ff0, 0x8000] {
        memory.write_obj(wanted, a(at)).unwrap();
        assert_eq!(memory.read_obj::<Descriptor>(a(at)).unwrap(), wanted);
    }
    assert!(matches!(
        memory.write_obj(wanted, a(0x3ff9)),
        Err(GuestMemoryError::PartialBuffer {
            expected: 16,
            completed: 7
        })
    ));
    assert!(matches!(
        memory.read_obj::<Descriptor>(a(0x5000)),
        Err(GuestMemoryError::InvalidGuestAddress(addr)) if addr == a(0x5000)
    ));
    assert_eq!(wanted.as_slice().len(), 16);
}

fn nothing_is_always_possible<K: Kind>() {
    let space = map::<(), K>(&THREE);
    let memory = space.memory();
    for addr in [0x1000, 0x5000, u64::MAX].map(a) {
        assert_eq!(memory.write(&[], addr).unwrap(), 0);
        assert_eq!(memory.read(&mut [], addr).unwrap(), 0);
        memory.write_slice(&[], addr).unwrap();
        memory.read_slice(&mut [], addr).unwrap();
        let mut source: &[u8] = &[1, 2, 3];
        assert_eq!(memory.read_volatile_from(addr, &mut source, 0).unwrap(), 0);
        assert_eq!(source, [1, 2, 3]);
        let mut sink = Vec::new();
        memory.write_all_volatile_to(addr, &mut sink, 0).unwrap();
        assert!(sink.is_empty());
        assert!(memory.get_slices(addr, 0).next().is_none());
    }
}

fn files_are_read_and_written_through<K: Kind>() {
    let space = map::<(), K>(&THREE);
    let memory = space.memory();
    let image: Vec<u8> = (0..0x2000u32).map(|i| (i % 251) as u8).collect();
    let mut file = tempfile();
    file.write_all(&image).unwrap();
    file.rewind().unwrap();
    memory
        .read_exact_volatile_from(a(0x1800), &mut file, image.len())
        .unwrap();
    let mut back = vec![0; image.len()];
    memory.read_slice(&mut back, a(0x1800)).unwrap();
    assert_eq!(back, image);

    let mut out = tempfile();
    memory
        .write_all_volatile_to(a(0x1800), &mut out, image.len())
        .unwrap();
    out.rewind().unwrap();
    let mut written = Vec::new();
    out.read_to_end(&mut written).unwrap();
    assert_eq!(written, image);

    // The call stops at the hole and returns the count so far.
    file.rewind().unwrap();
    assert_eq!(
        memory
            .read_volatile_from(a(0x3800), &mut file, 0x1000)
            .unwrap(),
        0x800
    );
    file.rewind().unwrap();
    assert!(matches!(
        memory.read_exact_volatile_from(a(0x3800), &mut file, 0x1000),
        Err(GuestMemoryError::PartialBuffer {
            expected: 0x1000,
            completed: 0x800
        })
    ));
}

fn slices_stay_inside_a_region<K: Kind>() {
    let space = map::<(), K>(&THREE);
    let memory = space.memory();
    assert_eq!(memory.get_slice(a(0x1100), 0x200).unwrap().len(), 0x200);
    assert_eq!(memory.get_slice(a(0x2000), 0x2000).unwrap().len(), 0x2000);
    assert!(memory.get_slice(a(0x2100), 0).unwrap().is_empty());
    // A slice is one piece of host memory, so it cannot cross the edge of a region, even to an
    // adjacent one.
    assert!(memory.get_slice(a(0x1800), 0x801).is_err());
    assert!(memory.get_slice(a(0x5000), 1).is_err());
    assert!(memory.get_slice(a(0x9000), 1).is_err());

    let slice = memory.get_slice(a(0x2010), 16).unwrap();
    slice.write_obj(0xfeed_u64, 8).unwrap();
    assert_eq!(memory.read_obj::<u64>(a(0x2018)).unwrap(), 0xfeed);
    let whole = memory.find_region(a(0x2000)).unwrap().as_volatile_slice();
    assert_eq!(whole.unwrap().len(), 0x2000);
}

fn slices_cover_a_range_until_its_hole<K: Kind>() {
    let space = map::<(), K>(&THREE);
    let memory = space.memory();
    let lengths = |addr, count| -> Vec<Option<usize>> {
        memory
            .get_slices(a(addr), count)
            .map(|slice| slice.ok().map(|s| s.len()))
            .collect()
    };
    assert_eq!(lengths(0x1100, 0x200), [Some(0x200)]);
    assert_eq!(lengths(0x1800, 0x1800), [Some(0x800), Some(0x1000)]);
    assert_eq!(lengths(0x1800, 0x2800), [Some(0x800), Some(0x2000)]);
    assert_eq!(lengths(0x1800, 0x2801), [Some(0x800), Some(0x2000), None]);
    assert_eq!(lengths(0x6000, 8), [None]);

    let stopped = GuestMemoryBackend::get_slices(&*memory, a(0x1800), 0x3000).stop_on_error();
    assert_eq!(
        stopped.unwrap().map(|s| s.len()).collect::<Vec<_>>(),
        [0x800, 0x2000]
    );
    assert!(memory.get_slices(a(0x6000), 8).stop_on_error().is_err());
    // The iterator ends after a failure.
    let mut failing = memory.get_slices(a(0x6000), 8);
    assert!(failing.next().unwrap().is_err());
    assert!(failing.next().is_none() && failing.next().is_none());
}

#[expect(deprecated, reason = "existing devices still call it")]
fn try_access_visits_regions_in_order<K: Kind>() {
    let space = map::<(), K>(&THREE);
    let memory = space.memory();
    let mut visits = Vec::new();
    let total = memory.try_access(0x9000, a(0x1c00), |done, len, offset, region| {
        visits.push((done, len, offset.0, region.start_addr().0));
        Ok(len)
    });
    assert_eq!(total.unwrap(), 0x2400);
    assert_eq!(
        visits,
        [(0, 0x400, 0xc00, 0x1000), (0x400, 0x2000, 0, 0x2000)]
    );

    // A callback that handles less is called again for the rest. One that handles nothing ends the
    // call.
    let mut calls = 0;
    let total = memory.try_access(0x1000, a(0x2000), |_, _, _, _| {
        calls += 1;
        Ok(if calls <= 3 { 0x100 } else { 0 })
    });
    assert_eq!((total.unwrap(), calls), (0x300, 4));
    let error = memory.try_access(8, a(0x2000), |_, _, _, _| {
        Err(GuestMemoryError::HostAddressNotAvailable)
    });
    assert!(matches!(
        error,
        Err(GuestMemoryError::HostAddressNotAvailable)
    ));
    let boast = memory.try_access(8, a(0x2000), |_, len, _, _| Ok(len + 1));
    assert!(matches!(boast, Err(GuestMemoryError::CallbackOutOfRange)));
    let hole = memory.try_access(8, a(0x5000), |_, len, _, _| Ok(len));
    assert!(matches!(
        hole,
        Err(GuestMemoryError::InvalidGuestAddress(_))
    ));
}

fn atomics_need_their_alignment_and_their_memory<K: Kind>() {
    let space = map::<(), K>(&THREE);
    let memory = space.memory();
    for order in [Ordering::Relaxed, Ordering::Release, Ordering::SeqCst] {
        memory
            .store(0x0123_4567_89ab_cdefu64, a(0x1ff8), order)
            .unwrap();
    }
    assert_eq!(
        memory.load::<u64>(a(0x1ff8), Ordering::Acquire).unwrap(),
        0x0123_4567_89ab_cdef
    );
    assert_eq!(
        memory.load::<u16>(a(0x1ffe), Ordering::Relaxed).unwrap(),
        memory.read_obj::<u16>(a(0x1ffe)).unwrap()
    );
    assert!(memory.store(1u32, a(0x1002), Ordering::Relaxed).is_err());
    // No atomic can cross the edge into the next region.
    assert!(memory.load::<u64>(a(0x1ffc), Ordering::Relaxed).is_err());
    assert!(matches!(
        memory.store(1u8, a(0x7fff), Ordering::Relaxed),
        Err(GuestMemoryError::InvalidGuestAddress(_))
    ));
}

fn host_addresses_follow_the_region<K: Kind>() {
    let space = map::<(), K>(&THREE);
    let memory = space.memory();
    let region = memory.find_region(a(0x2000)).unwrap();
    assert_eq!(memory.get_host_address(a(0x2000)).unwrap(), region.as_ptr());
    assert_eq!(
        memory.get_host_address(a(0x3123)).unwrap(),
        region.as_ptr().wrapping_add(0x1123)
    );
    assert!(memory.get_host_address(a(0x4000)).is_err());
    let slice = memory.get_slice(a(0x3123), 4).unwrap();
    assert_eq!(
        slice.ptr_guard().as_ptr(),
        memory.get_host_address(a(0x3123)).unwrap().cast_const()
    );
}

fn the_backing_file_is_known<K: Kind>() {
    let space = file_map::<K>(&THREE, 0x5000);
    let memory = space.memory();
    let starts: Vec<_> = memory
        .iter()
        .map(|r| r.file_offset().unwrap().start())
        .collect();
    assert_eq!(starts, [0x5000, 0x6000, 0x8000]);
    memory.write_slice(b"to the file", a(0x8ff0)).unwrap();
    let place = memory
        .find_region(a(0x8000))
        .unwrap()
        .file_offset()
        .unwrap();
    let mut bytes = [0; 11];
    let at = place.start() + 0xff0;
    std::os::unix::fs::FileExt::read_exact_at(place.file(), &mut bytes, at).unwrap();
    assert_eq!(&bytes, b"to the file");
    let space = map::<(), K>(&THREE);
    assert!(space.memory().iter().all(|r| r.file_offset().is_none()));
}

fn overlapping_regions_are_refused<K: Kind>() {
    assert!(K::of(vec![region(0, 2 * PAGE), region(PAGE, PAGE)]).is_none());
    let space = map::<(), K>(&THREE);
    for (base, size) in [
        (0x1000, PAGE),
        (0, 2 * PAGE),
        (0x3000, PAGE),
        (0x7000, 3 * PAGE),
    ] {
        assert!(
            !K::insert(&space, Arc::new(region(base, size))),
            "{base:#x}"
        );
    }
    assert_eq!(space.memory().num_regions(), 3);
    assert!(K::insert(&space, Arc::new(region(0x4000, 4 * PAGE))));
    assert!(GuestMemoryBackend::check_range(
        &*space.memory(),
        a(0x1000),
        0x8000
    ));
}

fn removal_wants_the_exact_region<K: Kind>() {
    let space = map::<(), K>(&THREE);
    for (base, size) in [
        (0x2000, PAGE),
        (0x3000, PAGE),
        (0x5000, PAGE),
        (0x2000, 3 * PAGE),
    ] {
        assert!(K::remove(&space, base, size).is_none(), "{base:#x}");
    }
    let removed = K::remove(&space, 0x2000, 2 * PAGE).unwrap();
    assert_eq!((removed.start_addr().0, removed.len()), (0x2000, 2 * PAGE));
    let memory = space.memory();
    assert_eq!(memory.num_regions(), 2);
    assert!(memory.find_region(a(0x2000)).is_none());
    assert!(memory.find_region(a(0x1fff)).is_some());
}

fn a_region_moves_with_its_bytes<K: Kind>() {
    let space = map::<(), K>(&THREE);
    space
        .memory()
        .write_slice(b"travels", a(0x3ffe - 7))
        .unwrap();
    assert!(!K::relocate(&space, 0x2000, 2 * PAGE, 0x7000), "taken");
    assert!(
        K::relocate(&space, 0x2000, 2 * PAGE, 0x3000),
        "over its own old place"
    );
    assert!(K::relocate(&space, 0x3000, 2 * PAGE, 0x10_0000));
    let memory = space.memory();
    assert!(memory.find_region(a(0x2000)).is_none() && memory.find_region(a(0x3000)).is_none());
    let mut bytes = [0; 7];
    memory.read_slice(&mut bytes, a(0x10_1ffe - 7)).unwrap();
    assert_eq!(&bytes, b"travels");
    assert_eq!(memory.last_addr(), a(0x10_1fff));
}

fn writes_are_tracked_in_the_regions_bitmap<K: Kind<AtomicBitmap>>() {
    let space = map::<AtomicBitmap, K>(&THREE);
    let memory = space.memory();
    let dirty = |addr| {
        let (region, offset) = memory.to_region_addr(a(addr)).unwrap();
        region.bitmap().dirty_at(offset.0 as usize)
    };
    assert!(
        [0x1000, 0x2000, 0x3000, 0x8000]
            .into_iter()
            .all(|p| !dirty(p))
    );
    memory.write_slice(&[1; 0x801], a(0x1800)).unwrap();
    assert!(dirty(0x1000) && dirty(0x2000) && !dirty(0x3000) && !dirty(0x8000));
    memory.store(7u32, a(0x8ffc), Ordering::Relaxed).unwrap();
    assert!(dirty(0x8000));
    let _: u64 = memory.read_obj(a(0x3000)).unwrap();
    assert!(!dirty(0x3000));
}

/// Accesses memory like a device that knows only `GuestMemory`.
fn memory_is_reached_through_the_iova_trait_too<K: Kind>() {
    use vm_memory::GuestMemory;
    fn device<M: GuestMemory>(memory: &M) -> bool {
        memory.write_obj(5u64, GuestAddress(0x1ffc)).unwrap();
        assert!(memory.check_range(GuestAddress(0x1000), 0x3000, Permissions::ReadWrite));
        assert!(!memory.check_range(GuestAddress(0x1000), 0x3001, Permissions::Read));
        let pieces = memory.get_slices(GuestAddress(0x1ffc), 8, Permissions::Read);
        assert_eq!(pieces.unwrap().count(), 2);
        memory.physical_memory().is_some()
    }
    let space = map::<(), K>(&THREE);
    assert!(device(&*space.memory()));
    assert_eq!(space.memory().read_obj::<u64>(a(0x1ffc)).unwrap(), 5);
}

fn the_highest_region_is_reached<K: Kind>() {
    let top = u64::MAX - 0x1fff;
    let space = map::<(), K>(&[(0, PAGE), (top, PAGE)]);
    let memory = space.memory();
    assert_eq!(memory.last_addr(), a(top).unchecked_add(0xfff));
    memory.write_obj(3u8, a(top + 0xfff)).unwrap();
    assert_eq!(memory.write(&[1; 8], a(top + 0xffc)).unwrap(), 4);
    assert!(memory.find_region(a(u64::MAX)).is_none());
}

/// Fixed mappings: IOVA 0xf_0000 maps to 0x1800, across an edge between regions, and there is a
/// read-only page.
#[derive(Debug)]
struct Fixed(Iotlb);

impl Fixed {
    const WINDOW: u64 = 0xf_0000;
    const READ_ONLY: u64 = 0xf_8000;

    fn new() -> Self {
        let mut iotlb = Iotlb::new();
        let maps = [
            (Self::WINDOW, 0x1800, 0x1000, Permissions::ReadWrite),
            (Self::READ_ONLY, 0x8000, 0x1000, Permissions::Read),
        ];
        for (iova, to, len, allowed) in maps {
            iotlb.set_mapping(a(iova), a(to), len, allowed).unwrap();
        }
        Self(iotlb)
    }
}

impl Iommu for Fixed {
    type IotlbGuard<'a> = &'a Iotlb;

    fn translate(
        &self,
        iova: GuestAddress,
        length: usize,
        access: Permissions,
    ) -> Result<IotlbIterator<&Iotlb>, IommuError> {
        Iotlb::lookup(&self.0, iova, length, access).map_err(|fails| IommuError::CannotResolve {
            iova_range: IovaRange { base: iova, length },
            reason: format!("{fails:?}"),
        })
    }
}

fn an_iommu_leads_into_the_regions<K: Kind>() {
    let space = map::<(), K>(&THREE);
    let memory = (*space.memory()).clone();
    let mut behind = IommuMemory::new(memory, Fixed::new(), true, ());
    behind.write_slice(&[7; 0x1000], a(Fixed::WINDOW)).unwrap();
    let mut seen = [0; 0x1002];
    space.memory().read_slice(&mut seen, a(0x17ff)).unwrap();
    assert!(seen[0] == 0 && seen[1..0x1001] == [7; 0x1000] && seen[0x1001] == 0);
    assert!(behind.write_slice(&[7; 0x1001], a(Fixed::WINDOW)).is_err());
    assert!(behind.read_obj::<u32>(a(Fixed::READ_ONLY)).is_ok());
    assert!(matches!(
        behind.write_obj(1u32, a(Fixed::READ_ONLY)),
        Err(GuestMemoryError::IommuError(_))
    ));
    assert!(behind.read_obj::<u8>(a(0x1800)).is_err(), "no such IOVA");

    // Replace the region behind the read-only window, and take a new snapshot, like a device reset.
    K::remove(&space, 0x8000, PAGE).unwrap();
    assert_eq!(behind.read_obj::<u32>(a(Fixed::READ_ONLY)).unwrap(), 0);
    assert!(K::insert(&space, Arc::new(region(0x8000, PAGE))));
    space.memory().write_obj(9u32, a(0x8000)).unwrap();
    behind = behind.with_replaced_backend((*space.memory()).clone());
    assert_eq!(behind.read_obj::<u32>(a(Fixed::READ_ONLY)).unwrap(), 9);
    behind.set_iommu_enabled(false);
    assert_eq!(behind.read_obj::<u8>(a(0x1800)).unwrap(), 7);
}
