//! The dirty log loses no write, whichever way harvests race the guest.

use crate::support::{
    COUNT, DATA, SMALL_RING, TABLES, drive_all, no_kvm, run, start, tracked, trackings, word,
};
use pageferry_addr::RamPage;
use pageferry_machine::kvm::DirtyTracking;
use pageferry_machine::{Exit, MachineError, NewMachine, Vcpu};
use pageferry_testkit::sized;
use pageferry_userfault::PageBitmap;
use std::time::{Duration, Instant};

/// rdi: first byte, rsi: first byte behind. Writes a number that counts sweeps to every page, for
/// ever.
///
/// ```text
/// xor r8,r8; o: inc r8; mov rcx,rdi; i: mov [rcx],r8; add rcx,0x1000; cmp rcx,rsi; jb i; jmp o
/// ```
const HAMMER: [u8; 26] = [
    0x4d, 0x31, 0xc0, 0x49, 0xff, 0xc0, 0x48, 0x89, 0xf9, 0x4c, 0x89, 0x01, 0x48, 0x81, 0xc1, 0,
    0x10, 0, 0, 0x48, 0x39, 0xf1, 0x72, 0xf1, 0xeb, 0xe9,
];

/// A machine of two vCPUs, and a copy of its memory that follows the harvests.
struct Copied {
    new: NewMachine,
    each: u64,
    dirty: PageBitmap,
    copy: Vec<u64>,
}

impl Copied {
    fn new(tracking: DirtyTracking, each: u64) -> Self {
        let pages = DATA.0 + 2 * each;
        let new = tracked(2, pages, tracking);
        Self {
            new,
            each,
            dirty: PageBitmap::new(pages as usize),
            copy: vec![0; pages as usize],
        }
    }

    fn start(&mut self, code: &[u8]) {
        let ram = self.new.machine.ram().clone();
        for (index, vcpu) in self.new.vcpus.iter_mut().enumerate() {
            let first = DATA.0 + index as u64 * self.each;
            start(
                &ram,
                vcpu.as_mut(),
                index as u64,
                code,
                [first, first + self.each].map(|page| page * 4096),
            );
        }
    }

    /// Copies the pages that a harvest names.
    fn harvest(&mut self, rearm: bool) {
        let newly = self.new.machine.harvest_dirty(&self.dirty, rearm).unwrap();
        assert_eq!(newly, self.dirty.count());
        let mut from = 0;
        while let Some(page) = self.dirty.next_set(from) {
            self.dirty.clear(RamPage(page as u64));
            self.copy[page] = word(self.new.machine.ram(), RamPage(page as u64), 0);
            from = page + 1;
        }
    }

    /// Checks the copy against memory after another harvest. All vCPUs must be out of the guest.
    fn check(&mut self, rearm: bool) {
        self.harvest(rearm);
        let ram = self.new.machine.ram();
        let data = DATA.0..DATA.0 + 2 * self.each;
        let lost: Vec<_> = data
            .filter(|page| self.copy[*page as usize] != word(ram, RamPage(*page), 0))
            .collect();
        assert!(
            lost.is_empty(),
            "{} pages lost a write, the first {}",
            lost.len(),
            lost[0]
        );
    }

    /// Harvests while `drive` runs each vCPU on a separate thread. Returns the number of harvests.
    fn harvest_beside(&mut self, drive: impl Fn(&mut dyn Vcpu) + Sync) -> usize {
        let mut vcpus = std::mem::take(&mut self.new.vcpus);
        let mut harvests = 0;
        drive_all(&mut vcpus, drive, || {
            self.harvest(true);
            harvests += 1;
        });
        self.new.vcpus = vcpus;
        harvests
    }
}

#[test]
fn a_page_written_once_while_harvests_run_is_never_lost() {
    if no_kvm() {
        return;
    }
    for tracking in trackings() {
        pages_written_once_while_harvests_run(tracking);
    }
}

