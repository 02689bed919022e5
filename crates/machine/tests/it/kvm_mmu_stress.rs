//! The behaviour of Linux's `tools/testing/selftests/kvm/mmu_stress_test.c`: all vCPUs fault in a
//! memory of many slots in passes, while the host takes it away. Its last part, memory that becomes
//! read-only, is in `kvm_read_only.rs`.
#![expect(unsafe_code, reason = "changes how the host maps the guest's memory")]

use crate::place::placing;
use crate::support::{DATA, drive_all, memory, no_kvm, pluggable, run, rung, start, word};
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use pageferry_machine::{Exit, GuestRam, NewMachine, Vcpu, kvm};
use pageferry_testkit::{LIMIT, Random};
use rustix::mm::Advice;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

const VCPUS: u64 = 4;
/// All slots show the same memory, as in that test: each vCPU faults in much more than exists. Two
/// of the flat tables' pages.
const SLOT_PAGES: u64 = 1024;
const SLOTS: u64 = 16;
const MEMORY: u64 = 0x1000_0000;
/// Slot 0 is RAM.
const FIRST_ID: u16 = 1;

/// rdi: first byte, rsi: first byte behind. Stores to each page its own address + the tag, once, in
/// the word of its 4 MiB of addresses. Then stores rdi to the doorbell.
///
/// ```text
/// l: mov rax,rdi; shr rax,22; and eax,0x1ff; lea rcx,[rdi+rax*8]; lea rdx,[rdi+TAG]; mov [rcx],rdx
/// add rdi,0x1000; cmp rdi,rsi; jb l; mov ebx,0xd0000000; mov [rbx],rdi; jmp .
/// ```
const STORE: [u8; 48] = [
    0x48, 0x89, 0xf8, 0x48, 0xc1, 0xe8, 0x16, 0x25, 0xff, 1, 0, 0, 0x48, 0x8d, 0xc, 0xc7, 0x48,
    0x8d, 0x97, 0, 0, 0, 0, 0x48, 0x89, 0x11, 0x48, 0x81, 0xc7, 0, 0x10, 0, 0, 0x48, 0x39, 0xf7,
    0x72, 0xda, 0xbb, 0, 0, 0, 0xd0, 0x48, 0x89, 0x3b, 0xeb, 0xfe,
];
/// The same with cmp [rcx],rdx; jne bad for the store, and bad at the store to the doorbell.
const CHECK: [u8; 50] = [
    0x48, 0x89, 0xf8, 0x48, 0xc1, 0xe8, 0x16, 0x25, 0xff, 1, 0, 0, 0x48, 0x8d, 0xc, 0xc7, 0x48,
    0x8d, 0x97, 0, 0, 0, 0, 0x48, 0x39, 0x11, 0x75, 0xc, 0x48, 0x81, 0xc7, 0, 0x10, 0, 0, 0x48,
    0x39, 0xf7, 0x72, 0xd8, 0xbb, 0, 0, 0, 0xd0, 0x48, 0x89, 0x3b, 0xeb, 0xfe,
];
/// The place of the tag in both.
const TAG: Range<usize> = 19..23;

const fn gpa(slot: u64, page: u64) -> u64 {
    MEMORY + (slot * SLOT_PAGES + page) * PAGE_SIZE
}

/// Makes the host's mapping of the guest's memory forget its pages. No byte changes.
fn unmap(ram: &GuestRam, first: u64, pages: u64) {
    let at = ram.guest_hva(RamPage(first)).0 as *mut _;
    assert!(first + pages <= ram.pages());
    // SAFETY: the range is in the guest's mapping, which is shared memory: its bytes stay.
    unsafe {
        rustix::mm::madvise(at, (pages * PAGE_SIZE) as usize, Advice::LinuxDontNeed).unwrap();
    }
}

struct Stress {
    new: NewMachine,
    plug: kvm::MemoryPlug,
    window: Arc<GuestRam>,
    passes: u64,
}

impl Stress {
    fn new() -> Self {
        let (new, plug) = pluggable(VCPUS as u32, DATA.0);
        let window = memory(SLOT_PAGES);
        for slot in 0..SLOTS {
            let at = Gpa(gpa(slot, 0));
            plug.plug(FIRST_ID + slot as u16, at, Arc::clone(&window), false)
                .unwrap();
        }
        Self {
            new,
            plug,
            window,
            passes: 0,
        }
    }

    /// All vCPUs run `program`, each in its own slots. Calls `meanwhile` until they have ended.
    fn pass(&mut self, program: &[u8], tag: u32, mut meanwhile: impl FnMut(&GuestRam)) {
        let mut code = program.to_vec();
        code[TAG].copy_from_slice(&tag.to_le_bytes());
        self.passes += 1;
        let passes = self.passes;
        let ram = self.new.machine.ram();
        let drive = |vcpu: &mut dyn Vcpu| {
            let id = u64::from(vcpu.id());
            // Every vCPU takes the slots that another used in the pass before.
            let share = (id + passes) % VCPUS;
            let [first, end] = [share, share + 1].map(|share| gpa(share * (SLOTS / VCPUS), 0));
            start(ram, vcpu, id, &code, [first, end]);
            assert_eq!(rung(run(vcpu)), end, "vCPU {id} from {first:#x}");
        };
        let window = &self.window;
        drive_all(&mut self.new.vcpus, drive, || meanwhile(window));
    }

