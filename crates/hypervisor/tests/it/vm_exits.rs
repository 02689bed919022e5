//! The exits of a vCPU, and entering the guest again.

use crate::support::vm::{HostRam, PAGE, StopOnDrop, asm::*, vcpu, vm};
use pageferry_addr::{Gpa, RamPage};
use pageferry_hypervisor::hart::Access;
use pageferry_hypervisor::{Exit, SlotFlags, UserfaultBits, VmError};
use pageferry_testkit::{LIMIT, Random, Stop};
use pageferry_userfault::PageBitmap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

const MMIO: u64 = 0x1000_0000;

fn fault(page: u64, access: Access) -> Exit {
    Exit::MemoryFault {
        gpa: Gpa(page * PAGE),
        size: PAGE,
        access,
        userfault: true,
        write_tracked: false,
    }
}

#[test]
fn a_missing_page_exits_until_its_bit_is_clear() {
    let ram = HostRam::new(8);
    // The program loads a word of page 3, adds 1, stores it to page 4, and does an ECALL.
    ram.code(0, &[ld(A0, A1, 8), addi(A0, A0, 1), sd(A0, A2, 16), ECALL]);
    let vm = vm(&ram);
    let bitmap = Arc::new(PageBitmap::new(128));
    // The slot's page 0 is the bitmap's page 64.
    for page in [0, 3, 4] {
        bitmap.set(RamPage(64 + page));
    }
    let mut region = ram.region(0, 0, 0, 8);
    region.flags = SlotFlags::USERFAULT;
    region.userfault = Some(UserfaultBits {
        bitmap: Arc::clone(&bitmap),
        first: RamPage(64),
    });
    vm.set_user_memory_region2(region.clone()).unwrap();
    let mut vcpu = vcpu(&vm, 0, 0);
    vcpu.hart_mut().set_x(11, 3 * PAGE);
    vcpu.hart_mut().set_x(12, 4 * PAGE);

    assert_eq!(vcpu.run(), fault(0, Access::Fetch));
    assert_eq!(vcpu.run(), fault(0, Access::Fetch), "still missing");
    bitmap.clear(RamPage(64));
    assert_eq!(vcpu.run(), fault(3, Access::Load));
    assert_eq!(vcpu.hart().pc(), 0, "the load is repeated");
    ram.set(3 * PAGE + 8, 41);
    bitmap.clear(RamPage(67));
    assert_eq!(vcpu.run(), fault(4, Access::Store));
    assert_eq!((vcpu.hart().pc(), vcpu.hart().x(10)), (8, 42));
    assert_eq!(ram.get(4 * PAGE + 16), 0, "no store reaches a missing page");
    bitmap.clear(RamPage(68));
    assert!(matches!(vcpu.run(), Exit::Ecall { .. }));
    assert_eq!(ram.get(4 * PAGE + 16), 42);
    assert_eq!(vcpu.hart().instret(), 3);

    // A bit that is set while the page is mapped has no effect, until the slot gets the flag again.
    bitmap.set(RamPage(67));
    vcpu.hart_mut().set_pc(0).unwrap();
    assert!(matches!(vcpu.run(), Exit::Ecall { .. }));
    let mut off = region.clone();
    off.flags = SlotFlags::EMPTY;
    vm.set_user_memory_region2(off).unwrap();
    vm.set_user_memory_region2(region).unwrap();
    vcpu.hart_mut().set_pc(0).unwrap();
    assert_eq!(vcpu.run(), fault(3, Access::Load));
}

#[test]
fn a_store_over_two_pages_waits_for_both() {
    let ram = HostRam::new(4);
    ram.code(0, &[sd(A0, A1, 0), ECALL]);
    let vm = vm(&ram);
    let bitmap = Arc::new(PageBitmap::new(4));
    bitmap.set(RamPage(2));
    let mut region = ram.region(0, 0, 0, 4);
    region.flags = SlotFlags::USERFAULT;
    region.userfault = Some(UserfaultBits {
        bitmap: Arc::clone(&bitmap),
        first: RamPage(0),
    });
    vm.set_user_memory_region2(region).unwrap();
    let mut vcpu = vcpu(&vm, 0, 0);
    vcpu.hart_mut().set_x(10, 0x1122_3344_5566_7788);
    vcpu.hart_mut().set_x(11, 2 * PAGE - 3);
    assert_eq!(vcpu.run(), fault(2, Access::Store));
    assert_eq!(ram.get(2 * PAGE - 8), 0, "no byte is stored");
    bitmap.clear(RamPage(2));
    assert!(matches!(vcpu.run(), Exit::Ecall { .. }));
    assert_eq!(ram.get(2 * PAGE - 8), 0x6677_8800_0000_0000);
    assert_eq!(ram.get(2 * PAGE), 0x11_2233_4455);
}

