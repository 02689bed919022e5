//! The tests of Linux's `tools/testing/selftests/kvm/memslot_perf_test.c`, with fewer pages: a
//! guest writes to memory in several slots while the host unmaps pages or moves a slot. Each test
//! checks all words that the guest has written.

use crate::support::fleet::set;
use crate::support::vm::{HostRam, PAGE, StopOnDrop, asm::*, vcpu};
use pageferry_addr::{Gpa, Hva};
use pageferry_hypervisor::{Exit, Vm, VmConfig};
use pageferry_testkit::{Stop, wait_until};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The guest address of the tested memory. Its first page is for synchronisation.
const WINDOW: u64 = 0x1000_0000;
/// The pages of that memory.
const PAGES: u64 = 97;
/// The numbers of its slots. The last slot has the remainder of the pages.
const SLOTS: [u64; 3] = [2, 9, 32];

/// Offsets of words in the first page. The guest clears the first when it has done its part.
const SYNC: u64 = 0;
/// It counts the passes of the writer here.
const PASSES: u64 = 8;

const VALUES: [u64; 2] = [0x1122_3344_5566_7788, 0x99aa_bbcc_ddee_ff00];
const S0: u32 = 8;
const S1: u32 = 9;
const A4: u32 = 14;
const FENCE: u32 = 0x0330_000f;

/// Stores s0 to a word per stride from a1 to a2, waits for the host, stores s1 from a2 to a3, waits
/// for the host, and begins again.
const HALVES: [u32; 17] = [
    add(T0, A1, X0),
    sd(S0, T0, 0),
    add(T0, T0, A4),
    bltu(T0, A2, -8),
    ld(T1, A0, SYNC as i32),
    beq(T1, X0, -4),
    FENCE,
    sd(X0, A0, SYNC as i32),
    add(T0, A2, X0),
    sd(S1, T0, 0),
    add(T0, T0, A4),
    bltu(T0, A3, -8),
    ld(T1, A0, SYNC as i32),
    beq(T1, X0, -4),
    FENCE,
    sd(X0, A0, SYNC as i32),
    jal(X0, -64),
];

/// Stores s0 to a word per stride from a1 to a2, and begins again.
const WRITER: [u32; 8] = [
    add(T0, A1, X0),
    sd(S0, T0, 0),
    add(T0, T0, A4),
    bltu(T0, A2, -8),
    addi(T2, T2, 1),
    FENCE,
    sd(T2, A0, PASSES as i32),
    jal(X0, -28),
];

struct TestVm {
    vm: Vm,
    ram: Arc<HostRam>,
    slots: u64,
}

impl TestVm {
    fn new(slots: u64, code: &[u32]) -> Self {
        let ram = HostRam::new(1 + PAGES as usize);
        ram.code(0, code);
        let vm = Vm::new(VmConfig::default());
        vm.set_user_memory_region2(ram.region(0, 0, 0, 1)).unwrap();
        let new = Self { vm, ram, slots };
        (0..slots).for_each(|index| new.put(index, new.pages(index).start));
        new
    }

    /// The pages of the `index`th slot.
    fn pages(&self, index: u64) -> Range<u64> {
        let each = PAGES / self.slots;
        let end = if index + 1 == self.slots {
            PAGES
        } else {
            (index + 1) * each
        };
        index * each..end
    }

    /// Creates the `index`th slot at the address of `page`, or moves it there.
    fn put(&self, index: u64, page: u64) {
        let Range { start, end } = self.pages(index);
        let id = index as u16 + 1;
        let region = self.ram.region(id, gpa(page), 1 + start, end - start);
        self.vm.set_user_memory_region2(region).unwrap();
    }

    fn unmap(&self, pages: Range<u64>) -> u64 {
        let hva = |page| Hva(self.ram.hva().0 + (1 + page) * PAGE);
        self.vm.invalidate_hva(hva(pages.start)..hva(pages.end))
    }

    /// The contents of a page's first word, which the guest does not access. It becomes 0.
    fn take(&self, page: u64) -> u64 {
        self.ram.replace((1 + page) * PAGE, 0)
    }

    /// Lets the guest continue with its next part.
    fn synchronise(&self) {
        let word = self.ram.word(PAGE + SYNC);
        word.store(1, Ordering::Release);
        wait_until("the guest to do its part", || {
            word.load(Ordering::Acquire) == 0
        });
    }

