//! Changes of slots under running guests that check their memory. The cases are those of Linux's
//! `tools/testing/selftests/kvm/{memslot_modification_stress_test,set_memory_region_test}.c`, and
//! one test does all of them at once.

use crate::support::vm::{HostRam, PAGE, StopOnDrop, asm::*, vcpu, vm};
use pageferry_addr::{Gpa, Hva, RamPage};
use pageferry_hypervisor::{Exit, Region, SlotFlags, UserfaultBits, VcpuCore, Vm};
use pageferry_testkit::{LIMIT, Random, Stop, wait_until};
use pageferry_userfault::PageBitmap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const VCPUS: u64 = 4;
const WINDOW: u64 = 0x4000_0000;
const T3: u32 = 28;
const A4: u32 = 14;
const A5: u32 = 15;

/// `memslot_modification_stress_test`: vCPUs store to all pages of their memory and load them back.
/// The main thread adds and removes a slot that they do not use. They must not notice.
#[test]
fn guests_do_not_notice_that_an_unrelated_slot_comes_and_goes() {
    const PAGES: u64 = 32;
    let ram = HostRam::new(1 + (VCPUS * PAGES) as usize);
    // An endless loop: counts in a0, stores it to the first word of pages a1 to a2, and loads all
    // back.
    let code = [
        addi(A0, A0, 1),
        add(T0, A1, X0),
        sd(A0, T0, 0),
        add(T0, T0, T1),
        bltu(T0, A2, -8),
        add(T0, A1, X0),
        ld(A3, T0, 0),
        bne(A3, A0, 16),
        add(T0, T0, T1),
        bltu(T0, A2, -12),
        jal(X0, -40),
        // The loaded word differs from the stored word.
        ECALL,
    ];
    ram.code(0, &code);
    let spare = HostRam::new(2);
    let vm = vm(&ram);
    let mut vcpus: Vec<_> = (0..VCPUS)
        .map(|id| {
            let mut vcpu = vcpu(&vm, id as u32, 0);
            let first = 1 + id * PAGES;
            vcpu.hart_mut().set_x(11, first * PAGE);
            vcpu.hart_mut().set_x(12, (first + PAGES) * PAGE);
            vcpu.hart_mut().set_x(6, PAGE);
            vcpu
        })
        .collect();
    let kicks = vcpus.iter().map(|v| v.kick_handle()).collect();
    let alarm = Stop::new();
    let before = vm.generation().number();
    let mut changes = 0;
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
        let counts = || (0..VCPUS).map(|id| ram.get((1 + id * PAGES) * PAGE));
        wait_until("all guests to run", || counts().all(|count| count > 0));
        let start = Instant::now();
        let all_ran = || counts().all(|count| count > 10);
        while start.elapsed() < Duration::from_secs(1) || changes <= 4 || !all_ran() {
            assert!(
                start.elapsed() < LIMIT,
                "{changes} changes beside {:?}",
                counts()
            );
            vm.set_user_memory_region2(spare.region(1, WINDOW, 0, 2))
                .unwrap();
            vm.set_user_memory_region2(Region::delete(1)).unwrap();
            changes += 2;
        }
        drop(stop);
    });
    assert_eq!(vm.generation().number() - before, changes);
    println!("{changes} changes");
}

/// A guest that loads a word at `a1` until it differs from `a2`, and reports it. The answer becomes
/// the next `a2`.
fn reporting(vm: &Vm, ram: &HostRam, gpa: u64) -> VcpuCore {
    ram.code(0, &[ld(A0, A1, 0), beq(A0, A2, -4), ECALL, jal(X0, -12)]);
    let mut vcpu = vcpu(vm, 0, 0);
    vcpu.hart_mut().set_x(11, gpa);
    vcpu
}