#[test]
fn outside_all_slots_is_mmio() {
    let ram = HostRam::new(2);
    ram.code(0, &[lw(A0, A1, 4), sh(A0, A1, 2), ld(A2, A1, 8), ECALL]);
    let vm = vm(&ram);
    let mut vcpu = vcpu(&vm, 0, 0);
    vcpu.hart_mut().set_x(11, MMIO);
    let gpa = Gpa(MMIO + 4);
    assert_eq!(vcpu.run(), Exit::MmioRead { gpa, size: 4 });
    vcpu.complete_mmio_read(0x8000_1234);
    let gpa = Gpa(MMIO + 2);
    let value = 0x1234;
    assert_eq!(
        vcpu.run(),
        Exit::MmioWrite {
            gpa,
            size: 2,
            value
        }
    );
    let gpa = Gpa(MMIO + 8);
    assert_eq!(vcpu.run(), Exit::MmioRead { gpa, size: 8 });
    assert!(matches!(vcpu.run(), Exit::Ecall { .. }));
    assert_eq!(vcpu.hart().x(10), 0xffff_ffff_8000_1234, "sign-extended");
    assert_eq!(vcpu.hart().x(12), u64::MAX, "all ones without an answer");
    // Past the tables' limit, and past the end of memory by one byte.
    for base in [1 << 50, u64::MAX - 15, 2 * PAGE] {
        vcpu.hart_mut().set_pc(8).unwrap();
        vcpu.hart_mut().set_x(11, base);
        let gpa = Gpa(base + 8);
        assert_eq!(vcpu.run(), Exit::MmioRead { gpa, size: 8 });
    }
}

#[test]
fn a_read_only_slot_reads_and_its_writes_leave() {
    let ram = HostRam::new(4);
    ram.code(0, &[ld(A0, A1, 0), sd(A2, A1, 8), sd(A2, A1, 16), ECALL]);
    ram.set(2 * PAGE, 7);
    let vm = vm(&ram);
    let mut region = ram.region(1, MMIO, 2, 1);
    region.flags = SlotFlags::READONLY;
    vm.set_user_memory_region2(region).unwrap();
    let mut vcpu = vcpu(&vm, 0, 0);
    vcpu.hart_mut().set_x(11, MMIO);
    vcpu.hart_mut().set_x(12, 99);
    for offset in [8, 16] {
        let gpa = Gpa(MMIO + offset);
        let size = 8;
        assert_eq!(
            vcpu.run(),
            Exit::MmioWrite {
                gpa,
                size,
                value: 99
            }
        );
    }
    assert!(matches!(vcpu.run(), Exit::Ecall { .. }));
    assert_eq!(vcpu.hart().x(10), 7);
    assert_eq!((ram.get(2 * PAGE + 8), ram.get(2 * PAGE + 16)), (0, 0));
}

#[test]
fn halt_and_ecall_leave_with_the_state_complete() {
    let ram = HostRam::new(1);
    ram.code(0, &[addi(A0, X0, 5), WFI, ECALL]);
    let vm = vm(&ram);
    let mut first = vcpu(&vm, 0, 0);
    assert_eq!(first.run(), Exit::Halted);
    // The state moves to another vCPU, which continues.
    let mut second = vm.create_vcpu(1).unwrap();
    second.set_state(&first.state()).unwrap();
    let Exit::Ecall { args } = second.run() else {
        panic!("no ECALL");
    };
    assert_eq!(args[0], 5);
    assert_eq!(second.hart().instret(), 2);
}

#[test]
fn the_first_instruction_is_noticed_when_it_retires() {
    let ram = HostRam::new(2);
    ram.code(0, &[ld(A0, A1, 0), WFI]);
    let vm = vm(&ram);
    let bitmap = Arc::new(PageBitmap::new(2));
    bitmap.set(RamPage(1));
    let mut region = ram.region(0, 0, 0, 2);
    region.flags = SlotFlags::USERFAULT;
    region.userfault = Some(UserfaultBits {
        bitmap: Arc::clone(&bitmap),
        first: RamPage(0),
    });
    vm.set_user_memory_region2(region).unwrap();
    let mut vcpu = vcpu(&vm, 0, 0);
    vcpu.hart_mut().set_x(11, PAGE);
    vcpu.watch_first_instruction();
    assert_eq!(vcpu.run(), fault(1, Access::Load));
    assert_eq!(vcpu.first_instruction(), None, "none has retired");
    let before = Instant::now();
    bitmap.clear(RamPage(1));
    assert_eq!(vcpu.run(), Exit::Halted);
    let when = vcpu.first_instruction().unwrap();
    assert!(before <= when && when <= Instant::now());
}

