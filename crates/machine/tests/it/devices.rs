//! Devices written against `vm-memory`, on machines whose pages are missing.

use crate::access::{Bringer, EXTENTS, PAGES, beside, is_untorn, on_each_delivery};
use crate::place::placing;
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_machine::{AccessError, DeviceMemory, Engine, MachineSpec, create};
use pageferry_testkit::wait_until;
use pageferry_userfault::PageBitmap;
use std::error::Error;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryError,
    GuestMemoryRegion, MemoryRegionAddress, VolatileMemory,
};

// A page for each: the descriptors, both rings, and the buffers.
const DESCRIPTORS: u64 = 10 * PAGE_SIZE;
const AVAILABLE: u64 = 11 * PAGE_SIZE;
const USED: u64 = 12 * PAGE_SIZE;
const PAYLOAD: u64 = 13 * PAGE_SIZE + 4000;
const SUM: u64 = 16 * PAGE_SIZE;

/// A virtio device that adds up bytes. It knows `vm-memory` only.
struct Adder<AS: GuestAddressSpace> {
    memory: AS,
    queue: Queue,
}

impl<AS: GuestAddressSpace> Adder<AS> {
    fn new(memory: AS) -> Self {
        let mut queue = Queue::new(16).unwrap();
        queue
            .try_set_desc_table_address(GuestAddress(DESCRIPTORS))
            .unwrap();
        queue
            .try_set_avail_ring_address(GuestAddress(AVAILABLE))
            .unwrap();
        queue.try_set_used_ring_address(GuestAddress(USED)).unwrap();
        queue.set_ready(true);
        Self { memory, queue }
    }

    fn notified(&mut self) -> Result<u16, Box<dyn Error>> {
        let memory = self.memory.memory();
        let mut chains = 0;
        while let Some(chain) = self.queue.iter(memory.clone())?.next() {
            let head = chain.head_index();
            let mut bytes = Vec::new();
            chain.clone().reader(&memory)?.read_to_end(&mut bytes)?;
            let sum: u32 = bytes.iter().map(|&byte| u32::from(byte)).sum();
            chain.writer(&memory)?.write_all(&sum.to_le_bytes())?;
            self.queue.add_used(&*memory, head, 4)?;
            chains += 1;
        }
        Ok(chains)
    }
}

/// Acts as the guest's driver at the source of a migration: a chain of 5000 bytes over three pages.
fn submit<AS: GuestAddressSpace>(memory: &AS) -> u32 {
    // The descriptor flags of the virtio specification, 2.7.5.
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    let memory = memory.memory();
    let payload: Vec<u8> = (0..5000).map(|at| (at % 251) as u8).collect();
    memory.write_slice(&payload, GuestAddress(PAYLOAD)).unwrap();
    let chain = [
        Descriptor::new(PAYLOAD, 5000, NEXT, 1),
        Descriptor::new(SUM, 4, WRITE, 0),
    ];
    for (index, descriptor) in (0..).zip(chain) {
        let at = GuestAddress(DESCRIPTORS + 16 * index);
        memory
            .write_obj(RawDescriptor::from(descriptor), at)
            .unwrap();
    }
    memory
        .store(1_u16, GuestAddress(AVAILABLE + 2), Ordering::Release)
        .unwrap();
    payload.iter().map(|&byte| u32::from(byte)).sum()
}

/// The [`AccessError`] in an error of `vm-memory`.
fn reason(error: GuestMemoryError) -> AccessError {
    match error {
        GuestMemoryError::IOError(error) => error.downcast().unwrap(),
        other => panic!("{other}"),
    }
}

#[test]
fn a_device_gets_its_missing_pages_and_its_writes_are_in_the_dirty_log() {
    on_each_delivery(|new, delivery| {
        let machine = &new.machine;
        let memory = DeviceMemory::new(Arc::clone(machine.ram()), || false);
        let sum = submit(&memory);
        // The destination has the same pages, but its memory has none of their bytes.
        let kept: Vec<_> = (0..PAGES)
            .map(|page| {
                let mut bytes = [0; PAGE_SIZE as usize];
                machine.ram().try_read(RamPage(page), &mut bytes).unwrap();
                bytes
            })
            .collect();
        let source = Bringer::armed(machine, delivery, 10..17).with_pages(kept);
        for page in 10..17 {
            placing(machine.ram()).write(RamPage(page), &[0x5a; PAGE_SIZE as usize]);
        }
        let mut device = Adder::new(memory.clone());
        assert!(device.notified().is_err(), "memory is not here yet");
        let _source = source.attach();
        machine.begin_postcopy().unwrap();
        machine.set_dirty_log(true).unwrap();
        assert_eq!(device.notified().unwrap(), 1);

        let view = memory.memory();
        assert_eq!(view.read_obj::<u32>(GuestAddress(SUM)).unwrap(), sum);
        assert_eq!(view.read_obj::<u16>(GuestAddress(USED + 2)).unwrap(), 1);
        let dirty = PageBitmap::new(PAGES as usize);
        machine.harvest_dirty(&dirty, true).unwrap();
        for written in [SUM, USED] {
            assert!(dirty.test(RamPage(written / PAGE_SIZE)), "{written:#x}");
        }
        assert!(!dirty.test(RamPage(PAYLOAD / PAGE_SIZE)), "it only read");
    });
}

