//! Memory beyond RAM is plugged, moved and unplugged under a guest. The slot table always agrees
//! with KVM.

use crate::support::{Watchdog, no_kvm, pluggable, run, rung, start, word};
use pageferry_addr::{Gfn, Gpa, PAGE_SIZE, RamPage};
use pageferry_machine::{Exit, GuestRam, MachineError, Vcpu};
use pageferry_memslot::SlotError;
use pageferry_testkit::wait_until;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Two places in the GiB that the flat tables map, above RAM.
const HERE: Gpa = Gpa(0x1000_0000);
const THERE: Gpa = Gpa(0x2000_0000);
const ID: u16 = 7;

/// mov ebx, 0xd0000000; l: mov rax, [rdi]; mov [rbx], rax; mov [rdi + 8], rsi; jmp l
const READ_RING_WRITE: [u8; 17] = [
    0xbb, 0, 0, 0, 0xd0, 0x48, 0x8b, 0x07, 0x48, 0x89, 0x03, 0x48, 0x89, 0x77, 0x08, 0xeb, 0xf4,
];
/// l: mov rax, [rdi]; inc rcx; jmp l
const TOUCH: [u8; 8] = [0x48, 0x8b, 0x07, 0x48, 0xff, 0xc1, 0xeb, 0xf8];

fn memory(pages: u64, first_word: u64) -> Arc<GuestRam> {
    let memory = crate::support::memory(pages);
    memory
        .try_write(RamPage(0), &first_word.to_le_bytes())
        .unwrap();
    memory
}

/// The value of the next load of [`READ_RING_WRITE`], from its store to the doorbell. `None` if the
/// load was MMIO. Skips the exit of a store to an address without memory.
fn loads(vcpu: &mut dyn Vcpu) -> Option<u64> {
    match run(vcpu) {
        Exit::MmioRead { .. } => {
            assert_eq!(rung(run(vcpu)), u64::MAX);
            assert!(matches!(run(vcpu), Exit::MmioWrite { size: 8, .. }));
            None
        }
        exit => Some(rung(exit)),
    }
}

#[test]
fn a_guest_sees_memory_come_move_and_go() {
    if no_kvm() {
        return;
    }
    let (new, plug) = pluggable(1, 64);
    let mut vcpus = new.vcpus;
    let vcpu = vcpus[0].as_mut();
    start(new.machine.ram(), vcpu, 0, &READ_RING_WRITE, [HERE.0, 42]);
    assert_eq!(loads(vcpu), None);
    let window = memory(4, 0x1234);
    plug.plug(ID, HERE, Arc::clone(&window), false).unwrap();
    assert_eq!(loads(vcpu), Some(0x1234));
    window
        .try_write(RamPage(0), &0x5678u64.to_le_bytes())
        .unwrap();
    assert_eq!(loads(vcpu), Some(0x5678));
    assert_eq!(word(&window, RamPage(0), 1), 42, "the guest's store");

    plug.relocate(ID, THERE).unwrap();
    // The store that follows the last doorbell goes to an address that has no memory any more.
    assert!(matches!(run(vcpu), Exit::MmioWrite { gpa, .. } if gpa.0 == HERE.0 + 8));
    assert_eq!(loads(vcpu), None);
    start(new.machine.ram(), vcpu, 0, &READ_RING_WRITE, [THERE.0, 43]);
    assert_eq!(loads(vcpu), Some(0x5678));
    assert_eq!(loads(vcpu), Some(0x5678));
    assert_eq!(word(&window, RamPage(0), 1), 43);

    let back = plug.unplug(ID).unwrap();
    assert!(Arc::ptr_eq(&back, &window));
    assert!(matches!(run(vcpu), Exit::MmioWrite { gpa, .. } if gpa.0 == THERE.0 + 8));
    assert_eq!(loads(vcpu), None);
}

#[test]
fn read_only_memory_is_read_by_the_guest_and_written_as_mmio() {
    if no_kvm() {
        return;
    }
    let (new, plug) = pluggable(1, 64);
    let mut vcpus = new.vcpus;
    let vcpu = vcpus[0].as_mut();
    let rom = memory(1, 0xb105);
    plug.plug(ID, HERE, Arc::clone(&rom), true).unwrap();
    start(new.machine.ram(), vcpu, 0, &READ_RING_WRITE, [HERE.0, 42]);
    assert_eq!(rung(run(vcpu)), 0xb105);
    let store = Exit::MmioWrite {
        gpa: Gpa(HERE.0 + 8),
        value: 42,
        size: 8,
    };
    assert_eq!(run(vcpu), store);
    assert_eq!(rung(run(vcpu)), 0xb105);
    assert_eq!(word(&rom, RamPage(0), 1), 0);
}