#[test]
fn ids_are_used_once_and_are_bounded() {
    let vm = vm(&HostRam::new(1));
    let _vcpu = vm.create_vcpu(7).unwrap();
    assert_eq!(vm.create_vcpu(7).unwrap_err(), VmError::VcpuExists(7));
    let max = vm.capabilities().max_vcpus;
    assert_eq!(
        vm.create_vcpu(max).unwrap_err(),
        VmError::VcpuIdTooLarge { id: max, max }
    );
}

#[test]
fn atomics_reach_the_same_memory() {
    let ram = HostRam::new(2);
    let code = [
        atomic(AMOADD, D, A0, A1, A2),
        atomic(LR, D, A3, A1, 0),
        atomic(SC, D, T0, A1, A2),
        atomic(SC, D, T1, A1, A2),
        WFI,
    ];
    ram.code(0, &code);
    ram.set(PAGE, 40);
    let vm = vm(&ram);
    let mut vcpu = vcpu(&vm, 0, 0);
    vcpu.hart_mut().set_x(11, PAGE);
    vcpu.hart_mut().set_x(12, 2);
    assert_eq!(vcpu.run(), Exit::Halted);
    let x = |i| vcpu.hart().x(i);
    assert_eq!((x(10), x(13), x(5), x(6)), (40, 42, 0, 1));
    assert_eq!(ram.get(PAGE), 2);
}

#[test]
fn no_kick_is_lost() {
    const KICKS: u64 = 10_000;
    let ram = HostRam::new(2);
    // An endless loop that counts in memory.
    ram.code(
        0,
        &[ld(A0, A1, 0), addi(A0, A0, 1), sd(A0, A1, 0), jal(X0, -12)],
    );
    let vm = vm(&ram);
    let mut vcpu = vcpu(&vm, 0, 0);
    vcpu.hart_mut().set_x(11, PAGE);
    let kick = vcpu.kick_handle();
    let taken = AtomicU64::new(0);
    let alarm = Stop::new();
    let mut latencies = std::thread::scope(|scope| {
        let _stop = StopOnDrop(&alarm, vec![kick.clone()]);
        let (taken, alarm) = (&taken, &alarm);
        scope.spawn(move || {
            while !alarm.is_stopped() {
                assert_eq!(vcpu.run(), Exit::Kicked);
                taken.fetch_add(1, Ordering::Release);
                // Sometimes this enters late, so that kicks also come while the vCPU is outside.
                if taken.load(Ordering::Relaxed).is_multiple_of(16) {
                    std::thread::yield_now();
                }
            }
        });
        let mut latencies = Vec::new();
        let mut random = Random::new(1);
        for sent in 0..KICKS {
            // A random delay, so that kicks meet the vCPU inside, outside and just entering.
            for _ in 0..random.next() % 256 {
                std::hint::spin_loop();
            }
            let start = Instant::now();
            kick.kick();
            // The vCPU has taken the previous kick, so this one cannot merge and gives an exit.
            let mut looks = 0_u32;
            while taken.load(Ordering::Acquire) != sent + 1 {
                assert!(start.elapsed() < LIMIT, "kick {sent} was lost");
                looks += 1;
                if looks.is_multiple_of(1000) {
                    // If both threads share one CPU, the vCPU needs it now.
                    std::thread::yield_now();
                } else {
                    std::hint::spin_loop();
                }
            }
            latencies.push(start.elapsed());
        }
        latencies
    });
    assert!(ram.get(PAGE) > 0, "the guest ran");
    latencies.sort_unstable();
    println!(
        "kick to exit: p50 {:?}, p99 {:?}, max {:?}",
        latencies[latencies.len() / 2],
        latencies[latencies.len() * 99 / 100],
        latencies.last().unwrap()
    );
}

#[test]
fn a_kick_before_the_first_entry_is_kept() {
    let ram = HostRam::new(1);
    ram.code(0, &[WFI]);
    let vm = vm(&ram);
    let mut vcpu = vcpu(&vm, 0, 0);
    let kick = vcpu.kick_handle();
    kick.kick();
    kick.kick();
    assert!(kick.is_kicked());
    assert_eq!(vcpu.run(), Exit::Kicked);
    assert!(!kick.is_kicked());
    assert_eq!(vcpu.run(), Exit::Halted, "two kicks merged into one exit");
}

#[test]
fn a_loop_without_memory_accesses_can_be_kicked() {
    let ram = HostRam::new(1);
    ram.code(0, &[jal(X0, 0)]);
    let vm = vm(&ram);
    let mut vcpu = vcpu(&vm, 0, 0);
    let kick = vcpu.kick_handle();
    let (exit, exits) = std::sync::mpsc::channel();
    std::thread::spawn(move || exit.send(vcpu.run()));
    std::thread::sleep(std::time::Duration::from_millis(5));
    kick.kick();
    assert_eq!(exits.recv_timeout(LIMIT), Ok(Exit::Kicked));
}
