//! Slots come, go, move and change their flags under running vCPUs, which check their memory all
//! the while. This is the behaviour of Linux's
//! `tools/testing/selftests/kvm/memslot_modification_stress_test.c`. There is also a variant with a
//! slot in use.

use crate::support::{DATA, Watchdog, drive_beside, memory, no_kvm, pluggable, run, start, word};
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use pageferry_machine::{Exit, GuestRam, NewMachine, Vcpu};
use pageferry_testkit::{LIMIT, wait_until};
use std::sync::Arc;
use std::time::{Duration, Instant};

const VCPUS: u64 = 4;
const ID: u16 = 7;

/// rdi: first byte, rsi: first byte behind. For ever stores a number that counts sweeps to every
/// page and compares, then stores it to the second word of the first page. Stores to the doorbell
/// the place of a number that is not there.
///
/// ```text
/// xor r8d,r8d
/// o: inc r8; mov rcx,rdi; i: mov [rcx],r8; add rcx,0x1000; cmp rcx,rsi; jb i
/// mov rcx,rdi; j: cmp [rcx],r8; jne bad; add rcx,0x1000; cmp rcx,rsi; jb j; mov [rdi+8],r8; jmp o
/// bad: mov ebx,0xd0000000; mov [rbx],rcx; jmp .
/// ```
const SWEEP: [u8; 60] = [
    0x45, 0x31, 0xc0, 0x49, 0xff, 0xc0, 0x48, 0x89, 0xf9, 0x4c, 0x89, 1, 0x48, 0x81, 0xc1, 0, 0x10,
    0, 0, 0x48, 0x39, 0xf1, 0x72, 0xf1, 0x48, 0x89, 0xf9, 0x4c, 0x39, 1, 0x75, 0x12, 0x48, 0x81,
    0xc1, 0, 0x10, 0, 0, 0x48, 0x39, 0xf1, 0x72, 0xef, 0x4c, 0x89, 0x47, 8, 0xeb, 0xd1, 0xbb, 0, 0,
    0, 0xd0, 0x48, 0x89, 0xb, 0xeb, 0xfe,
];

#[test]
fn vcpus_do_not_notice_that_other_slots_come_go_and_change() {
    if no_kvm() {
        return;
    }
    const EACH: u64 = 64;
    const PAGES: u64 = DATA.0 + VCPUS * EACH;
    let (new, plug) = pluggable(VCPUS as u32, PAGES);
    let NewMachine { machine, mut vcpus } = new;
    let ram = machine.ram();
    let first = |id: u64| RamPage(DATA.0 + id * EACH);
    for (id, vcpu) in (0..).zip(&mut vcpus) {
        let args = [first(id), first(id + 1)].map(|page| page.byte_offset());
        start(ram, vcpu.as_mut(), id, &SWEEP, args);
    }
    // Just above the memory in use, and elsewhere.
    let beside = Gpa(PAGES * PAGE_SIZE);
    let elsewhere = Gpa(0x2000_0000);
    let spare = memory(2);
    let swept = || (0..VCPUS).map(|id| word(ram, first(id), 1)).min().unwrap();
    let mut changes = 0;
    let sweep = |vcpu: &mut dyn Vcpu| assert_eq!(run(vcpu), Exit::Kicked);
    drive_beside(&mut vcpus, sweep, || {
        wait_until("a sweep of each vCPU", || swept() > 0);
        let (begin, before) = (Instant::now(), swept());
        while begin.elapsed() < Duration::from_secs(1) || swept() < before + 5 {
            assert!(begin.elapsed() < LIMIT, "{before} sweeps, then {}", swept());
            let read_only = changes % 8 == 0;
            plug.plug(ID, beside, Arc::clone(&spare), read_only)
                .unwrap();
            plug.relocate(ID, elsewhere).unwrap();
            plug.unplug(ID).unwrap();
            // The flags of the slot in which they run.
            machine.set_dirty_log(changes % 8 == 0).unwrap();
            changes += 4;
        }
    });
    println!("{changes} changes, {} sweeps", swept());
    assert_eq!(plug.slot_table().reader().pin().view().iter().count(), 1);
}

