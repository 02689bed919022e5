//! Changes of a slot that begin while a fault is between its look at the slot and the tables. The
//! fault has found the slot as it was; the change has to wait until it is over, or what it maps
//! comes after what the change takes away.
//!
//! The fault is held until another vCPU, which is asked after the held one, says that it has been
//! asked to leave its guest: then the change is known to wait. Or until the change has returned,
//! which it must not: the fault then goes on and maps by the old slot.
//!
//! Which pages are write-tracked is looked up later: there the fault is held when it asks how large
//! the pages of the memory are, which is after that, and before it maps anything.
#![expect(unsafe_code, reason = "test memory is put into slots")]

use crate::support::vm::{HostRam, PAGE, StopOnDrop, asm::*, vcpu, vm_of};
use crate::support::watched::{LEFT, PAUSE, Watched};
use pageferry_addr::{Gfn, Hva, PageSize, RamPage};
use pageferry_hypervisor::{Exit, HostMemory, Region, SlotFlags, UserfaultBits, Vm};
use pageferry_testkit::{LIMIT, Stop, wait_until};
use pageferry_userfault::PageBitmap;
use std::cell::Cell;
use std::ops::Range;
use std::sync::{Arc, mpsc};

/// Where the slot under test is: one page, which is page `MEMORY` of the host's.
const PLACE: Gfn = Gfn(16);
const MEMORY: u64 = 1;

/// Where the fault is held.
#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    /// It has found the slot.
    Slot,
    /// It has found that the page is not tracked.
    Size,
}

thread_local! {
    /// Is called when this thread asks for the size of the memory's pages.
    static ASKED: Cell<Option<Box<dyn FnOnce()>>> = const { Cell::new(None) };
}

/// Memory that tells when its size is asked for.
struct Telling(Arc<HostRam>);

// SAFETY: it is `HostRam`, whose contract holds.
unsafe impl HostMemory for Telling {
    fn hva_range(&self) -> Range<Hva> {
        self.0.hva_range()
    }

    fn page_size(&self) -> PageSize {
        if let Some(asked) = ASKED.take() {
            asked();
        }
        PageSize::Size4K
    }
}

struct Test {
    ram: Arc<HostRam>,
    vm: Vm<Watched>,
    /// Exits of the guest that stores.
    exits: mpsc::Receiver<Exit>,
    /// What the page held when the change had returned.
    then: u64,
}

impl Test {
    fn page(&self) -> u64 {
        self.ram.get(MEMORY * PAGE)
    }

    fn has_stored(&self) -> bool {
        self.page() != self.then
    }

    /// The guest's next touch leaves with `expected`, and none has stored since the change
    /// returned.
    #[track_caller]
    fn expect_exit(&self, expected: impl Fn(&Exit) -> bool) {
        let mut exit = None;
        wait_until("the guest's next touch of the page", || {
            exit = self.exits.try_recv().ok();
            exit.is_some() || self.has_stored()
        });
        assert!(
            !self.has_stored(),
            "a store went on to what the slot was before"
        );
        let exit = exit.expect("one of the two");
        assert!(expected(&exit), "{exit:?}");
    }
}

fn region(ram: &Arc<HostRam>) -> Region {
    Region {
        memory: Some(Arc::new(Telling(Arc::clone(ram)))),
        ..ram.region(1, PLACE.gpa().0, MEMORY, 1)
    }
}