/// Runs the guest until the alarm stops it. `reports` gets each value. MMIO loads give [`MMIO`].
fn run_reporting(
    vcpu: &mut VcpuCore,
    alarm: &Stop,
    reports: &AtomicU64,
    mut report: impl FnMut(u64),
) {
    while !alarm.is_stopped() {
        match vcpu.run() {
            Exit::Ecall { args } => {
                vcpu.hart_mut().set_x(12, args[0]);
                report(args[0]);
                reports.store(args[0], Ordering::Release);
            }
            Exit::MmioRead { size: 8, .. } => vcpu.complete_mmio_read(MMIO),
            Exit::Kicked => {}
            other => panic!("{other:?}"),
        }
    }
}

const MMIO: u64 = 0x00c0_ffee;
/// The contents of memory that no guest may see any more.
const POISON: u64 = 0xdead_dead;

/// `set_memory_region_test`, "delete": a guest that loads from a slot sees the memory, then MMIO,
/// then the next memory. It sees each once, in that order, and no other value.
#[test]
fn a_guest_sees_a_deleted_slot_turn_into_mmio_and_nothing_else() {
    let code = HostRam::new(1);
    let vm = vm(&code);
    let ram = HostRam::new(2);
    let mut vcpu = reporting(&vm, &code, WINDOW + 8);
    let kick = vcpu.kick_handle();
    let (alarm, last) = (Stop::new(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&alarm, vec![kick]);
        let mut seen = 0;
        let (alarm, last) = (&alarm, &last);
        scope.spawn(move || {
            run_reporting(&mut vcpu, alarm, last, |value| {
                // MMIO comes first, before there is a slot. Then come 1, MMIO, 2, MMIO and so on.
                let expected = if seen % 2 == 0 { MMIO } else { seen / 2 + 1 };
                assert_eq!(value, expected, "report {seen}");
                seen += 1;
            });
        });
        let wait = |value| {
            wait_until("the guest to see it", || {
                last.load(Ordering::Acquire) == value
            });
        };
        wait(MMIO);
        for round in 1..=300 {
            let page = round % 2;
            ram.set(page * PAGE + 8, round);
            vm.set_user_memory_region2(ram.region(1, WINDOW, page, 1))
                .unwrap();
            wait(round);
            vm.set_user_memory_region2(Region::delete(1)).unwrap();
            ram.set(page * PAGE + 8, POISON);
            wait(MMIO);
        }
    });
}

/// `set_memory_region_test`, "move": a slot of two pages moves back and forth by one page. A guest
/// loads from the frame that is in the slot at both places. It sees one page or the other, and
/// never MMIO.
#[test]
fn a_guest_sees_a_moving_slot_at_one_place_or_the_other() {
    let code = HostRam::new(1);
    let vm = vm(&code);
    let ram = HostRam::new(4);
    for page in 0..4 {
        ram.set(
            page * PAGE + 8,
            if page == 1 || page == 2 { page } else { POISON },
        );
    }
    let place = |at: u64| ram.region(1, WINDOW + at * PAGE, 1, 2);
    vm.set_user_memory_region2(place(0)).unwrap();
    let mut vcpu = reporting(&vm, &code, WINDOW + PAGE + 8);
    let kick = vcpu.kick_handle();
    let (alarm, last) = (Stop::new(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&alarm, vec![kick]);
        let mut seen = 0;
        let (alarm, last) = (&alarm, &last);
        scope.spawn(move || {
            run_reporting(&mut vcpu, alarm, last, |value| {
                assert_eq!(value, 2 - seen % 2, "report {seen}");
                seen += 1;
            });
        });
        for round in 0..300 {
            wait_until("the guest to see the move", || {
                last.load(Ordering::Acquire) == 2 - round % 2
            });
            vm.set_user_memory_region2(place(1 - round % 2)).unwrap();
        }
    });
}

const HALF: u64 = 16;
/// The number of pages of the slot that moves.
const PAGES: u64 = 2 * HALF;

/// The main thread's state: it changes the slot under four vCPUs.
struct Abuse<'a> {
    vm: &'a Vm,
    ram: &'a Arc<HostRam>,
    missing: &'a Arc<PageBitmap>,
    /// The slot's first frame, relative to the window.
    place: u64,
    userfault: bool,
    copy: Vec<[u64; VCPUS as usize]>,
    seen: Vec<[u64; VCPUS as usize]>,
}