    /// Counts the words of a pass's stores that are lost. `other` must be in their place.
    fn missing(&self, slots: impl Iterator<Item = u64>, tag: u32, other: u64) -> usize {
        let mut missing = 0;
        for slot in slots {
            for page in 0..SLOT_PAGES {
                let at = gpa(slot, page);
                let index = (at >> 22) & 0x1ff;
                let there = word(&self.window, RamPage(page), index as usize);
                if there != at + u64::from(tag) {
                    assert_eq!(there, other, "slot {slot}, page {page}");
                    missing += 1;
                }
            }
        }
        missing
    }
}

/// A random range of the memory that the slots show: the first page, and the number of pages.
fn some_pages(random: &mut Random) -> (u64, u64) {
    let first = random.below(SLOT_PAGES);
    (first, (1 + random.below(64)).min(SLOT_PAGES - first))
}

#[test]
fn all_vcpus_fault_many_slots_in_passes_while_memory_is_taken_away() {
    if no_kvm() {
        return;
    }
    let mut stress = Stress::new();
    let mut random = Random::new(11);
    let idle = |_: &GuestRam| std::thread::yield_now();

    stress.pass(&STORE, 1, idle);
    assert_eq!(stress.missing(0..SLOTS, 1, 0), 0);

    // A vCPU whose state was set must find its tables again.
    for vcpu in &mut stress.new.vcpus {
        let state = vcpu.save().unwrap();
        vcpu.restore(&state).unwrap();
    }
    stress.pass(&STORE, 2, idle);
    assert_eq!(stress.missing(0..SLOTS, 2, 0), 0);

    // Unmapped under the vCPUs, which store and load: no byte changes. They load the stores of
    // other vCPUs.
    let begin = Instant::now();
    let (mut tag, mut unmapped) = (2, 0);
    while unmapped < 30 {
        assert!(begin.elapsed() < LIMIT, "only {unmapped} times unmapped");
        tag += 1;
        for program in [&STORE[..], &CHECK] {
            stress.pass(program, tag, |window| {
                let (first, pages) = some_pages(&mut random);
                unmap(window, first, pages);
                unmapped += 1;
                std::thread::yield_now();
            });
        }
        assert_eq!(stress.missing(0..SLOTS, tag, 0), 0);
    }

    // Freed under the vCPUs: the memory is zero, or holds later stores.
    let (mut holes, mut lost) = (0, 0);
    while holes < 20 || lost == 0 {
        assert!(begin.elapsed() < LIMIT, "{holes} holes, {lost} words lost");
        tag += 1;
        stress.pass(&STORE, tag, |window| {
            let (first, pages) = some_pages(&mut random);
            placing(window).punch_hole(RamPage(first), pages).unwrap();
            holes += 1;
            std::thread::yield_now();
        });
        lost += stress.missing(0..SLOTS, tag, 0);
        stress.pass(&STORE, tag, idle);
        stress.pass(&CHECK, tag, idle);
    }
    let passes = stress.passes;
    println!(
        "{passes} passes, {unmapped} times unmapped, {holes} holes, {lost} words lost to them"
    );

    // Every second slot goes, and then all memory. The remaining slots show zeroes, and take
    // stores.
    for slot in (0..SLOTS).step_by(2) {
        drop(stress.plug.unplug(FIRST_ID + slot as u16).unwrap());
    }
    placing(&stress.window)
        .punch_hole(RamPage(0), SLOT_PAGES)
        .unwrap();
    let ram = stress.new.machine.ram();
    let vcpu = stress.new.vcpus[0].as_mut();
    for slot in 0..SLOTS {
        let mut code = STORE;
        code[TAG].copy_from_slice(&tag.to_le_bytes());
        let args = [gpa(slot, 0), gpa(slot + 1, 0)];
        start(ram, vcpu, 0, &code, args);
        let exit = run(vcpu);
        if slot % 2 == 1 {
            assert_eq!(rung(exit), args[1]);
        } else {
            let at = Gpa(args[0] + (args[0] >> 22) * 8);
            assert!(
                matches!(exit, Exit::MmioWrite { gpa, .. } if gpa == at),
                "{exit:?}"
            );
        }
    }
    let odd = (1..SLOTS).step_by(2);
    assert_eq!(stress.missing(odd, tag, 0), 0);
    let even = (0..SLOTS).step_by(2);
    let words = (SLOTS / 2 * SLOT_PAGES) as usize;
    assert_eq!(stress.missing(even, tag, 0), words);
}
