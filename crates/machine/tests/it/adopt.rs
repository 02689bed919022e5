#![expect(unsafe_code, reason = "adopts memory")]
//! Guest memory that a VMM has made of its own memfds.

use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use pageferry_machine::{
    AccessError, AdoptedRegion, Backing, Exit, GuestRam, MachineError, RamLayout, StartMode,
    StartState, soft,
};
use pageferry_testkit::skip;
use pageferry_userfault::PageBitmap;
use pageferry_vm_memory::SlotMemory;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestAddressSpace, GuestMemoryMmap, GuestRegionMmap,
};

pub(crate) const MIB: u64 = 1 << 20;

pub(crate) fn memfd(bytes: u64, flags: MemfdFlags) -> rustix::io::Result<OwnedFd> {
    let fd = memfd_create(
        "vmm",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | flags,
    )?;
    ftruncate(&fd, bytes)?;
    Ok(fd)
}

pub(crate) fn region(start: u64, bytes: u64, fd: &OwnedFd, offset: u64) -> AdoptedRegion {
    AdoptedRegion::new(Gpa(start), bytes, fd.try_clone().unwrap(), offset)
}

pub(crate) fn adopt(regions: Vec<AdoptedRegion>) -> Result<GuestRam, MachineError> {
    // SAFETY: the tests write the memfds by system calls only, before and after, never beside the
    // accessor.
    unsafe { GuestRam::adopt(regions) }
}

/// Three regions with holes between them: the end and the start of one memfd, and another memfd.
fn three() -> (OwnedFd, OwnedFd, GuestRam) {
    let empty = MemfdFlags::empty();
    let (one, two) = (
        memfd(2 * MIB, empty).unwrap(),
        memfd(3 * MIB, empty).unwrap(),
    );
    let regions = vec![
        region(MIB, MIB, &one, MIB),
        region(1 << 30, MIB, &one, 0),
        region(1 << 40, 2 * MIB, &two, MIB),
    ];
    let ram = adopt(regions).unwrap();
    (one, two, ram)
}

#[test]
fn each_region_shows_its_part_of_its_memfd() {
    let (one, two, ram) = three();
    assert_eq!(ram.pages(), 4 * MIB / PAGE_SIZE);
    for (gpa, fd, at) in [
        (MIB, &one, MIB),
        ((1 << 30) + 5, &one, 5),
        ((1 << 40) + 2 * MIB - 8, &two, 3 * MIB - 8),
    ] {
        let mut bytes = [0; 8];
        rustix::io::pwrite(fd, b"from VMM", at).unwrap();
        ram.try_read(Gpa(gpa), &mut bytes).unwrap();
        assert_eq!(&bytes, b"from VMM");
        ram.try_write(Gpa(gpa), b"accessor").unwrap();
        rustix::io::pread(fd, &mut bytes, at).unwrap();
        assert_eq!(&bytes, b"accessor");
    }
    // An access at a guest address ends with its region, one at a page goes on.
    let refused = ram.try_write(Gpa(2 * MIB - 4), &[1; 8]);
    assert!(matches!(refused, Err(AccessError::NotRam { .. })));
    ram.try_write((RamPage(255), 4092), &[1; 8]).unwrap();
    let mut byte = [0];
    rustix::io::pread(&one, &mut byte, 3).unwrap();
    assert_eq!(byte, [1]);
}

#[test]
fn holes_are_found_and_made_in_every_memfd() {
    let (_one, _two, ram) = three();
    assert_eq!(ram.next_allocated(RamPage(0), 8).unwrap(), None);
    for page in [255, 256, 1023] {
        ram.try_write(RamPage(page), &[1]).unwrap();
    }
    let from = |page| ram.next_allocated(RamPage(page), 1).unwrap();
    assert_eq!(from(0), Some(255..256));
    assert_eq!(from(256), Some(256..257));
    assert_eq!(from(257), Some(1023..1024));
    assert_eq!(ram.next_allocated(RamPage(0), 8).unwrap(), Some(255..257));
    // SAFETY: nobody else uses the memory.
    unsafe { ram.unchecked() }
        .punch_hole(RamPage(250), 10)
        .unwrap();
    assert_eq!(from(0), Some(1023..1024));
    ram.allocate().unwrap();
    assert_eq!(from(300), Some(300..301));
}