/// The offset of the word of vCPU `id` in a page. vCPUs share no cache line.
fn word(id: u64) -> u64 {
    64 + id * 64
}

impl Abuse<'_> {
    fn set(&self) {
        let mut region = self.ram.region(1, WINDOW + self.place * PAGE, 0, PAGES);
        region.flags = SlotFlags::LOG_DIRTY_PAGES;
        if self.userfault {
            region.flags = region.flags | SlotFlags::USERFAULT;
            region.userfault = Some(UserfaultBits {
                bitmap: Arc::clone(self.missing),
                first: RamPage(128),
            });
        }
        self.vm.set_user_memory_region2(region).unwrap();
    }

    /// Copies the pages in the log, like a migration.
    fn harvest(&mut self) -> u64 {
        let mut log = [0];
        let named = self.vm.get_dirty_log(1, &mut log).unwrap();
        for page in (0..PAGES).filter(|page| log[0] >> page & 1 == 1) {
            for id in 0..VCPUS {
                self.copy[page as usize][id as usize] = self.ram.get(page * PAGE + word(id));
            }
        }
        named
    }

    /// How often each vCPU has swept the slot, as the last check saw it.
    fn swept(&self) -> [u64; VCPUS as usize] {
        let of = |id: usize| self.seen.iter().map(|words| words[id]).max();
        std::array::from_fn(|id| of(id).unwrap_or(0))
    }

    /// Checks that the word of each vCPU in each page never falls.
    fn check_growth(&mut self) {
        for page in 0..PAGES {
            for id in 0..VCPUS {
                let now = self.ram.get(page * PAGE + word(id));
                let seen = &mut self.seen[page as usize][id as usize];
                assert!(*seen <= now, "page {page}, vCPU {id}: {seen} became {now}");
                *seen = now;
            }
        }
    }
}

