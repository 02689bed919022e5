//! Both halves of a notifier, and zapping everything, while vCPUs run.

use crate::support::vm::{HostRam, PAGE, StopOnDrop, asm::*, vcpu, vm};
use pageferry_addr::Hva;
use pageferry_hypervisor::{DirtyBy, Exit, SlotFlags, Vm, VmConfig};
use pageferry_testkit::{Stop, wait_until};
use std::sync::atomic::{AtomicU64, Ordering};

const A4: u32 = 14;

/// An endless loop that loads the words at a1 and a1 + 8. It does an ECALL if the second is smaller
/// than the first. a3 counts rounds, in memory at a2.
fn watcher_code() -> [u32; 7] {
    [
        ld(A0, A1, 0),
        ld(A4, A1, 8),
        bltu(A4, A0, 16),
        addi(A3, A3, 1),
        sd(A3, A2, 0),
        jal(X0, -20),
        ECALL,
    ]
}

#[test]
fn nobody_reaches_a_page_while_it_changes() {
    let ram = HostRam::new(4);
    ram.code(0, &watcher_code());
    let vm = vm(&ram);
    let mut watcher = vcpu(&vm, 0, 0);
    watcher.hart_mut().set_x(11, PAGE);
    watcher.hart_mut().set_x(12, 2 * PAGE);
    let (kick, alarm, wrong) = (watcher.kick_handle(), Stop::new(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&alarm, vec![kick]);
        let (alarm, wrong) = (&alarm, &wrong);
        scope.spawn(move || {
            while !alarm.is_stopped() {
                if watcher.run() != Exit::Kicked {
                    wrong.fetch_add(1, Ordering::Relaxed);
                    return;
                }
            }
        });
        let page = Hva(ram.hva().0 + PAGE);
        let mut unmapped = 0;
        for value in 1..=300 {
            let (zapped, mapped) = vm.invalidate_hva_around(page..Hva(page.0 + 1), || {
                // The first word is ahead of the second for a while. Only the host may see that.
                ram.set(PAGE, value);
                for _ in 0..2000 {
                    std::hint::spin_loop();
                }
                let mapped = vm.mapped_pages();
                ram.set(PAGE + 8, value);
                mapped
            });
            unmapped += zapped;
            assert!(mapped <= 2, "the page was mapped while it changed");
            let seen = ram.get(2 * PAGE);
            wait_until("the guest to access it again", || {
                wrong.load(Ordering::Relaxed) != 0 || ram.get(2 * PAGE) > seen + 1
            });
        }
        assert_eq!(
            wrong.load(Ordering::Relaxed),
            0,
            "the guest saw a page that was changing"
        );
        assert!(unmapped >= 250, "{unmapped} of 300 found the page mapped");
    });
}

#[test]
fn everything_goes_at_once_and_comes_back_by_faults() {
    let ram = HostRam::new(8);
    // An endless loop that stores to each page from a1 to a2, then does an ECALL.
    ram.code(
        0,
        &[
            lui(A3, 1),
            sd(A0, A1, 0),
            add(A1, A1, A3),
            bltu(A1, A2, -8),
            ECALL,
        ],
    );
    let vm = vm(&ram);
    let mut guest = vcpu(&vm, 0, 0);
    let mut store = |value: u64| {
        guest.hart_mut().set_pc(0).unwrap();
        for (register, value) in [(10, value), (11, PAGE), (12, 7 * PAGE)] {
            guest.hart_mut().set_x(register, value);
        }
        assert!(matches!(guest.run(), Exit::Ecall { .. }));
    };
    let empty = vm.table_bytes();
    for round in 1..=3 {
        store(round);
        assert_eq!(vm.mapped_pages(), 7, "six pages and the code's");
        assert!(vm.table_bytes() > empty);
        assert_eq!(vm.zap_all(), 7);
        assert_eq!((vm.mapped_pages(), vm.table_bytes()), (0, empty));
        assert!((1..7).all(|page| ram.get(page * PAGE) == round));
    }
    assert_eq!(vm.zap_all(), 0);
}

/// When entries of several slots are zapped, each log gets the dirty bits of its slot only.
#[test]
fn what_is_dirty_beside_a_logged_slot_stays_out_of_its_log() {
    let ram = HostRam::new(1 + 3 * 2);
    ram.code(0, &[sd(A0, A1, 0), sd(A0, A2, 0), sd(A0, A3, 0), ECALL]);
    let all = ram.hva()..Hva(ram.hva().0 + 7 * PAGE);
    for zap in [true, false] {
        let vm = Vm::new(VmConfig {
            dirty_by: DirtyBy::Bits,
            ..VmConfig::default()
        });
        vm.set_user_memory_region2(ram.region(0, 0, 0, 1)).unwrap();
        // The second of three slots is logged. The guest stores to the last page of each.
        for slot in 1..=3 {
            let first = 2 * u64::from(slot) - 1;
            let mut region = ram.region(slot, u64::from(slot) << 20, first, 2);
            if slot == 2 {
                region.flags = SlotFlags::LOG_DIRTY_PAGES;
            }
            vm.set_user_memory_region2(region).unwrap();
        }
        let mut guest = vcpu(&vm, 0, 0);
        for (register, slot) in [(11, 1), (12, 2), (13, 3)] {
            guest.hart_mut().set_x(register, (slot << 20) + PAGE);
        }
        assert!(matches!(guest.run(), Exit::Ecall { .. }));
        let gone = if zap {
            vm.zap_all()
        } else {
            vm.invalidate_hva(all.clone())
        };
        assert_eq!(gone, 4, "three pages and the code's");
        let mut log = [0];
        assert_eq!(vm.get_dirty_log(2, &mut log).unwrap(), 1);
        assert_eq!(log, [0b10]);
    }
}
