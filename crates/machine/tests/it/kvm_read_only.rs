//! The last part of Linux's `tools/testing/selftests/kvm/mmu_stress_test.c`: while vCPUs store, the
//! host makes their memory read-only (`mprotect`). Each store then fails with an error that harms
//! nothing. The vCPU keeps its state, and continues from there once the memory is writable again.
#![expect(unsafe_code, reason = "changes how the host maps the guest's memory")]

use crate::support::{
    COUNT, DATA, Watchdog, drive_all, drive_beside, machine, no_kvm, run, rung, start, word,
};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_machine::{Exit, GuestRam, MachineError, Vcpu};
use pageferry_testkit::{LIMIT, wait_until};
use rustix::mm::MprotectFlags;
use std::ops::Range;

const VCPUS: u64 = 4;
/// rdi: first byte, rsi: first byte behind. Adds one to a word of each page, for ever.
///
/// ```text
/// o: mov rcx,rdi; i: inc qword [rcx]; add rcx,0x1000; cmp rcx,rsi; jb i; jmp o
/// ```
const COUNT_ON: [u8; 20] = [
    0x48, 0x89, 0xf9, 0x48, 0xff, 1, 0x48, 0x81, 0xc1, 0, 0x10, 0, 0, 0x48, 0x39, 0xf1, 0x72, 0xf1,
    0xeb, 0xec,
];

/// rdi: first byte, rsi: first byte behind. Adds up a word of each page, and stores the sum to the
/// doorbell.
///
/// ```text
/// xor eax,eax; l: add rax,[rdi]; add rdi,0x1000; cmp rdi,rsi; jb l
/// mov ebx,0xd0000000; mov [rbx],rax; jmp .
/// ```
const ADD_UP: [u8; 27] = [
    0x31, 0xc0, 0x48, 3, 7, 0x48, 0x81, 0xc7, 0, 0x10, 0, 0, 0x48, 0x39, 0xf7, 0x72, 0xf1, 0xbb, 0,
    0, 0, 0xd0, 0x48, 0x89, 3, 0xeb, 0xfe,
];

/// Pages of each vCPU that counts.
const EACH: u64 = 200;
const COUNTED: Range<u64> = DATA.0..DATA.0 + VCPUS * EACH;

fn words(ram: &GuestRam) -> Vec<u64> {
    COUNTED.map(|page| word(ram, RamPage(page), 0)).collect()
}

/// Each sweep has reached some page, and has neither skipped a page nor counted one twice.
fn check_sweeps(words: &[u64]) {
    for (id, words) in words.chunks(EACH as usize).enumerate() {
        let ahead = words.iter().take_while(|word| **word == words[0]).count();
        assert!(
            words[ahead..].iter().all(|word| *word + 1 == words[0]),
            "vCPU {id}: {words:?}"
        );
    }
}

/// The vCPU's next store fails with an error.
fn fails(vcpu: &mut dyn Vcpu) {
    let id = vcpu.id();
    match vcpu.run() {
        Err(MachineError::Guest { vcpu, why }) => {
            assert_eq!(vcpu, id);
            assert!(why.contains(&rustix::io::Errno::FAULT.to_string()), "{why}");
        }
        other => panic!("vCPU {id}: {other:?}"),
    }
}

#[test]
fn stores_to_memory_that_the_host_makes_read_only_fail_and_arrive_when_it_is_writable() {
    if no_kvm() {
        return;
    }
    // Another vCPU, which loads from these pages and stores to another page.
    let mut new = machine(VCPUS as u32 + 1, COUNTED.end + 1);
    let ram = new.machine.ram();
    let mut other = new.vcpus.pop().unwrap();
    let other = other.as_mut();
    let vcpus = &mut new.vcpus[..];
    for (id, vcpu) in (0..).zip(vcpus.iter_mut()) {
        let args = [id, id + 1].map(|id| (DATA.0 + id * EACH) * PAGE_SIZE);
        start(ram, vcpu.as_mut(), id, &COUNT_ON, args);
    }
    let protect = |pages: Range<u64>, flags| {
        let at = ram.guest_hva(RamPage(pages.start)).0 as *mut _;
        let bytes = (pages.end - pages.start) * PAGE_SIZE;
        // SAFETY: the range is in the guest's mapping, which only the guest uses.
        unsafe { rustix::mm::mprotect(at, bytes as usize, flags).unwrap() };
    };
    let count_on = |before: &[u64]| {
        let now = words(ram);
        let firsts = (0..now.len()).step_by(EACH as usize);
        firsts
            .into_iter()
            .all(|first| now[first] >= before[first] + 2)
    };
    for round in 1..=4 {
        let before = words(ram);
        let until_kicked = |vcpu: &mut dyn Vcpu| assert_eq!(run(vcpu), Exit::Kicked);
        drive_beside(vcpus, until_kicked, || {
            wait_until("two sweeps of each vCPU", || count_on(&before));
        });
        let before = words(ram);
        check_sweeps(&before);

        // Read-only under the stores, in two steps: each vCPU reaches a store that fails.
        let until_it_fails = |vcpu: &mut dyn Vcpu| {
            let _watchdog = Watchdog::new(vcpu.kicker(), LIMIT);
            fails(vcpu);
        };
        let mut protected = false;
        drive_all(vcpus, until_it_fails, || {
            if !protected && count_on(&before) {
                let half = COUNTED.start + VCPUS * EACH / 2 + round;
                protect(half..COUNTED.end + 1, MprotectFlags::READ);
                protect(COUNTED.start..half, MprotectFlags::READ);
                protected = true;
            }
            std::thread::yield_now();
        });
        let there = words(ram);
        check_sweeps(&there);

        // It fails again and again, even after its state is saved and restored. Loads do not fail.
        // Nothing changes.
        let _watchdog = Watchdog::new(other.kicker(), LIMIT);
        for vcpu in vcpus.iter_mut() {
            fails(vcpu.as_mut());
            let state = vcpu.save().unwrap();
            vcpu.restore(&state).unwrap();
            fails(vcpu.as_mut());
        }
        let bytes = |page: u64| page * PAGE_SIZE;
        start(
            ram,
            other,
            VCPUS,
            &ADD_UP,
            [COUNTED.start, COUNTED.end].map(bytes),
        );
        assert_eq!(rung(other.run().unwrap()), there.iter().sum::<u64>());
        for page in COUNTED.start..=COUNTED.end {
            start(ram, other, VCPUS, &COUNT, [page, page + 1].map(bytes));
            fails(other);
        }
        assert_eq!(words(ram), there);

        protect(
            COUNTED.start..COUNTED.end + 1,
            MprotectFlags::READ | MprotectFlags::WRITE,
        );
        // The last failed store arrives, and arrives once.
        assert_eq!(rung(other.run().unwrap()), bytes(COUNTED.end + 1));
        assert_eq!(word(ram, RamPage(COUNTED.end), 0), round);
    }
}