/// rdi, rsi: two words. Counts for ever, stores the count to the second word, then to the first.
///
/// ```text
/// xor r8d,r8d; l: inc r8; mov [rsi],r8; mov [rdi],r8; jmp l
/// ```
const COUNT_TWICE: [u8; 14] = [
    0x45, 0x31, 0xc0, 0x49, 0xff, 0xc0, 0x4c, 0x89, 6, 0x4c, 0x89, 7, 0xeb, 0xf5,
];

/// The last store of each vCPU, in a separate page.
fn counts(ram: &GuestRam, first: RamPage) -> [u64; VCPUS as usize] {
    std::array::from_fn(|id| word(ram, RamPage(first.0 + id as u64), 0))
}

#[test]
fn each_store_goes_to_a_slot_that_is_there_and_writable_or_leaves() {
    if no_kvm() {
        return;
    }
    const WINDOW: Gpa = Gpa(0x1000_0000);
    let (new, plug) = pluggable(VCPUS as u32, DATA.0 + VCPUS);
    let NewMachine { machine, mut vcpus } = new;
    let ram = machine.ram();
    for (id, vcpu) in (0..).zip(&mut vcpus) {
        let args = [WINDOW.0 + id * PAGE_SIZE, (DATA.0 + id) * PAGE_SIZE];
        start(ram, vcpu.as_mut(), id, &COUNT_TWICE, args);
    }
    let window = memory(VCPUS);
    // RAM has the count of a store that leaves. The last such count is kept beside it.
    let drive = |vcpu: &mut dyn Vcpu| {
        let id = vcpu.id();
        let page = RamPage(DATA.0 + u64::from(id));
        let watchdog = Watchdog::new(vcpu.kicker(), LIMIT);
        loop {
            match vcpu.run().unwrap() {
                Exit::MmioWrite {
                    gpa,
                    value,
                    size: 8,
                } => {
                    assert_eq!(gpa.0, WINDOW.0 + u64::from(id) * PAGE_SIZE);
                    assert_eq!(value, word(ram, page, 0), "vCPU {id}");
                    ram.try_write((page, 8), &value.to_le_bytes()).unwrap();
                }
                Exit::Kicked => break,
                other => panic!("vCPU {id}: {other:?}"),
            }
        }
        assert!(!watchdog.fired(), "vCPU {id}");
    };
    // Waits until each vCPU has counted. Its next store then depends on the current slots.
    let count_on = || {
        let before = counts(ram, DATA);
        wait_until("each vCPU's next store", || {
            let now = counts(ram, DATA);
            (0..).zip(now).all(|(id, now)| now >= before[id] + 2)
        });
    };
    let mut rounds = 0;
    drive_beside(&mut vcpus, drive, || {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(1) || rounds < 8 {
            assert!(begin.elapsed() < LIMIT, "only {rounds} rounds");
            let before = counts(&window, RamPage(0));
            plug.plug(ID, WINDOW, Arc::clone(&window), false).unwrap();
            wait_until("each vCPU's store to the slot", || {
                let now = counts(&window, RamPage(0));
                (0..).zip(now).all(|(id, now)| now > before[id])
            });
            plug.unplug(ID).unwrap();
            let gone = counts(&window, RamPage(0));
            count_on();
            assert_eq!(counts(&window, RamPage(0)), gone, "no slot, round {rounds}");
            plug.plug(ID, WINDOW, Arc::clone(&window), true).unwrap();
            count_on();
            assert_eq!(
                counts(&window, RamPage(0)),
                gone,
                "a read-only slot, round {rounds}"
            );
            plug.unplug(ID).unwrap();
            rounds += 1;
        }
    });
    // The last store arrived, or it left, or a kick came before it. None is lost, and none went to
    // both.
    for (id, counted) in (0..).zip(counts(ram, DATA)) {
        let left = word(ram, RamPage(DATA.0 + id), 1);
        let arrived = word(&window, RamPage(id), 0);
        assert_ne!(left, arrived, "vCPU {id}");
        let last = left.max(arrived);
        assert!(
            last + 1 >= counted && last <= counted,
            "vCPU {id}: {left} left, {arrived} arrived of {counted}"
        );
    }
    println!("{rounds} rounds, counts {:?}", counts(ram, DATA));
}