/// The test moves a slot over a part of itself, and uses userfault bits, a notifier, a dirty log
/// and an unrelated slot. Four vCPUs check each page's name and the words that they stored. In the
/// end, the copy from the log must equal memory.
#[test]
fn memory_stays_whole_under_everything_at_once() {
    let code_ram = HostRam::new(1);
    // a0: number of the round. t1: a page. t2: the vCPU's word. a5: half of the slot. Pages a1 to
    // a2 are in the slot at both places.
    let code = [
        addi(A0, A0, 1),
        add(T0, A1, X0),
        // The page's name minus its place: 0 or half of the slot.
        ld(A3, T0, 0),
        sub(T3, T0, A1),
        sub(A3, A3, T3),
        beq(A3, X0, 8),
        bne(A3, A5, 36),
        add(T3, T0, T2),
        sd(A0, T3, 0),
        // The stored value, or an older one if the slot has moved in between.
        ld(A4, T3, 0),
        bltu(A0, A4, 20),
        add(T0, T0, T1),
        bltu(T0, A2, -40),
        jal(X0, -52),
        ECALL,
        ECALL,
    ];
    code_ram.code(0, &code);
    let vm = vm(&code_ram);
    let ram = HostRam::new(PAGES as usize);
    let spare = HostRam::new(1);
    for page in 0..PAGES {
        ram.set(page * PAGE, page * PAGE);
    }
    let missing = Arc::new(PageBitmap::new(128 + PAGES as usize));
    let mut abuse = Abuse {
        vm: &vm,
        ram: &ram,
        missing: &missing,
        place: 0,
        userfault: false,
        copy: vec![[0; VCPUS as usize]; PAGES as usize],
        seen: vec![[0; VCPUS as usize]; PAGES as usize],
    };
    abuse.set();
    let mut vcpus: Vec<_> = (0..VCPUS)
        .map(|id| {
            let mut vcpu = vcpu(&vm, id as u32, 0);
            let x = [
                (6, PAGE),
                (7, word(id)),
                (11, WINDOW + HALF * PAGE),
                (12, WINDOW + PAGES * PAGE),
                (15, HALF * PAGE),
            ];
            for (register, value) in x {
                vcpu.hart_mut().set_x(register, value);
            }
            vcpu
        })
        .collect();
    let kicks = vcpus.iter().map(|v| v.kick_handle()).collect();
    let alarm = Stop::new();
    let brought = AtomicU64::new(0);
    let (mut moves, mut rounds) = (0, 0);
    std::thread::scope(|scope| {
        let stop = StopOnDrop(&alarm, kicks);
        let alarm = &alarm;
        for vcpu in &mut vcpus {
            let (missing, brought) = (&missing, &brought);
            scope.spawn(move || {
                while !alarm.is_stopped() {
                    match vcpu.run() {
                        Exit::Kicked => {}
                        Exit::MemoryFault {
                            gpa: Gpa(gpa),
                            userfault: true,
                            ..
                        } => {
                            // The slot may have moved by now.
                            let index = (gpa - WINDOW) / PAGE - HALF;
                            assert!(index < HALF, "{gpa:#x}");
                            for page in [index, HALF + index] {
                                brought.fetch_add(
                                    u64::from(missing.clear(RamPage(128 + page))),
                                    Ordering::Relaxed,
                                );
                            }
                        }
                        other => panic!("{other:?}: {vcpu:?}"),
                    }
                }
            });
        }
        let notifier = (&vm, &ram);
        scope.spawn(move || {
            let (vm, ram) = notifier;
            let mut random = Random::new(11);
            while !alarm.is_stopped() {
                let from = ram.hva().0 + random.next() % PAGES * PAGE;
                vm.invalidate_hva(Hva(from)..Hva(from + random.next() % (8 * PAGE)));
                std::thread::sleep(Duration::from_micros(random.next() % 200));
            }
        });
        let start = Instant::now();
        let mut random = Random::new(3);
        let enough = |abuse: &Abuse<'_>, moves| {
            let brought = brought.load(Ordering::Relaxed);
            moves > 4 && brought > 0 && abuse.swept().iter().all(|&times| times > 5)
        };
        while start.elapsed() < Duration::from_secs(3) || !enough(&abuse, moves) {
            assert!(
                start.elapsed() < LIMIT,
                "{moves} moves, {:?}",
                abuse.swept()
            );
            match random.next() % 6 {
                0 | 1 => {
                    abuse.place = HALF - abuse.place;
                    abuse.set();
                    moves += 1;
                }
                2 => {
                    if !abuse.userfault {
                        missing.set_range(128..128 + PAGES as usize);
                    }
                    abuse.userfault ^= true;
                    abuse.set();
                }
                3 => {
                    vm.set_user_memory_region2(spare.region(2, 0, 0, 1))
                        .expect_err("the slot of the code is there");
                    vm.set_user_memory_region2(spare.region(2, WINDOW / 2, 0, 1))
                        .unwrap();
                    vm.set_user_memory_region2(Region::delete(2)).unwrap();
                }
                4 => {
                    abuse.harvest();
                }
                _ => std::thread::sleep(Duration::from_micros(random.next() % 300)),
            }
            abuse.check_growth();
            rounds += 1;
        }
        drop(stop);
    });
    abuse.harvest();
    for page in 0..PAGES {
        assert_eq!(ram.get(page * PAGE), page * PAGE, "the name of page {page}");
        for id in 0..VCPUS {
            assert_eq!(
                abuse.copy[page as usize][id as usize],
                ram.get(page * PAGE + word(id)),
                "page {page}: a write of vCPU {id} is in no log"
            );
        }
    }
    assert_eq!(abuse.harvest(), 0);
    let brought = brought.load(Ordering::Relaxed);
    let swept = abuse.swept();
    println!(
        "{rounds} rounds, {moves} moves, {brought} pages brought, guests swept {swept:?} times"
    );
}
