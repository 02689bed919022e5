//! The dirty log loses no write, however harvests race the guest.
#![cfg(target_arch = "x86_64")]

mod kvm_common;

use kvm_common::{DATA, machine, no_kvm, run, start, word};
use pageferry_addr::RamPage;
use pageferry_machine::{Exit, MachineError};
use pageferry_userfault::PageBitmap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// rdi: first byte, rsi: first byte behind. For ever writes a number that counts sweeps to every page.
///
/// ```text
/// xor r8,r8; o: inc r8; mov rcx,rdi; i: mov [rcx],r8; add rcx,0x1000; cmp rcx,rsi; jb i; jmp o
/// ```
const HAMMER: [u8; 26] = [
    0x4d, 0x31, 0xc0, 0x49, 0xff, 0xc0, 0x48, 0x89, 0xf9, 0x4c, 0x89, 0x01, 0x48, 0x81, 0xc1, 0,
    0x10, 0, 0, 0x48, 0x39, 0xf1, 0x72, 0xf1, 0xeb, 0xe9,
];

/// Two vCPUs hammer `each` pages apiece while the host copies what each harvest names; at the end the
/// copy must equal memory.
fn hammer(each: u64, time: Duration) -> usize {
    let pages = DATA.0 + 2 * each;
    let mut new = machine(2, pages);
    let ram = new.machine.ram().clone();
    for (index, vcpu) in new.vcpus.iter_mut().enumerate() {
        let first = DATA.0 + index as u64 * each;
        let args = [first, first + each].map(|page| page * 4096);
        start(&ram, vcpu.as_mut(), index as u64, &HAMMER, args);
    }
    let mut copy: Vec<u64> = (0..pages)
        .map(|page| word(&ram, RamPage(page), 0))
        .collect();
    new.machine.set_dirty_log(true).unwrap();
    let dirty = PageBitmap::new(pages as usize);
    let mut take = |dirty: &PageBitmap| {
        let mut from = 0;
        while let Some(page) = dirty.next_set(from) {
            dirty.clear(RamPage(page as u64));
            copy[page] = word(&ram, RamPage(page as u64), 0);
            from = page + 1;
        }
    };
    let stop = AtomicBool::new(false);
    let kickers: Vec<_> = new.vcpus.iter().map(|vcpu| vcpu.kicker()).collect();
    let mut harvests = 0;
    std::thread::scope(|scope| {
        let threads: Vec<_> = new
            .vcpus
            .iter_mut()
            .map(|vcpu| {
                let stop = &stop;
                scope.spawn(move || {
                    while !stop.load(Ordering::Acquire) {
                        assert_eq!(run(vcpu.as_mut()), Exit::Kicked);
                    }
                })
            })
            .collect();
        let end = Instant::now() + time;
        while Instant::now() < end {
            let newly = new.machine.harvest_dirty(&dirty, true).unwrap();
            assert_eq!(newly, dirty.count());
            take(&dirty);
            harvests += 1;
        }
        stop.store(true, Ordering::Release);
        for kicker in &kickers {
            kicker.kick();
        }
        for thread in threads {
            thread.join().unwrap();
        }
    });
    // Without re-arming the log is only read: twice the same.
    let first = new.machine.harvest_dirty(&dirty, false).unwrap();
    let again = PageBitmap::new(pages as usize);
    assert_eq!(new.machine.harvest_dirty(&again, false).unwrap(), first);
    assert_eq!(again.snapshot(), dirty.snapshot());
    take(&dirty);
    let lost: Vec<_> = (DATA.0..pages)
        .filter(|page| copy[*page as usize] != word(&ram, RamPage(*page), 0))
        .collect();
    assert!(
        lost.is_empty(),
        "{} of {pages} pages lost a write, the first {}",
        lost.len(),
        lost[0]
    );
    assert!(
        copy[DATA.0 as usize] > 1 && copy[(DATA.0 + each) as usize] > 1,
        "the guests did not run"
    );
    harvests
}

#[test]
fn what_two_vcpus_write_while_harvests_run_is_never_lost() {
    if no_kvm() {
        return;
    }
    // Not a multiple of 64 pages: the slot ends inside a word.
    let harvests = hammer(500, Duration::from_millis(1500));
    assert!(harvests > 20, "only {harvests} harvests");
    // Few pages: each is written many times between GET and CLEAR.
    hammer(3, Duration::from_millis(500));
}

#[test]
fn a_log_that_is_off_cannot_be_read_and_one_that_is_on_is_empty_at_first() {
    if no_kvm() {
        return;
    }
    let new = machine(1, 100);
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
    let mut new = machine(1, 256 * 512);
    let (first, last) = (RamPage(1000), RamPage(130_000));
    let ram = new.machine.ram().clone();
    // Once before the log is on: every page is then mapped, writable, in the guest.
    for round in 0..2 {
        start(
            &ram,
            new.vcpus[0].as_mut(),
            0,
            &WRITE_ONCE,
            [first.byte_offset(), last.byte_offset()],
        );
        kvm_common::rung(run(new.vcpus[0].as_mut()));
        if round == 0 {
            new.machine.set_dirty_log(true).unwrap();
        }
    }
    let dirty = PageBitmap::new(ram.pages() as usize);
    let begin = Instant::now();
    let copied = new.machine.harvest_dirty(&dirty, false).unwrap();
    let copying = begin.elapsed();
    let expected = (last.0 - first.0) as usize;
    assert_eq!(copied, expected);
    assert_eq!(dirty.count_range(first.index()..last.index()), expected);
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
        "512 MiB, {expected} pages dirty: harvest {copying:?}, with re-arming {rearming:?}, of a clean log {:?}",
        begin.elapsed()
    );
}