#[test]
fn what_is_refused_has_not_happened() {
    if no_kvm() {
        return;
    }
    let (new, plug) = pluggable(1, 64);
    let mut reader = plug.slot_table().reader();
    let mut slots = || {
        let guard = reader.pin();
        let ids = guard.view().iter().map(|slot| slot.id);
        ids.collect::<Vec<_>>()
    };
    let window = memory(4, 0);
    plug.plug(ID, HERE, Arc::clone(&window), false).unwrap();
    assert_eq!(slots(), [0, ID]);
    let wrong_state = |result| matches!(result, Err(MachineError::WrongState(_)));
    assert!(wrong_state(plug.plug(0, THERE, Arc::clone(&window), false)));
    assert!(wrong_state(plug.plug(
        ID,
        THERE,
        Arc::clone(&window),
        false
    )));
    assert!(wrong_state(plug.relocate(8, THERE)));
    assert!(wrong_state(plug.relocate(0, THERE)));
    assert!(wrong_state(plug.unplug(8).map(drop)));
    assert!(wrong_state(plug.unplug(0).map(drop)));
    let rule = |result: Result<(), MachineError>| match result {
        Err(MachineError::Engine(why)) => *why.downcast::<SlotError>().unwrap(),
        other => panic!("expected a broken rule of slots: {other:?}"),
    };
    assert!(matches!(
        rule(plug.plug(8, Gpa(63 * PAGE_SIZE), Arc::clone(&window), false)),
        SlotError::Overlap { other: 0, .. }
    ));
    assert!(matches!(
        rule(plug.relocate(ID, Gpa(1))),
        SlotError::UnalignedGpa { .. }
    ));
    // No x86-64 host maps more than 52 bits of addresses.
    let top = Gpa((1 << 52) - 2 * PAGE_SIZE);
    assert!(plug.relocate(ID, top).is_err());
    assert_eq!(slots(), [0, ID]);
    let generation = plug.slot_table().generation();
    assert!(!generation.in_progress());
    assert_eq!(new.machine.ram().pages(), 64);
    let guard = reader.pin();
    let slot = guard.lookup(HERE.gfn()).unwrap();
    assert!(!slot.is_invalid() && Arc::ptr_eq(slot.data.memory(), &window));
    assert!(guard.lookup(Gfn(HERE.gfn().0 + 4)).is_none());
}

#[test]
fn memory_stays_mapped_as_long_as_anybody_sees_it() {
    if no_kvm() {
        return;
    }
    let (_new, plug) = pluggable(1, 64);
    let window = memory(4, 0);
    let weak = Arc::downgrade(&window);
    plug.plug(ID, HERE, window, false).unwrap();
    let mut reader = plug.slot_table().reader();
    let guard = reader.pin();
    let slot = guard.lookup(HERE.gfn()).unwrap();
    drop(plug.unplug(ID).unwrap());
    assert!(slot.is_invalid());
    assert!(weak.upgrade().is_some(), "a guard shows the slot");
    let _ = slot;
    drop(guard);
    // Later changes free the memory that has gone.
    for round in 0..200 {
        plug.plug(ID, Gpa(HERE.0 + round * PAGE_SIZE), memory(1, 0), false)
            .unwrap();
        plug.unplug(ID).unwrap();
    }
    assert!(weak.upgrade().is_none());
}

/// A vCPU reads a window that comes, moves and goes. It leaves only for MMIO and the kick.
#[test]
fn slots_change_under_a_running_vcpu() {
    if no_kvm() {
        return;
    }
    let (new, plug) = pluggable(1, 64);
    let mut vcpu = new.vcpus.into_iter().next().unwrap();
    start(new.machine.ram(), vcpu.as_mut(), 0, &TOUCH, [HERE.0, 0]);
    let (done, kicker) = (Arc::new(AtomicBool::new(false)), vcpu.kicker());
    let misses = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let watchdog = Watchdog::new(vcpu.kicker(), pageferry_testkit::LIMIT);
    let thread = std::thread::spawn({
        let (done, misses) = (Arc::clone(&done), Arc::clone(&misses));
        move || {
            while !done.load(Ordering::Acquire) {
                match vcpu.run().unwrap() {
                    Exit::MmioRead { gpa, .. } => {
                        assert_eq!(gpa, HERE);
                        misses.fetch_add(1, Ordering::Relaxed);
                    }
                    Exit::Kicked => {}
                    other => panic!("{other:?}"),
                }
            }
        }
    });
    let window = memory(4, 5);
    let mut rounds = 0;
    wait_until("an access to nothing", || {
        misses.load(Ordering::Relaxed) > 0
    });
    while rounds < 100 {
        plug.plug(ID, HERE, Arc::clone(&window), false).unwrap();
        plug.relocate(ID, THERE).unwrap();
        plug.relocate(ID, HERE).unwrap();
        plug.unplug(ID).unwrap();
        rounds += 1;
    }
    done.store(true, Ordering::Release);
    kicker.kick();
    thread.join().unwrap();
    assert!(!watchdog.fired());
}
