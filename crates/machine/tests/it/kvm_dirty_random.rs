//! The behaviour of Linux's `tools/testing/selftests/kvm/dirty_log_test.c` through the engine.
//! vCPUs store to random pages while the log is harvested. At intervals all vCPUs stop, and the log
//! is compared with memory.
//!
//! Two parts of that test are missing here. The engine chooses the mode of a bitmap (manual clear
//! where KVM has it). The sizes of the pages that KVM maps are not visible.

use crate::support::{DATA, drive_beside, no_kvm, run, start, tracked, trackings};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_machine::kvm::DirtyTracking;
use pageferry_machine::{Exit, GuestRam, NewMachine, Vcpu};
use pageferry_testkit::{LIMIT, sized};
use pageferry_userfault::PageBitmap;
use std::time::{Duration, Instant};

const VCPUS: u64 = 3;
/// The iteration's number and the vCPUs' counts. Behind it are the pages that they store to: a
/// power of two, no multiple of words.
const CONTROL: RamPage = DATA;
const FIRST: u64 = CONTROL.0 + 1;
const USED: u64 = 1024;
const PAGES: u64 = FIRST + USED + 7;

/// rdi: first byte of the pages; rsi: mask of page numbers. For ever stores iteration << 32 | count
/// to a word of a random page and compares, then stores the count to the control page. Stores to
/// the doorbell if the word is not there.
///
/// ```text
/// mov r9,SEED; mov ecx,WORD; xor r8d,r8d
/// l: mov r10,r9; shl r10,13; xor r9,r10; mov r10,r9; shr r10,7; xor r9,r10
/// mov r10,r9; shl r10,17; xor r9,r10
/// inc r8; mov r11,[rdi-0x1000]; shl r11,32; add r11,r8
/// mov r10,r9; shr r10,11; and r10,rsi; shl r10,12; add r10,rdi
/// mov [r10+rcx],r11; cmp [r10+rcx],r11; jne bad; mov [rdi+rcx-0x1000],r8; jmp l
/// bad: mov ebx,0xd0000000; mov [rbx],r10; jmp .
/// ```
pub(crate) const RANDOM: [u8; 112] = [
    0x49, 0xb9, 0, 0, 0, 0, 0, 0, 0, 0, 0xb9, 0, 0, 0, 0, 0x45, 0x31, 0xc0, 0x4d, 0x89, 0xca, 0x49,
    0xc1, 0xe2, 0x0d, 0x4d, 0x31, 0xd1, 0x4d, 0x89, 0xca, 0x49, 0xc1, 0xea, 7, 0x4d, 0x31, 0xd1,
    0x4d, 0x89, 0xca, 0x49, 0xc1, 0xe2, 0x11, 0x4d, 0x31, 0xd1, 0x49, 0xff, 0xc0, 0x4c, 0x8b, 0x9f,
    0, 0xf0, 0xff, 0xff, 0x49, 0xc1, 0xe3, 0x20, 0x4d, 1, 0xc3, 0x4d, 0x89, 0xca, 0x49, 0xc1, 0xea,
    0x0b, 0x49, 0x21, 0xf2, 0x49, 0xc1, 0xe2, 0x0c, 0x49, 1, 0xfa, 0x4d, 0x89, 0x1c, 0x0a, 0x4d,
    0x39, 0x1c, 0x0a, 0x75, 0x0a, 0x4c, 0x89, 0x84, 0x0f, 0, 0xf0, 0xff, 0xff, 0xeb, 0xac, 0xbb, 0,
    0, 0, 0xd0, 0x4c, 0x89, 0x13, 0xeb, 0xfe,
];

pub(crate) const fn word_of(id: u64) -> u64 {
    64 + id * 64
}

type Words = [u64; VCPUS as usize];

fn words(ram: &GuestRam, page: RamPage) -> Words {
    let mut bytes = [0; PAGE_SIZE as usize];
    ram.try_read(page, &mut bytes).unwrap();
    std::array::from_fn(|id| {
        let at = word_of(id as u64) as usize;
        u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
    })
}

struct Test {
    new: NewMachine,
    dirty: PageBitmap,
    /// Updated from the log alone.
    copy: Vec<Words>,
    /// Memory at the last stop of the vCPUs.
    last: Vec<Words>,
    named: Vec<bool>,
    harvests: u64,
    /// Pages that a log named without a change.
    needless: usize,
}

impl Test {
    fn new(tracking: DirtyTracking) -> Self {
        let mut new = tracked(VCPUS as u32, PAGES, tracking);
        let ram = new.machine.ram().clone();
        for (id, vcpu) in (0..).zip(&mut new.vcpus) {
            let mut code = RANDOM;
            code[2..10].copy_from_slice(&(0x9e37_79b9_7f4a_7c15_u64 ^ id).to_le_bytes());
            code[11..15].copy_from_slice(&(word_of(id) as u32).to_le_bytes());
            let args = [RamPage(FIRST).byte_offset(), USED - 1];
            start(&ram, vcpu.as_mut(), id, &code, args);
        }
        Self {
            new,
            dirty: PageBitmap::new(PAGES as usize),
            copy: Vec::new(),
            last: Vec::new(),
            named: vec![false; PAGES as usize],
            harvests: 0,
            needless: 0,
        }
    }