fn pages_written_once_while_harvests_run(tracking: DirtyTracking) {
    // Not a multiple of 64 pages: the slot ends inside a word.
    let mut copied = Copied::new(tracking, 1001);
    copied.new.machine.set_dirty_log(true).unwrap();
    let rounds = sized(10, 40);
    let mut harvests = 0;
    // A harvester that gets little time beside the guests needs more rounds to race them.
    let until = Instant::now() + pageferry_testkit::LIMIT;
    let mut round = 0;
    while round < rounds || harvests as u64 <= 2 * rounds {
        assert!(
            Instant::now() < until,
            "only {harvests} harvests in {round} rounds"
        );
        round += 1;
        copied.start(&COUNT);
        harvests += copied.harvest_beside(|vcpu| {
            crate::support::rung(run(vcpu));
        });
        copied.check(true);
        assert_eq!(copied.copy[DATA.index()], round, "{tracking:?}");
    }
}

#[test]
fn pages_written_all_the_time_are_as_fresh_as_the_last_harvest() {
    if no_kvm() {
        return;
    }
    for tracking in trackings() {
        // With few pages, each is written many times between reading and clearing the log.
        for each in [1500, 500, 3] {
            pages_written_all_the_time(tracking, each);
        }
    }
}

fn pages_written_all_the_time(tracking: DirtyTracking, each: u64) {
    let mut copied = Copied::new(tracking, each);
    copied.new.machine.set_dirty_log(true).unwrap();
    copied.start(&HAMMER);
    let end = Instant::now() + Duration::from_millis(sized(200, 500));
    let kickers: Vec<_> = copied.new.vcpus.iter().map(|vcpu| vcpu.kicker()).collect();
    let ram = copied.new.machine.ram().clone();
    let firsts = [DATA, RamPage(DATA.0 + each)];
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let ran = || firsts.iter().all(|first| word(&ram, *first, 0) > 1);
            let limit = end + pageferry_testkit::LIMIT / 2;
            while Instant::now() < end || (!ran() && Instant::now() < limit) {
                std::thread::sleep(Duration::from_millis(5));
            }
            kickers.iter().for_each(|kicker| kicker.kick());
        });
        copied.harvest_beside(|vcpu| assert_eq!(run(vcpu), Exit::Kicked));
    });
    // Without re-arming the log is only read: it gives the same twice.
    let pages = copied.dirty.pages();
    let [first, again] = [(); 2].map(|()| {
        let dirty = PageBitmap::new(pages);
        copied.new.machine.harvest_dirty(&dirty, false).unwrap();
        dirty.snapshot()
    });
    assert_eq!(first, again);
    copied.check(false);
    let last = (DATA.0 + each) as usize;
    assert!(
        copied.copy[DATA.index()] > 1 && copied.copy[last] > 1,
        "the guests did not run"
    );
}

#[test]
fn a_ring_that_overflows_between_two_harvests_loses_nothing() {
    if no_kvm() {
        return;
    }
    for tracking in trackings() {
        let each = sized(5, 20) * u64::from(SMALL_RING);
        let mut copied = Copied::new(tracking, each);
        copied.new.machine.set_dirty_log(true).unwrap();
        for round in 1..=3 {
            copied.start(&COUNT);
            let mut vcpus = std::mem::take(&mut copied.new.vcpus);
            drive_all(
                &mut vcpus,
                |vcpu| {
                    crate::support::rung(run(vcpu));
                },
                || std::thread::sleep(Duration::from_millis(1)),
            );
            copied.new.vcpus = vcpus;
            // The third round is read twice, as at a switch-over that is taken back.
            copied.check(round < 3);
            assert_eq!(copied.copy[DATA.index()], round, "{tracking:?}");
        }
        copied.copy.fill(0);
        copied.check(true);
        assert_eq!(copied.copy[DATA.index()], 3, "{tracking:?}");
        let none = PageBitmap::new(copied.dirty.pages());
        assert_eq!(copied.new.machine.harvest_dirty(&none, true).unwrap(), 0);
    }
}

#[test]
fn a_log_that_was_off_knows_nothing_of_the_time_before() {
    if no_kvm() {
        return;
    }
    for tracking in trackings() {
        let each = 3 * u64::from(SMALL_RING);
        let mut copied = Copied::new(tracking, each);
        let machine = copied.new.machine.clone();
        // The guests write with the log on, then off. In between nobody harvests.
        for on in [true, false, true] {
            machine.set_dirty_log(on).unwrap();
            if on {
                assert_eq!(machine.harvest_dirty(&copied.dirty, false).unwrap(), 0);
            }
            copied.start(&COUNT);
            for vcpu in &mut copied.new.vcpus {
                crate::support::rung(run(vcpu.as_mut()));
            }
        }
        machine.set_dirty_log(false).unwrap();
        machine.set_dirty_log(true).unwrap();
        assert_eq!(machine.harvest_dirty(&copied.dirty, true).unwrap(), 0);
        copied.start(&COUNT);
        crate::support::rung(run(copied.new.vcpus[1].as_mut()));
        machine.harvest_dirty(&copied.dirty, true).unwrap();
        let data = |vcpu: usize| DATA.index() + vcpu * each as usize..;
        let pages = [0, 1].map(|vcpu| {
            let first = data(vcpu).start;
            copied.dirty.count_range(first..first + each as usize)
        });
        assert_eq!(pages, [0, each as usize], "{tracking:?}");
    }
}

