//! Changes of a slot that begin while a fault is between its look-up of the slot and the tables.
//! The fault has found the old slot. The change must wait until the fault has ended, or the fault
//! maps a page after the change has swept the tables.
//!
//! A test holds the fault until another vCPU has left its guest for the change. The change makes
//! its request to that vCPU after the request to the held one, so it is then waiting. If the change
//! returns before that, which is a bug, the test releases the fault. The fault then maps a page by
//! the old slot.
//!
//! A fault tests the write-tracking bits later. There the test holds the fault when it reads the
//! size of the memory's pages. That is after the bits, and before the fault maps anything.
#![expect(unsafe_code, reason = "puts test memory into slots")]

use crate::support::vm::{HostRam, PAGE, StopOnDrop, asm::*, vcpu, vm_of};
use crate::support::watched::{LEFT, PAUSE, Watched};
use pageferry_addr::{Gfn, Hva, PageSize, RamPage};
use pageferry_hypervisor::{Exit, HostMemory, Region, SlotFlags, UserfaultBits, Vm};
use pageferry_testkit::{LIMIT, Stop, wait_until};
use pageferry_userfault::PageBitmap;
use std::cell::Cell;
use std::ops::Range;
use std::sync::{Arc, mpsc};

/// The frame of the slot under test. It has one page, which is page `MEMORY` of the host memory.
const PLACE: Gfn = Gfn(16);
const MEMORY: u64 = 1;

/// The point at which the test holds the fault.
#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    /// The fault has found the slot.
    Slot,
    /// The fault has found that the page is not tracked.
    Size,
}

thread_local! {
    /// Called when this thread reads the size of the memory's pages.
    static ASKED: Cell<Option<Box<dyn FnOnce()>>> = const { Cell::new(None) };
}

/// Memory with a hook in `page_size`.
struct Telling(Arc<HostRam>);

// SAFETY: the range is that of `HostRam`, which keeps the contract.
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
    /// Exits of the vCPU that stores.
    exits: mpsc::Receiver<Exit>,
    /// The contents of the page when the change had returned.
    then: u64,
}

impl Test {
    fn page(&self) -> u64 {
        self.ram.get(MEMORY * PAGE)
    }

    fn has_stored(&self) -> bool {
        self.page() != self.then
    }

    /// Checks that the guest's next access leaves with `expected`, and that no store went through
    /// since the change returned.
    #[track_caller]
    fn expect_exit(&self, expected: impl Fn(&Exit) -> bool) {
        let mut exit = None;
        wait_until("the guest's next access to the page", || {
            exit = self.exits.try_recv().ok();
            exit.is_some() || self.has_stored()
        });
        assert!(
            !self.has_stored(),
            "a store went to the old page of the slot"
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

/// Makes `change` while a guest's first store to the slot's page is in flight. Then calls `check`.
/// The guest keeps storing to the page, a higher number each time, until it leaves.
#[track_caller]
fn while_a_store_is_in_flight(
    at: At,
    change: impl FnOnce(&Vm<Watched>, Region),
    check: impl FnOnce(&Test),
) {
    // One vCPU stores. The other executes an endless loop.
    const OTHER: u64 = 64;
    let ram = HostRam::new(MEMORY as usize + 1);
    ram.code(0, &[addi(A0, A0, 1), sd(A0, A1, 0), jal(X0, -8)]);
    ram.code(OTHER, &[jal(X0, 0)]);
    let vm = vm_of::<Watched>(&ram);
    vm.set_user_memory_region2(region(&ram)).unwrap();
    // Requests go to vCPUs in the order of their creation.
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
            // The test may have ended.
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
        // If the fault was released before, there is no receiver.
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
            assert_eq!(test.vm.mapped_pages(), 1, "the page of the code only");
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
