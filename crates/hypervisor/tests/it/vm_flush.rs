//! The flush protocol under stress: vCPUs fault, exit and flush at the same time.

use crate::support::vm::{HostRam, PAGE, StopOnDrop, asm::*, vcpu, vm};
use pageferry_addr::{Hva, RamPage};
use pageferry_hypervisor::{Exit, Region, SlotFlags, UserfaultBits};
use pageferry_testkit::{LIMIT, Random, Stop};
use pageferry_userfault::PageBitmap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const VCPUS: u64 = 4;
const PAGES: u64 = 64;
const WINDOW: u64 = 0x4000_0000;

/// Four vCPUs write to a window of guest memory. Meanwhile its slot is deleted and made again over
/// other host memory, logged, and invalidated. After each deletion the test fills the old host
/// memory with a mark. A later write there is a use of a stale translation.
#[test]
fn nothing_is_written_through_a_stale_translation() {
    let code_ram = HostRam::new(1);
    // An endless loop that stores a0 to the window's pages.
    let code = [
        add(T0, A1, X0),
        sd(A0, T0, 0),
        add(T0, T0, T1),
        bltu(T0, A2, -8),
        jal(X0, -16),
    ];
    code_ram.code(0, &code);
    let vm = vm(&code_ram);
    let banks = [HostRam::new(PAGES as usize), HostRam::new(PAGES as usize)];
    let alarm = Stop::new();
    let mut vcpus: Vec<_> = (0..VCPUS)
        .map(|id| {
            let mut vcpu = vcpu(&vm, id as u32, 0);
            vcpu.hart_mut().set_x(10, id + 1);
            vcpu.hart_mut().set_x(11, WINDOW);
            vcpu.hart_mut().set_x(12, WINDOW + PAGES * PAGE);
            vcpu.hart_mut().set_x(6, PAGE);
            vcpu
        })
        .collect();
    let kicks = vcpus.iter().map(|v| v.kick_handle()).collect();
    let (mut rounds, mut touched) = (0u64, 0u64);
    std::thread::scope(|scope| {
        let stop = StopOnDrop(&alarm, kicks);
        let alarm = &alarm;
        for vcpu in &mut vcpus {
            scope.spawn(move || {
                while !alarm.is_stopped() {
                    match vcpu.run() {
                        Exit::Kicked | Exit::MmioWrite { .. } => {}
                        other => panic!("{other:?}"),
                    }
                }
            });
        }
        let start = Instant::now();
        let mut random = Random::new(7);
        while start.elapsed() < Duration::from_secs(2) || rounds <= 20 || touched == 0 {
            assert!(
                start.elapsed() < LIMIT,
                "{rounds} rounds, {touched} pages touched"
            );
            let bank = &banks[(rounds % 2) as usize];
            for page in 0..PAGES {
                bank.set(page * PAGE, 0);
            }
            let mut region = bank.region(1, WINDOW, 0, PAGES);
            vm.set_user_memory_region2(region.clone()).unwrap();
            for _ in 0..random.next() % 4 {
                match random.next() % 3 {
                    0 => {
                        region.flags = SlotFlags(region.flags.0 ^ SlotFlags::LOG_DIRTY_PAGES.0);
                        vm.set_user_memory_region2(region.clone()).unwrap();
                    }
                    1 => {
                        let from = bank.hva().0 + random.next() % PAGES * PAGE;
                        vm.invalidate_hva(Hva(from)..Hva(from + 8 * PAGE));
                    }
                    _ => std::thread::yield_now(),
                }
            }
            vm.set_user_memory_region2(Region::delete(1)).unwrap();
            const MARK: u64 = u64::MAX;
            for page in 0..PAGES {
                touched += u64::from(bank.get(page * PAGE) != 0);
                bank.set(page * PAGE, MARK);
            }
            // Gives a stale writer time to write.
            for _ in 0..random.next() % 2000 {
                std::hint::spin_loop();
            }
            for page in 0..PAGES {
                assert_eq!(
                    bank.get(page * PAGE),
                    MARK,
                    "round {rounds}: page {page} was written after its slot was deleted"
                );
            }
            rounds += 1;
        }
        drop(stop);
    });
    println!("{rounds} rounds, {touched} pages touched");
}