#[test]
fn a_device_that_waits_for_a_page_can_be_stopped() {
    on_each_delivery(|new, delivery| {
        let (machine, stopped) = (&new.machine, Arc::new(AtomicBool::new(false)));
        let source = Bringer::armed(machine, delivery, 20..22).that_waits();
        let source = source.attach();
        machine.begin_postcopy().unwrap();
        let memory = DeviceMemory::new(Arc::clone(machine.ram()), {
            let stopped = Arc::clone(&stopped);
            move || stopped.load(Ordering::Acquire)
        });
        let view = memory.memory();
        let addr = GuestAddress(20 * PAGE_SIZE);
        let error = std::thread::scope(|scope| {
            let device = scope.spawn(|| view.load::<u32>(addr, Ordering::Acquire));
            wait_until("the device to wait", || source.was_asked());
            assert!(!device.is_finished());
            stopped.store(true, Ordering::Release);
            device.join().unwrap().unwrap_err()
        });
        assert_eq!(reason(error), AccessError::Stopped(RamPage(20)));
        // The pages that are here are reached all the same.
        view.store(7_u32, GuestAddress(0), Ordering::Release)
            .unwrap();
    });
}

#[test]
fn a_view_shows_ram_and_nothing_else() {
    let new = create(Engine::Soft, MachineSpec::new(1, (3 << 30) + 2 * PAGE_SIZE)).unwrap();
    let memory = DeviceMemory::new(Arc::clone(new.machine.ram()), || false);
    let view = memory.memory();
    assert_eq!(view.num_regions(), 2);
    assert_eq!(
        view.last_addr(),
        GuestAddress((4 << 30) + 2 * PAGE_SIZE - 1)
    );
    let hole = GuestAddress((3 << 30) - 2);
    assert_eq!(view.write(b"four", hole).unwrap(), 2);
    assert!(view.read_obj::<u32>(hole).is_err());
    assert!(view.get_slice(hole, 4).is_err());
    assert!(GuestMemoryBackend::check_range(&*view, hole, 2));
    assert!(!GuestMemoryBackend::check_range(&*view, hole, 3));
    let region = view.iter().last().unwrap();
    let end = MemoryRegionAddress(region.len() - 2);
    assert_eq!(region.write(b"four", end).unwrap(), 2);
    assert!(region.write_slice(b"four", end).is_err());
    let mut bytes = [0; 2];
    new.machine
        .ram()
        .try_read((RamPage((3 << 18) + 1), PAGE_SIZE - 2), &mut bytes)
        .unwrap();
    assert_eq!(&bytes, b"fo");
}

#[test]
fn a_device_that_holds_on_to_memory_keeps_a_migration_away() {
    on_each_delivery(|new, delivery| {
        let machine = &new.machine;
        let memory = DeviceMemory::new(Arc::clone(machine.ram()), || false);
        let view = memory.memory();
        machine.ram().set_device_limit(Duration::from_millis(20));
        let missing = Arc::new(PageBitmap::new(PAGES as usize));
        let arm = || {
            machine
                .arm_userfault(Arc::clone(&missing), delivery.into())
                .err()
        };
        let held = arm().unwrap().to_string();
        assert!(held.contains("a device holds on to guest memory"), "{held}");
        let frozen = machine.ram().freeze().err().unwrap().to_string();
        assert_eq!(frozen, held);
        view.write_obj(7_u32, GuestAddress(0)).unwrap();
        drop(view);

        let frozen = machine.ram().freeze().unwrap();
        let late = memory
            .memory()
            .write_obj(8_u32, GuestAddress(0))
            .unwrap_err();
        assert_eq!(reason(late), AccessError::Frozen);
        drop(frozen);
        assert!(arm().is_none());
        let early = memory
            .memory()
            .read_obj::<u32>(GuestAddress(0))
            .unwrap_err();
        assert_eq!(reason(early), AccessError::Receiving);
        machine.begin_postcopy().unwrap();
        let value: u32 = memory.memory().read_obj(GuestAddress(0)).unwrap();
        assert_eq!(value, 7);
    });
}

/// A device may copy through a region, from and to buffers at any host address.
#[test]
fn a_copy_through_a_region_tears_no_aligned_part() {
    let new = create(Engine::Soft, MachineSpec::new(1, PAGES * PAGE_SIZE)).unwrap();
    let memory = DeviceMemory::new(Arc::clone(new.machine.ram()), || false);
    let view = memory.memory();
    let region = view.iter().next().unwrap();
    for extent in EXTENTS {
        let (start, len) = extent;
        let (at, words) = (start as u64, (start + len).next_multiple_of(8));
        let mut bytes = vec![0; words + 1];
        let write = |value| {
            let buffer = vec![value; len + 1];
            region
                .write_slice(&buffer[1..], MemoryRegionAddress(at))
                .unwrap();
        };
        let ram = new.machine.ram();
        // The words as one write leaves them, also if the other thread comes late.
        ram.try_write(RamPage(0), &bytes[..words]).unwrap();
        beside(write, || {
            ram.try_read(RamPage(0), &mut bytes[..words]).unwrap();
            assert!(
                is_untorn(extent, &bytes[..words]),
                "torn write of {extent:?}"
            );
        });
        bytes.fill(0);
        let write = |value| ram.try_write(RamPage(0), &vec![value; words]).unwrap();
        beside(write, || {
            let buffer = &mut bytes[1 + start..1 + start + len];
            region.read_slice(buffer, MemoryRegionAddress(at)).unwrap();
            assert!(is_untorn(extent, &bytes[1..]), "torn read of {extent:?}");
        });
    }
}