#[test]
fn a_guest_runs_in_adopted_memory() {
    let (one, _two, ram) = three();
    let mut new = soft::create_on(1, ram, soft::SoftOptions::default()).unwrap();
    // sw a0, 0(a1); sw a0, 0(x0): the second leaves the guest, since there is no RAM at 0.
    let code = [0x00a5_a023_u32, 0x00a0_2023]
        .map(u32::to_le_bytes)
        .concat();
    new.machine.ram().try_write(Gpa(MIB), &code).unwrap();
    new.machine.set_dirty_log(true).unwrap();
    let start = StartState {
        entry: MIB,
        stack: 0,
        args: [77, (1 << 30) + 4096],
        tables: Gpa(0),
        mode: StartMode::User,
    };
    new.vcpus[0].set_start(&start).unwrap();
    let exit = new.vcpus[0].run().unwrap();
    assert!(
        matches!(exit, Exit::MmioWrite { value: 77, .. }),
        "{exit:?}"
    );
    let mut word = [0; 4];
    rustix::io::pread(&one, &mut word, 4096).unwrap();
    assert_eq!(u32::from_le_bytes(word), 77);
    let dirty = PageBitmap::new(1024);
    assert_eq!(new.machine.harvest_dirty(&dirty, true).unwrap(), 1);
    assert!(dirty.test(RamPage(257)), "a page of the second region");
}

#[test]
fn the_memory_slots_of_rust_vmm_are_adopted() {
    let fd = memfd(2 * MIB, MemfdFlags::empty()).unwrap();
    let mapped = |start, offset| {
        let file = FileOffset::new(fd.try_clone().unwrap().into(), offset);
        let mapped = GuestRegionMmap::from_range(GuestAddress(start), MIB as usize, Some(file));
        Arc::new(mapped.unwrap())
    };
    let slots = SlotMemory::<GuestRegionMmap>::new();
    let mut writer = slots.lock();
    writer.insert_region(mapped(1 << 32, 0)).unwrap();
    writer.insert_region(mapped(0, MIB)).unwrap();
    drop(writer);
    let memory = slots.memory();
    let ram = adopt(AdoptedRegion::of(&*memory).unwrap()).unwrap();
    ram.try_write(Gpa(MIB - 4), b"last").unwrap();
    ram.try_write(Gpa(1 << 32), b"next").unwrap();
    let read = |at| memory.read_obj::<[u8; 4]>(GuestAddress(at)).unwrap();
    assert_eq!((&read(MIB - 4), &read(1 << 32)), (b"last", b"next"));
    let private = GuestRegionMmap::<()>::from_range(GuestAddress(0), MIB as usize, None).unwrap();
    let private = GuestMemoryMmap::from_regions(vec![private]).unwrap();
    let why = AdoptedRegion::of(&private).unwrap_err().to_string();
    assert!(why.contains("FileOffset"), "{why}");
}

#[test]
fn memory_that_cannot_serve_is_refused_with_the_reason() {
    let empty = MemfdFlags::empty();
    let why = |regions| adopt(regions).unwrap_err().to_string();
    let fd = memfd(MIB, empty).unwrap();
    assert!(why(vec![]).contains("at least one page"));
    assert!(why(vec![region(0, 2 * MIB, &fd, 0)]).contains("has 1048576 bytes"));
    assert!(why(vec![region(0, MIB, &fd, 4096)]).contains("has 1048576 bytes"));
    assert!(why(vec![region(0, 4096, &fd, 12)]).contains("offset 12 is no multiple of 4096"));
    let file = std::fs::File::open("/proc/self/exe").unwrap().into();
    assert!(why(vec![region(0, 4096, &file, 0)]).contains("memfd_create"));
    let open = memfd_create("open", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&open, MIB).unwrap();
    assert!(why(vec![region(0, 4096, &open, 0)]).contains("F_SEAL_SHRINK"));
    adopt(vec![region(0, MIB, &open, 0).keeps_size()]).unwrap();
    let short = vec![region(0, 2 * MIB, &open, 0).keeps_size()];
    assert!(why(short).contains("has 1048576 bytes"));
    let sealed = memfd(MIB, empty).unwrap();
    fcntl_add_seals(&sealed, SealFlags::WRITE).unwrap();
    assert!(why(vec![region(0, 4096, &sealed, 0)]).contains("against writing"));
    adopt(vec![region(0, MIB, &fd, 0)]).unwrap();
    assert!(
        ftruncate(&fd, 4096).is_err(),
        "adopted memory cannot shrink"
    );
}