/// vCPUs access missing pages, and their threads bring them, as in post-copy. A thread writes a
/// page's word before it clears the page's bit. The guest sums the words that it loads, so the sum
/// shows a load that came too early.
#[test]
fn a_missing_page_is_never_read_before_its_bytes_are_there() {
    let pages = 4096;
    let ram = HostRam::new(1 + pages as usize);
    // The program sums the first words of its pages into a0.
    let code = [
        ld(T0, A1, 0),
        add(A0, A0, T0),
        add(A1, A1, T1),
        bltu(A1, A2, -12),
        WFI,
    ];
    ram.code(0, &code);
    let vm = vm(&ram);
    let bitmap = Arc::new(PageBitmap::new(1 + pages as usize));
    bitmap.set_range(1..1 + pages as usize);
    let mut region = ram.region(0, 0, 0, 1 + pages);
    region.flags = SlotFlags::USERFAULT;
    region.userfault = Some(UserfaultBits {
        bitmap: Arc::clone(&bitmap),
        first: RamPage(0),
    });
    vm.set_user_memory_region2(region).unwrap();
    let exits = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for id in 0..VCPUS {
            let mut vcpu = vcpu(&vm, id as u32, 0);
            vcpu.hart_mut().set_x(11, PAGE);
            vcpu.hart_mut().set_x(12, (1 + pages) * PAGE);
            vcpu.hart_mut().set_x(6, PAGE);
            let (ram, bitmap, exits) = (&ram, &bitmap, &exits);
            scope.spawn(move || {
                loop {
                    match vcpu.run() {
                        Exit::MemoryFault {
                            gpa,
                            userfault: true,
                            ..
                        } => {
                            // All vCPUs access all pages in the same order, so several may bring
                            // one page at once.
                            ram.set(gpa.0, gpa.0 / PAGE);
                            bitmap.clear(RamPage(gpa.0 / PAGE));
                            exits.fetch_add(1, Ordering::Relaxed);
                        }
                        Exit::Halted => break,
                        other => panic!("{other:?}"),
                    }
                }
                assert_eq!(
                    vcpu.hart().x(10),
                    pages * (pages + 1) / 2,
                    "vCPU {id} read a page that was missing"
                );
            });
        }
    });
    assert_eq!(bitmap.count(), 0);
    assert!(exits.load(Ordering::Relaxed) >= pages);
}

/// vCPUs pop and push the nodes of one linked stack by LR and SC. An SC that only compared values
/// would break the stack at once. Meanwhile the test reads the log, so that TLBs are flushed.
#[test]
fn a_stack_by_lr_and_sc_keeps_its_nodes() {
    const NODES: u64 = 4;
    const HEAD: u64 = PAGE;
    const ROUNDS: u64 = 20_000;
    let ram = HostRam::new(3);
    // a1: head, a2: rounds left. The program pops a node, counts in it, and pushes it.
    let code = [
        atomic(LR, D, A0, A1, 0),
        beq(A0, X0, -4),
        ld(T0, A0, 0),
        // Gives other vCPUs time to change the stack and change it back.
        addi(A3, X0, 100),
        addi(A3, A3, -1),
        bne(A3, X0, -4),
        atomic(SC, D, T1, A1, T0),
        bne(T1, X0, -28),
        // This vCPU owns the node, so it counts without atomics.
        ld(T2, A0, 8),
        addi(T2, T2, 1),
        sd(T2, A0, 8),
        atomic(LR, D, T0, A1, 0),
        sd(T0, A0, 0),
        atomic(SC, D, T1, A1, A0),
        bne(T1, X0, -12),
        addi(A2, A2, -1),
        bne(A2, X0, -64),
        WFI,
    ];
    ram.code(0, &code);
    let node = |i: u64| 2 * PAGE + i * 16;
    ram.set(HEAD, node(0));
    for i in 0..NODES - 1 {
        ram.set(node(i), node(i + 1));
    }
    let vm = vm(&ram);
    let mut region = ram.region(0, 0, 0, 3);
    region.flags = SlotFlags::LOG_DIRTY_PAGES;
    vm.set_user_memory_region2(region).unwrap();
    let start = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..VCPUS)
            .map(|id| {
                let mut vcpu = vcpu(&vm, id as u32, 0);
                vcpu.hart_mut().set_x(11, HEAD);
                vcpu.hart_mut().set_x(12, ROUNDS);
                let kick = vcpu.kick_handle();
                let thread = scope.spawn(move || vcpu.run());
                (thread, kick)
            })
            .collect();
        let mut log = [0];
        while !threads.iter().all(|(thread, _)| thread.is_finished()) {
            vm.get_dirty_log(0, &mut log).unwrap();
            std::thread::sleep(Duration::from_micros(200));
            if start.elapsed() > LIMIT {
                threads.iter().for_each(|(_, kick)| kick.kick());
            }
        }
        for (thread, _) in threads {
            assert_eq!(
                thread.join().unwrap(),
                Exit::Halted,
                "the stack is broken, or too slow"
            );
        }
    });
    let counted: u64 = (0..NODES).map(|i| ram.get(node(i) + 8)).sum();
    assert_eq!(counted, VCPUS * ROUNDS, "two vCPUs had one node");
    let mut at = ram.get(HEAD);
    for _ in 0..NODES {
        assert_ne!(at, 0, "a node is lost");
        at = ram.get(at);
    }
    assert_eq!(at, 0);
}
