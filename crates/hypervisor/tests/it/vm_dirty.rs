//! The dirty log: it has every page that a guest wrote.

use crate::support::vm::{HostRam, PAGE, StopOnDrop, asm::*, vcpu, vm};
use pageferry_hypervisor::{Exit, SlotFlags, Vm};
use pageferry_testkit::{LIMIT, Stop};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn log_dirty(vm: &Vm, ram: &Arc<HostRam>, pages: u64, on: bool) {
    let mut region = ram.region(0, 0, 0, pages);
    if on {
        region.flags = SlotFlags::LOG_DIRTY_PAGES;
    }
    vm.set_user_memory_region2(region).unwrap();
}

#[test]
fn writes_are_logged_reads_are_not_and_fetching_clears() {
    let ram = HostRam::new(130);
    // Reads page a1, writes page a2.
    ram.code(0, &[ld(A0, A1, 0), sd(A0, A2, 0), WFI]);
    let vm = vm(&ram);
    let mut vcpu = vcpu(&vm, 0, 0);
    let mut touch = |read: u64, write: u64| {
        vcpu.hart_mut().set_pc(0).unwrap();
        vcpu.hart_mut().set_x(11, read * PAGE);
        vcpu.hart_mut().set_x(12, write * PAGE);
        assert_eq!(vcpu.run(), Exit::Halted);
    };
    // The page is mapped writable and in the TLB before logging starts.
    touch(5, 129);
    log_dirty(&vm, &ram, 130, true);
    let mut log = [1; 3];
    assert_eq!(vm.get_dirty_log(0, &mut log).unwrap(), 0);
    assert_eq!(log, [0; 3]);
    assert_eq!(vm.writable_pages(), 0, "protected when logging starts");
    touch(5, 129);
    touch(7, 64);
    assert_eq!(vm.read_dirty_log(0, &mut log).unwrap(), 2);
    assert_eq!(log, [0, 1, 2], "a copy");
    assert_eq!(vm.get_dirty_log(0, &mut log).unwrap(), 2);
    assert_eq!(log, [0, 1, 2]);
    assert_eq!(vm.writable_pages(), 0, "protected again");
    assert_eq!(vm.get_dirty_log(0, &mut log).unwrap(), 0);
    touch(129, 64);
    // A read of a page that was written before, then a write to it. At the write, the TLB has it as
    // readable only.
    touch(129, 129);
    assert_eq!(vm.get_dirty_log(0, &mut log).unwrap(), 2);
    assert!(vm.get_dirty_log(0, &mut [0; 2]).is_err());

    // Logging stops and starts again: the new log does not have the writes in between.
    log_dirty(&vm, &ram, 130, false);
    touch(3, 3);
    log_dirty(&vm, &ram, 130, true);
    assert_eq!(vm.get_dirty_log(0, &mut log).unwrap(), 0);
    touch(3, 3);
    assert_eq!(vm.get_dirty_log(0, &mut log).unwrap(), 1);
}

/// Every vCPU writes a rising sequence number into each of its pages in a fixed order. A reader
/// keeps a copy of memory, like a migration: it copies the number of each page in each log. After
/// the vCPUs have stopped and the reader has read the last log, the copy must equal memory.
#[test]
fn a_copy_made_by_the_log_equals_memory() {
    const VCPUS: u64 = 4;
    const PAGES_EACH: u64 = 24;
    const FIRST: u64 = 1;
    const PAGES: u64 = FIRST + VCPUS * PAGES_EACH;
    let ram = HostRam::new(PAGES as usize);
    // a1: first page, a2: end, a0: sequence number.
    let code = [
        addi(A0, A0, 1),
        add(T0, A1, X0),
        sd(A0, T0, 0),
        add(T0, T0, T1),
        bltu(T0, A2, -8),
        jal(X0, -20),
    ];
    ram.code(0, &code);
    let vm = vm(&ram);
    let alarm = Stop::new();
    let mut vcpus: Vec<_> = (0..VCPUS)
        .map(|id| {
            let mut vcpu = vcpu(&vm, id as u32, 0);
            let first = FIRST + id * PAGES_EACH;
            vcpu.hart_mut().set_x(11, first * PAGE);
            vcpu.hart_mut().set_x(12, (first + PAGES_EACH) * PAGE);
            vcpu.hart_mut().set_x(6, PAGE);
            vcpu
        })
        .collect();
    let kicks: Vec<_> = vcpus.iter().map(|v| v.kick_handle()).collect();
    let mut copy = vec![0; PAGES as usize];
    let mut log = vec![0; PAGES.div_ceil(64) as usize];
    let mut harvests = 0;
    let written = || -> u64 {
        let first = |id| ram.get((FIRST + id * PAGES_EACH) * PAGE);
        (0..VCPUS).map(first).sum()
    };
    let mut harvest = |copy: &mut [u64]| {
        let named = vm.get_dirty_log(0, &mut log).unwrap();
        for page in (0..PAGES).filter(|page| log[*page as usize / 64] >> (page % 64) & 1 == 1) {
            copy[page as usize] = ram.get(page * PAGE);
        }
        named
    };
    std::thread::scope(|scope| {
        let stop = StopOnDrop(&alarm, kicks);
        let alarm = &alarm;
        for vcpu in &mut vcpus {
            scope.spawn(move || {
                while !alarm.is_stopped() {
                    assert_eq!(vcpu.run(), Exit::Kicked);
                }
            });
        }
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(2) || harvests <= 10 || written() <= 100 {
            assert!(start.elapsed() < LIMIT, "only {harvests} harvests");
            if harvests % 64 == 0 {
                // Logging stops and starts again with a new copy, as in a second migration.
                log_dirty(&vm, &ram, PAGES, false);
                log_dirty(&vm, &ram, PAGES, true);
                for page in 0..PAGES {
                    copy[page as usize] = ram.get(page * PAGE);
                }
            }
            harvest(&mut copy);
            harvests += 1;
        }
        drop(stop);
    });
    harvest(&mut copy);
    for page in FIRST..PAGES {
        assert_eq!(
            copy[page as usize],
            ram.get(page * PAGE),
            "page {page}: a write is in no log"
        );
    }
    assert_eq!(harvest(&mut copy), 0);
    let written = written();
    println!("{harvests} harvests beside {written} rounds of {PAGES_EACH} pages");
}