#[test]
fn huge_pages_of_a_pool_are_adopted() {
    let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    if let Err(why) = Backing::Hugetlb2M.check(4 * MIB) {
        skip("huge pages", format_args!("adopted huge pages: {why}"));
        return;
    }
    let fd = memfd(4 * MIB, flags).unwrap();
    let odd = adopt(vec![region(MIB, 2 * MIB, &fd, 0)]).unwrap_err();
    assert!(matches!(odd, MachineError::Layout(_)), "{odd}");
    let regions = vec![
        region(0, 2 * MIB, &fd, 2 * MIB),
        region(1 << 30, 2 * MIB, &fd, 0),
    ];
    let ram = adopt(regions).unwrap();
    assert_eq!(ram.backing(), Backing::Hugetlb2M);
    assert_eq!(
        ram.layout(),
        &RamLayout::new(&[(Gpa(0), 2 * MIB), (Gpa(1 << 30), 2 * MIB)]).unwrap()
    );
    ram.try_write((RamPage(511), 4092), b"over the edge")
        .unwrap();
    let mut bytes = [0; 13];
    ram.try_read((RamPage(511), 4092), &mut bytes).unwrap();
    assert_eq!(&bytes, b"over the edge");
}

#[test]
fn regions_that_share_bytes_of_a_memfd_are_refused() {
    let empty = MemfdFlags::empty();
    let (one, two) = (
        memfd(4 * MIB, empty).unwrap(),
        memfd(4 * MIB, empty).unwrap(),
    );
    const HIGH: u64 = 1 << 30;
    // The same file by another open file description: the device and the inode tell.
    let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&one));
    let again = std::fs::File::options().read(true).write(true).open(again);
    let again = OwnedFd::from(again.unwrap());
    for (file, offset, bytes, shared) in [
        (&one, MIB, 2 * MIB, true),
        (&one, 2 * MIB - PAGE_SIZE, MIB, true),
        (&one, 0, MIB + PAGE_SIZE, true),
        (&one, 0, 4 * MIB, true),
        (&one, MIB + PAGE_SIZE, PAGE_SIZE, true),
        (&again, MIB, MIB, true),
        (&one, 2 * MIB, 2 * MIB, false),
        (&one, 0, MIB, false),
        (&two, MIB, MIB, false),
    ] {
        let regions = vec![
            region(MIB, MIB, &two, 0),
            region(8 * MIB, MIB, &one, MIB),
            region(HIGH, bytes, file, offset),
        ];
        match adopt(regions) {
            Ok(_) => assert!(!shared, "{bytes} bytes from {offset}"),
            Err(why) => {
                let why = why.to_string();
                let named = [Gpa(HIGH), Gpa(8 * MIB)].map(|at| why.contains(&at.to_string()));
                assert!(shared && named == [true; 2], "{why}");
            }
        }
    }
}

/// Whoever holds the memfd may shrink it beside the call. Then it is refused, or it was sealed
/// first.
#[test]
fn a_memfd_that_shrinks_meanwhile_is_refused_or_keeps_its_size() {
    let mut shrunk = 0;
    for round in 0..2000 {
        let fd = memfd(MIB, MemfdFlags::empty()).unwrap();
        let go = AtomicBool::new(false);
        let adopted = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !go.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                // At another moment of the call each time.
                (0..round % 97 * 7).for_each(|_| std::hint::spin_loop());
                let _ = ftruncate(&fd, PAGE_SIZE);
            });
            let regions = vec![region(0, MIB, &fd, 0)];
            go.store(true, Ordering::Release);
            adopt(regions).is_ok()
        });
        let size = rustix::fs::fstat(&fd).unwrap().st_size as u64;
        assert!(!adopted || size == MIB, "adopted 1 MiB of {size} bytes");
        shrunk += u32::from(size < MIB);
    }
    println!("{shrunk} memfds shrank in time");
}