#[test]
fn copies_through_a_region_end_with_it_and_are_logged() {
    let new = create(Engine::Soft, MachineSpec::new(1, PAGES * PAGE_SIZE)).unwrap();
    new.machine.set_dirty_log(true).unwrap();
    let memory = DeviceMemory::new(Arc::clone(new.machine.ram()), || false);
    let view = memory.memory();
    let region = view.iter().next().unwrap();
    let end = PAGES * PAGE_SIZE;
    let at = MemoryRegionAddress(end - 3);
    assert_eq!(region.write(b"abcde", at).unwrap(), 3);
    let mut bytes = [b'-'; 5];
    assert_eq!(region.read(&mut bytes, at).unwrap(), 3);
    assert_eq!(&bytes, b"abc--");
    assert!(region.write_slice(b"abcd", at).is_err());
    assert!(region.read_slice(&mut bytes, at).is_err());
    let behind = MemoryRegionAddress(end + 1);
    assert!(region.write(b"", behind).is_err() && region.read(&mut [], behind).is_err());
    let dirty = PageBitmap::new(PAGES as usize);
    assert_eq!(new.machine.harvest_dirty(&dirty, true).unwrap(), 1);
    assert!(dirty.test(RamPage(PAGES - 1)));
}

/// A device holds a slice while a harvest comes. Its later writes are in the next harvest,
/// whichever way it writes, and wherever in the slice.
#[test]
fn a_write_through_a_slice_is_logged_when_it_is_made() {
    /// A name, the write, and its pages.
    type Write<'a> = (&'a str, &'a dyn Fn(), &'a [u64]);
    const FIRST: u64 = 3;
    let new = create(Engine::Soft, MachineSpec::new(1, PAGES * PAGE_SIZE)).unwrap();
    let machine = &new.machine;
    machine.set_dirty_log(true).unwrap();
    let memory = DeviceMemory::new(Arc::clone(machine.ram()), || false);
    let view = memory.memory();
    let start = GuestAddress(FIRST * PAGE_SIZE - 8);
    let slice = view.get_slice(start, 2 * PAGE_SIZE as usize).unwrap();
    let at = |page: u64, offset: u64| ((page - FIRST) * PAGE_SIZE + 8 + offset) as usize;
    let page = |page| at(page, 0);
    let harvest = || {
        let dirty = PageBitmap::new(PAGES as usize);
        machine.harvest_dirty(&dirty, true).unwrap();
        let is_set = |page: &u64| dirty.test(RamPage(*page));
        (0..PAGES).filter(is_set).collect::<Vec<_>>()
    };
    assert_eq!(harvest(), [0; 0], "nothing is written yet");
    let bytes = [7_u8; 16];
    let writes: [Write<'_>; 9] = [
        (
            "write_slice",
            &|| slice.write_slice(&bytes, page(3)).unwrap(),
            &[3],
        ),
        (
            "over an edge",
            &|| slice.write_slice(&bytes, page(4) - 8).unwrap(),
            &[3, 4],
        ),
        ("at the start", &|| slice.write_obj(1_u64, 0).unwrap(), &[2]),
        (
            "store",
            &|| slice.store(1_u64, page(4), Ordering::Release).unwrap(),
            &[4],
        ),
        (
            "of a part",
            &|| {
                let part = slice.subslice(page(4), 16).unwrap();
                part.write_obj(1_u32, 4).unwrap();
            },
            &[4],
        ),
        (
            "behind an offset",
            &|| slice.offset(page(3)).unwrap().copy_from(&bytes),
            &[3],
        ),
        (
            "of a reader",
            &|| {
                let read = slice.read_volatile_from(page(4) - 2, &mut &bytes[..], 16);
                assert_eq!(read.unwrap(), 16);
            },
            &[3, 4],
        ),
        (
            "of another slice",
            &|| {
                let other = view.get_slice(GuestAddress(0), 16).unwrap();
                other.copy_to_volatile_slice(slice.subslice(page(3), 16).unwrap());
            },
            &[3],
        ),
        (
            "through a reference",
            &|| slice.get_ref::<u64>(page(4)).unwrap().store(3),
            &[4],
        ),
    ];
    for (name, write, pages) in writes {
        write();
        assert_eq!(harvest(), pages, "{name}");
        assert_eq!(harvest(), [0; 0], "{name}");
    }
}