/// Makes `change` while a guest's first store to the slot's page is in flight. Then calls `check`;
/// the guest goes on storing to the page, a higher number each time, until it leaves.
#[track_caller]
fn while_a_store_is_in_flight(
    at: At,
    change: impl FnOnce(&Vm<Watched>, Region),
    check: impl FnOnce(&Test),
) {
    // The one stores, the other goes round and round.
    const OTHER: u64 = 64;
    let ram = HostRam::new(MEMORY as usize + 1);
    ram.code(0, &[addi(A0, A0, 1), sd(A0, A1, 0), jal(X0, -8)]);
    ram.code(OTHER, &[jal(X0, 0)]);
    let vm = vm_of::<Watched>(&ram);
    vm.set_user_memory_region2(region(&ram)).unwrap();
    // Requests go to vCPUs in the order in which they were made.
    let mut storing = vcpu(&vm, 0, 0);
    storing.hart_mut().set_x(11, PLACE.gpa().0);
    let mut other = vcpu(&vm, 1, OTHER);
    let kicks = vec![storing.kick_handle(), other.kick_handle()];
    let alarm = Stop::new();
    let (in_flight, wait_for_fault) = mpsc::channel();
    let (go_on, wait_for_change) = mpsc::channel();
    let (left, exits) = mpsc::channel();
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&alarm, kicks);
        let alarm = &alarm;
        scope.spawn(move || {
            let hold = move || {
                in_flight.send(()).unwrap();
                wait_for_change.recv_timeout(LIMIT).unwrap();
            };
            match at {
                At::Slot => PAUSE.set(Some((PLACE, Box::new(hold)))),
                At::Size => ASKED.set(Some(Box::new(hold))),
            }
            let exit = storing.run();
            // The test may be over.
            let _ = left.send(exit);
        });
        let asked = go_on.clone();
        scope.spawn(move || {
            LEFT.set(Some(Box::new(move || {
                let _ = asked.send(());
            })));
            while !alarm.is_stopped() {
                assert_eq!(other.run(), Exit::Kicked);
            }
        });
        wait_for_fault.recv_timeout(LIMIT).unwrap();
        change(&vm, region(&ram));
        let then = ram.get(MEMORY * PAGE);
        // Nobody listens where it has gone on.
        let _ = go_on.send(());
        check(&Test {
            ram: Arc::clone(&ram),
            vm: vm.clone(),
            exits,
            then,
        });
    });
}

#[test]
fn a_log_that_begins_waits_for_a_fault_in_flight() {
    while_a_store_is_in_flight(
        At::Slot,
        |vm, region| {
            let flags = SlotFlags::LOG_DIRTY_PAGES;
            vm.set_user_memory_region2(Region { flags, ..region })
                .unwrap();
        },
        |test| {
            wait_until("a store after the log began", || test.has_stored());
            let mut log = [0];
            test.vm.get_dirty_log(1, &mut log).unwrap();
            assert_eq!(log, [1], "a store after the log began is not in it");
        },
    );
}

#[test]
fn tracking_waits_for_a_fault_in_flight() {
    while_a_store_is_in_flight(
        At::Size,
        |vm, _| assert_eq!(vm.track_writes(1, 0..1), Ok(1)),
        |test| {
            let tracked = |exit: &Exit| {
                matches!(
                    exit,
                    Exit::MemoryFault {
                        write_tracked: true,
                        ..
                    }
                )
            };
            test.expect_exit(tracked);
        },
    );
}

#[test]
fn a_deletion_waits_for_a_fault_in_flight() {
    while_a_store_is_in_flight(
        At::Slot,
        |vm, _| vm.set_user_memory_region2(Region::delete(1)).unwrap(),
        |test| {
            test.expect_exit(|exit| matches!(exit, Exit::MmioWrite { .. }));
            assert_eq!(test.vm.mapped_pages(), 1, "only the code's page");
        },
    );
}

#[test]
fn a_move_waits_for_a_fault_in_flight() {
    while_a_store_is_in_flight(
        At::Slot,
        |vm, region| {
            let gpa = Gfn(PLACE.0 + 1).gpa();
            vm.set_user_memory_region2(Region { gpa, ..region })
                .unwrap();
        },
        |test| test.expect_exit(|exit| matches!(exit, Exit::MmioWrite { .. })),
    );
}

#[test]
fn userfault_waits_for_a_fault_in_flight() {
    while_a_store_is_in_flight(
        At::Slot,
        |vm, region| {
            let bitmap = PageBitmap::new(1);
            bitmap.set_range(0..1);
            let userfault = UserfaultBits {
                bitmap: Arc::new(bitmap),
                first: RamPage(0),
            };
            vm.set_user_memory_region2(Region {
                flags: SlotFlags::USERFAULT,
                userfault: Some(userfault),
                ..region
            })
            .unwrap();
        },
        |test| {
            let userfault = |exit: &Exit| {
                matches!(
                    exit,
                    Exit::MemoryFault {
                        userfault: true,
                        ..
                    }
                )
            };
            test.expect_exit(userfault);
        },
    );
}