    fn wait_passes(&self, more: u64) {
        let passes = || self.ram.word(PAGE + PASSES).load(Ordering::Acquire);
        let goal = passes() + more;
        wait_until("the guest to go over its pages", || passes() >= goal);
    }

    /// Runs `host` beside the guest, which gets `[first, middle, end]` and a stride in pages.
    /// Returns the addresses of stores that met no slot.
    fn run(&self, pages: [u64; 3], stride: u64, host: impl FnOnce()) -> Vec<Gpa> {
        let mut vcpu = vcpu(&self.vm, 0, 0);
        let [first, middle, end] = pages.map(gpa);
        let registers = [
            (A0, gpa(0)),
            (A1, first),
            (A2, middle),
            (A3, end),
            (A4, stride * PAGE),
            (S0, VALUES[0]),
            (S1, VALUES[1]),
        ];
        set(&mut vcpu, 0, &registers);
        let (kick, alarm) = (vcpu.kick_handle(), Stop::new());
        std::thread::scope(|scope| {
            let stop = StopOnDrop(&alarm, vec![kick]);
            let alarm = &alarm;
            let guest = scope.spawn(move || {
                let mut astray = Vec::new();
                while !alarm.is_stopped() {
                    match vcpu.run() {
                        Exit::Kicked => {}
                        Exit::MmioWrite { gpa, .. } => astray.push(gpa),
                        other => panic!("{other:?}"),
                    }
                }
                astray
            });
            host();
            drop(stop);
            guest.join().expect("a guest without surprises")
        })
    }
}

fn gpa(page: u64) -> u64 {
    WINDOW + page * PAGE
}

/// The guest writes a word per `stride` pages to one half of the memory. Meanwhile the host unmaps
/// the other half, `chunk` pages at a time.
fn unmaps_halves(stride: u64, chunk: u64) {
    let halves = [1..1 + PAGES / 2, 1 + PAGES / 2..PAGES];
    for slots in SLOTS {
        let test = TestVm::new(slots, &HALVES);
        let mut unmapped = 0;
        let astray = test.run([1, 1 + PAGES / 2, PAGES], stride, || {
            for round in 0..20 {
                for (half, value) in halves.iter().zip(VALUES) {
                    test.synchronise();
                    for page in half.clone() {
                        let stored = (page - half.start).is_multiple_of(stride);
                        let expected = if stored { value } else { 0 };
                        assert_eq!(test.take(page), expected, "page {page}, round {round}");
                    }
                    for start in half.clone().step_by(chunk as usize) {
                        unmapped += test.unmap(start..half.end.min(start + chunk));
                    }
                }
            }
        });
        assert_eq!(astray, [], "all pages are in slots");
        assert!(unmapped > 0);
    }
}

#[test]
fn a_guest_maps_one_half_while_the_other_is_unmapped() {
    unmaps_halves(1, PAGES / 2);
}

#[test]
fn a_guest_maps_a_page_while_the_other_half_is_unmapped_page_by_page() {
    unmaps_halves(PAGES / 2, 1);
}

#[test]
fn a_guest_maps_a_page_while_the_other_half_is_unmapped_in_chunks() {
    unmaps_halves(PAGES / 2, 16);
}

/// The last slot moves behind all others and back. Meanwhile the guest writes to the pages below
/// it. The last `inside` of these pages are in the slot itself.
fn moves(inside: u64) {
    const WRITTEN: u64 = 8;
    for slots in SLOTS {
        let test = TestVm::new(slots, &WRITER);
        let source = test.pages(slots - 1).start;
        let (start, end) = (source + inside - WRITTEN, source + inside);
        assert!(end <= PAGES && start > 0);
        let astray = test.run([start, end, end], 1, || {
            for _ in 0..20 {
                test.wait_passes(1);
                for _ in 0..16 {
                    test.put(slots - 1, PAGES);
                    test.put(slots - 1, source);
                }
            }
            // The first pass may have begun while the slot was away. The second found it.
            test.wait_passes(2);
        });
        let away = gpa(source)..gpa(end);
        for Gpa(address) in astray {
            assert!(away.contains(&address), "{address:#x} is in no moved slot");
        }
        for page in 1..PAGES {
            let written = (start..end).contains(&page);
            let expected = if written { VALUES[0] } else { 0 };
            assert_eq!(test.take(page), expected, "page {page} of {slots} slots");
        }
    }
}

#[test]
fn a_guest_misses_a_moving_slot_only_while_it_is_away() {
    moves(4);
}

#[test]
fn a_guest_does_not_notice_that_the_slot_above_its_pages_moves() {
    moves(0);
}