    fn memory(&self) -> Vec<Words> {
        let ram = self.new.machine.ram();
        (0..PAGES).map(|page| words(ram, RamPage(page))).collect()
    }

    fn harvest(&mut self) {
        self.harvests += 1;
        let newly = self.new.machine.harvest_dirty(&self.dirty, true).unwrap();
        assert_eq!(newly, self.dirty.count());
        let mut from = 0;
        while let Some(page) = self.dirty.next_set(from) {
            self.dirty.clear(RamPage(page as u64));
            self.copy[page] = words(self.new.machine.ram(), RamPage(page as u64));
            self.named[page] = true;
            from = page + 1;
        }
    }

    /// Runs all vCPUs until each has stored, and all together `stores` times. Calls `meanwhile`
    /// again and again.
    fn run(&mut self, stores: u64, mut meanwhile: impl FnMut(&mut Self)) {
        let mut vcpus = std::mem::take(&mut self.new.vcpus);
        let ram = self.new.machine.ram().clone();
        let before = words(&ram, CONTROL);
        let until_kicked = |vcpu: &mut dyn Vcpu| assert_eq!(run(vcpu), Exit::Kicked);
        drive_beside(&mut vcpus, until_kicked, || {
            let end = Instant::now() + LIMIT;
            loop {
                meanwhile(self);
                let now = words(&ram, CONTROL);
                let each = now
                    .iter()
                    .zip(before)
                    .all(|(now, before)| *now >= before + 2);
                if each && now.iter().sum::<u64>() >= before.iter().sum::<u64>() + stores {
                    break;
                }
                assert!(Instant::now() < end, "{before:?}, then {now:?}");
                std::thread::yield_now();
            }
        });
        self.new.vcpus = vcpus;
    }

    /// The vCPUs are stopped and the log is harvested. Pages that it does not name must be
    /// unchanged.
    fn check(&mut self, iteration: u64) {
        let now = self.memory();
        let before = self.needless;
        let used = now.iter().enumerate().skip(FIRST as usize);
        for (page, words) in used.take(USED as usize) {
            assert_eq!(
                self.copy[page], *words,
                "iteration {iteration}: page {page} has changed and no harvest names it"
            );
            let changed = *words != self.last[page];
            let newest = words.iter().map(|word| word >> 32).max();
            assert!(
                !changed || newest.is_some_and(|newest| newest + 1 >= iteration),
                "iteration {iteration}: page {page} is of {newest:?}"
            );
            assert!(!changed || self.named[page]);
            self.needless += usize::from(self.named[page] && !changed);
        }
        // A vCPU may be stopped between a store's fault, which is logged, and the store.
        let needless = self.needless - before;
        assert!(
            needless <= VCPUS as usize,
            "{needless} pages named that have not changed"
        );
        self.begin(now, iteration + 1);
    }

    fn begin(&mut self, memory: Vec<Words>, iteration: u64) {
        self.last = memory;
        self.named.fill(false);
        let ram = self.new.machine.ram();
        ram.try_write(CONTROL, &iteration.to_le_bytes()).unwrap();
    }
}

#[test]
fn harvests_name_every_page_that_has_changed() {
    if no_kvm() {
        return;
    }
    for tracking in trackings() {
        harvests_name_what_has_changed(tracking);
    }
}

fn harvests_name_what_has_changed(tracking: DirtyTracking) {
    let least = Duration::from_millis(sized(200, 500));
    let mut test = Test::new(tracking);
    for phase in 0..2 {
        // All pages are mapped. Then the log starts under running vCPUs.
        let mut started = false;
        test.run(2 * USED, |test| {
            let stored = words(test.new.machine.ram(), CONTROL).iter().sum::<u64>();
            if !started && stored > USED {
                test.new.machine.set_dirty_log(true).unwrap();
                test.copy = test.memory();
                started = true;
            }
        });
        assert!(started, "it stores {USED} times before");
        test.harvest();
        let now = test.memory();
        let data = FIRST as usize..(FIRST + USED) as usize;
        assert!(
            test.copy[data.clone()] == now[data],
            "phase {phase}: a store after the log had started is not in it"
        );
        test.begin(now, 1);
        let begin = Instant::now();
        let mut iteration = 1;
        while begin.elapsed() < least || iteration < 8 {
            assert!(begin.elapsed() < LIMIT, "only {iteration} iterations");
            // A different share of the pages each time.
            test.run(iteration * 97 % (2 * USED), Test::harvest);
            test.harvest();
            test.check(iteration);
            iteration += 1;
        }
        println!(
            "{tracking:?}: {iteration} iterations, {} harvests, {} pages named without a change",
            test.harvests, test.needless
        );
        test.new.machine.set_dirty_log(false).unwrap();
    }
}
