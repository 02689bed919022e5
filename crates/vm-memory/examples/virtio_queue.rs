//! A virtio device on memory slots, while another thread changes the slots.
//!
//! The guest's memory is four pages of RAM in slot 0. This program plays the driver. It puts
//! descriptor chains into a split queue there: a header and a payload that the device reads, and a
//! word that it writes. The device knows only `vm-memory`'s traits. It takes a snapshot for each
//! chain, adds up the bytes, and writes the sum. Meanwhile a hotplug thread inserts, moves and
//! removes another region, and switches dirty logging of slot 0 on and off.
//!
//! `cargo run -p pageferry-vm-memory --example virtio_queue`

use pageferry_memslot::SlotFlags;
use pageferry_vm_memory::{RegionError, SlotMemory};
use std::error::Error;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestRegionMmap};

const PAGE: u64 = 0x1000;
const RAM_PAGES: u64 = 4;
const QUEUE_SIZE: u16 = 16;
const ROUNDS: u16 = 20_000;

// The offsets of the queue and its buffers in the RAM.
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x800;
const USED: u64 = PAGE;
const BUFFERS: u64 = 2 * PAGE;

// The descriptor flags of the virtio specification, 2.7.5.
const NEXT: u16 = 1;
const WRITE: u16 = 2;

type Memory = SlotMemory<GuestRegionMmap>;

fn region(base: u64, pages: u64) -> Result<Arc<GuestRegionMmap>, Box<dyn Error + Send + Sync>> {
    let size = usize::try_from(pages * PAGE)?;
    let region = GuestRegionMmap::from_range(GuestAddress(base), size, None)?;
    Ok(Arc::new(region))
}

/// A device that adds up bytes. It would also work on a `GuestMemoryAtomic<GuestMemoryMmap>`.
struct Adder {
    memory: Memory,
    queue: Queue,
}

impl Adder {
    fn new(memory: Memory) -> Result<Self, virtio_queue::Error> {
        let mut queue = Queue::new(QUEUE_SIZE)?;
        queue.try_set_desc_table_address(GuestAddress(DESCRIPTORS))?;
        queue.try_set_avail_ring_address(GuestAddress(AVAILABLE))?;
        queue.try_set_used_ring_address(GuestAddress(USED))?;
        queue.set_ready(true);
        Ok(Self { memory, queue })
    }

    /// Processes all available chains. Returns their number.
    fn notified(&mut self) -> Result<u16, Box<dyn Error + Send + Sync>> {
        let mut chains = 0;
        loop {
            // All accesses of this chain use one version of the memory.
            let memory = self.memory.memory();
            let Some(chain) = self.queue.iter(memory.clone())?.next() else {
                return Ok(chains);
            };
            let head = chain.head_index();
            let mut bytes = Vec::new();
            chain.clone().reader(&memory)?.read_to_end(&mut bytes)?;
            let sum: u32 = bytes.iter().map(|&byte| u32::from(byte)).sum();
            chain.writer(&memory)?.write_all(&sum.to_le_bytes())?;
            self.queue.add_used(&*memory, head, 4)?;
            chains += 1;
        }
    }
}

/// Acts as the guest's driver: makes one chain available, with bytes that depend on `round`.
/// Returns the expected sum.
fn submit(memory: &Memory, round: u16) -> vm_memory::GuestMemoryResult<u32> {
    let memory = memory.memory();
    let (header, payload) = ([round as u8; 16], [(round >> 8) as u8; 300]);
    let buffer = |index: u64| BUFFERS + index * 0x400;
    memory.write_slice(&header, GuestAddress(buffer(0)))?;
    memory.write_slice(&payload, GuestAddress(buffer(1)))?;
    memory.write_obj(u32::MAX, GuestAddress(buffer(2)))?;
    let chain = [
        Descriptor::new(buffer(0), header.len() as u32, NEXT, 1),
        Descriptor::new(buffer(1), payload.len() as u32, NEXT, 2),
        Descriptor::new(buffer(2), 4, WRITE, 0),
    ];
    for (index, descriptor) in (0..).zip(chain) {
        let at = GuestAddress(DESCRIPTORS + 16 * index);
        memory.write_obj(RawDescriptor::from(descriptor), at)?;
    }
    // The ring has flags, the index of the next entry, then the entries. Each entry names the head
    // of a chain.
    let entry = u64::from(round % QUEUE_SIZE);
    memory.write_obj(0_u16, GuestAddress(AVAILABLE + 4 + 2 * entry))?;
    let next = round.wrapping_add(1);
    memory.store(next, GuestAddress(AVAILABLE + 2), Ordering::Release)?;
    let bytes = header.iter().chain(&payload);
    Ok(bytes.map(|&byte| u32::from(byte)).sum())
}

/// The device's answer: the used index, and the sum that it wrote.
fn answer(memory: &Memory) -> vm_memory::GuestMemoryResult<(u16, u32)> {
    let memory = memory.memory();
    let used = memory.load(GuestAddress(USED + 2), Ordering::Acquire)?;
    Ok((used, memory.read_obj(GuestAddress(BUFFERS + 0x800))?))
}

/// Changes slots until `stop`. Returns the number of changes.
fn change_slots(memory: &Memory, stop: &AtomicBool) -> Result<u64, Box<dyn Error + Send + Sync>> {
    let (low, high) = (GuestAddress(0x10_0000), GuestAddress(0x20_0000));
    let size = 8 * PAGE;
    let mut changes = 0;
    while !stop.load(Ordering::Relaxed) || changes < 100 {
        let plugged = region(low.0, 8)?;
        let moved = GuestRegionMmap::with_arc(plugged.get_mmap(), high);
        let moved = Arc::new(moved.ok_or("the new place is in the address space")?);
        // The lock is free between two changes, so that other threads can change the memory too.
        memory.lock().insert_region(plugged)?;
        memory.lock().move_region(low, moved)?;
        let log = SlotFlags::LOG_DIRTY_PAGES;
        memory
            .lock()
            .set_flags(GuestAddress(0), RAM_PAGES * PAGE, log)?;
        memory.lock().remove_region(high, size)?;
        let none = SlotFlags::EMPTY;
        memory
            .lock()
            .set_flags(GuestAddress(0), RAM_PAGES * PAGE, none)?;
        changes += 5;
    }
    let gone = memory.lock().remove_region(high, size);
    assert!(matches!(gone, Err(RegionError::NoSuchRegion { .. })));
    Ok(changes)
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let memory = Memory::from_regions([region(0, RAM_PAGES)?])?;
    let mut device = Adder::new(memory.clone())?;
    let stop = AtomicBool::new(false);
    let changes = thread::scope(|scope| {
        let plugging = scope.spawn(|| change_slots(&memory, &stop));
        let mut play = || -> Result<(), Box<dyn Error + Send + Sync>> {
            for round in 0..ROUNDS {
                let expected = submit(&memory, round)?;
                assert_eq!(device.notified()?, 1, "one chain was available");
                assert_eq!(answer(&memory)?, (round + 1, expected));
            }
            Ok(())
        };
        let played = play();
        stop.store(true, Ordering::Relaxed);
        let changes = plugging
            .join()
            .map_err(|_| "the hotplug thread panicked")??;
        played.map(|()| changes)
    })?;
    assert_eq!(memory.lock().reclaim(), 0, "no snapshot is left");
    println!("{ROUNDS} chains were processed beside {changes} changes of memory slots");
    Ok(())
}