#[test]
fn a_log_that_is_off_cannot_be_read_and_one_that_is_on_is_empty_at_first() {
    if no_kvm() {
        return;
    }
    for tracking in trackings() {
        let new = tracked(1, 100, tracking);
        let dirty = PageBitmap::new(100);
        assert!(matches!(
            new.machine.harvest_dirty(&dirty, true),
            Err(MachineError::WrongState(_))
        ));
        new.machine.set_dirty_log(true).unwrap();
        new.machine.set_dirty_log(true).unwrap();
        assert_eq!(new.machine.harvest_dirty(&dirty, true).unwrap(), 0);
        let other = PageBitmap::new(99);
        assert!(matches!(
            new.machine.harvest_dirty(&other, true),
            Err(MachineError::WrongState(_))
        ));
        new.machine.set_dirty_log(false).unwrap();
        assert!(matches!(
            new.machine.harvest_dirty(&dirty, false),
            Err(MachineError::WrongState(_))
        ));
    }
}

/// l: mov [rdi],rdi; add rdi,0x1000; cmp rdi,rsi; jb l; mov ebx,0xd0000000; mov [rbx],rdi; jmp .
const WRITE_ONCE: [u8; 25] = [
    0x48, 0x89, 0x3f, 0x48, 0x81, 0xc7, 0, 0x10, 0, 0, 0x48, 0x39, 0xf7, 0x72, 0xf1, 0xbb, 0, 0, 0,
    0xd0, 0x48, 0x89, 0x3b, 0xeb, 0xfe,
];

#[test]
fn exactly_the_written_pages_are_dirty() {
    if no_kvm() {
        return;
    }
    for tracking in trackings() {
        written_pages_are_dirty(tracking);
    }
}

fn written_pages_are_dirty(tracking: DirtyTracking) {
    let mib = sized(32, 512);
    let pages = mib << 8;
    let mut new = tracked(1, pages, tracking);
    let (first, last) = (RamPage(1000), RamPage(pages - 1000));
    let ram = new.machine.ram().clone();
    // One sweep before the log is on maps every page, writable, in the guest.
    for round in 0..2 {
        start(
            &ram,
            new.vcpus[0].as_mut(),
            0,
            &WRITE_ONCE,
            [first.byte_offset(), last.byte_offset()],
        );
        crate::support::rung(run(new.vcpus[0].as_mut()));
        if round == 0 {
            new.machine.set_dirty_log(true).unwrap();
        }
    }
    let dirty = PageBitmap::new(ram.pages() as usize);
    let begin = Instant::now();
    let copied = new.machine.harvest_dirty(&dirty, false).unwrap();
    let copying = begin.elapsed();
    let expected = (last.0 - first.0) as usize;
    assert_eq!(dirty.count_range(first.index()..last.index()), expected);
    // A CPU that walks the guest's tables through NPT counts each walk as a write to them.
    let tables = dirty.count_range(TABLES.start.index()..TABLES.end.index());
    assert_eq!(copied, expected + tables, "pages nobody wrote to");
    let begin = Instant::now();
    assert_eq!(
        new.machine.harvest_dirty(&dirty, true).unwrap(),
        0,
        "the same pages again"
    );
    let rearming = begin.elapsed();
    let begin = Instant::now();
    let nothing = PageBitmap::new(ram.pages() as usize);
    assert_eq!(new.machine.harvest_dirty(&nothing, true).unwrap(), 0);
    println!(
        "{tracking:?}, {mib} MiB, {expected} pages dirty: harvest {copying:?}, with re-arming {rearming:?}, of a clean log {:?}",
        begin.elapsed()
    );
}
