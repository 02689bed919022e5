//! Reading events: many by one `read(2)`, in order, and waiting with a limit and a stop.

use crate::support::{Memory, PAGE, in_thread, open};
use pageferry_testkit::{LIMIT, wait_until};
use pageferry_userfault::uffd::{
    Event, EventReader, Features, PageFault, RegisterMode, Userfaultfd, Wait, Wake,
};
use rustix::io::{read, write};
use std::collections::BTreeSet;
use std::fs::read_to_string;
use std::os::fd::{AsFd, AsRawFd};
use std::thread;
use std::time::{Duration, Instant};

/// The number of faults that wait to be read, from the kernel's record of the descriptor.
fn pending(uffd: &Userfaultfd) -> usize {
    let path = format!("/proc/self/fdinfo/{}", uffd.as_fd().as_raw_fd());
    let record = read_to_string(path).unwrap();
    let count = record
        .lines()
        .find_map(|line| line.strip_prefix("pending:\t"));
    count.unwrap().parse().unwrap()
}

fn fault(event: Option<Event>) -> PageFault {
    match event {
        Some(Event::PageFault(fault)) => fault,
        other => panic!("not a page fault: {other:?}"),
    }
}

#[test]
fn one_read_takes_as_many_faults_as_the_reader_has_room_for() {
    const THREADS: usize = 10;
    let Some(uffd) = open(Features::MINOR_SHMEM) else {
        return;
    };
    let memory = Memory::shared(THREADS as u64);
    memory.register(&uffd, RegisterMode::MINOR);
    let mut reader = EventReader::new(4);
    assert!(reader.try_next(&uffd).unwrap().is_none());
    let touchers: Vec<_> = (0..THREADS as u64)
        .map(|page| {
            memory.put(page, page as u8);
            memory.touch(page, None)
        })
        .collect();
    wait_until("all faults", || pending(&uffd) == THREADS);
    let mut pages = BTreeSet::new();
    for left in [6, 6, 6, 6, 2, 2, 2, 2, 0, 0] {
        assert!(pages.insert(fault(reader.try_next(&uffd).unwrap()).address));
        assert_eq!(pending(&uffd), left, "after {} events", pages.len());
    }
    assert!(reader.try_next(&uffd).unwrap().is_none());
    assert_eq!(pages.len(), THREADS, "no fault came twice");
    uffd.continue_range(memory.at(0), memory.len(), Wake::Now)
        .unwrap();
    for (page, toucher) in touchers.into_iter().enumerate() {
        assert_eq!(toucher.value(), page as u8);
    }
}

#[test]
fn a_change_comes_before_a_fault_that_was_read_with_it() {
    let Some(uffd) = open(Features::EVENT_REMOVE) else {
        return;
    };
    let memory = Memory::anonymous(2);
    memory.register(&uffd, RegisterMode::MISSING);
    let toucher = memory.touch(0, None);
    wait_until("the fault", || pending(&uffd) == 1);
    let call = in_thread(&memory, |memory| memory.drop_pages(0, 1));
    wait_until("madvise to begin", || {
        let zeroed = uffd.zeropage(memory.at(1), PAGE, Wake::Now);
        zeroed.is_err_and(|error| error.is_changing())
    });
    // The kernel returns the fault first. A handler that resolved it by old contents would bring
    // these back after the page was dropped.
    let mut reader = EventReader::new(8);
    match reader.try_next(&uffd).unwrap() {
        Some(Event::Remove { start, end }) => {
            assert_eq!((start, end), (memory.at(0), memory.at(1)));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(pending(&uffd), 0, "the fault was read too");
    assert_eq!(fault(reader.try_next(&uffd).unwrap()).address, memory.at(0));
    call.join().unwrap();
    uffd.zeropage(memory.at(0), PAGE, Wake::Now).unwrap();
    assert_eq!(toucher.value(), 0);
}

#[test]
fn a_wait_ends_at_its_limit() {
    let Some(uffd) = open(Features::empty()) else {
        return;
    };
    let limit = Duration::from_millis(20);
    for spin in [Duration::ZERO, limit / 2, LIMIT] {
        let wait = Wait {
            spin,
            limit: Some(limit),
            stop: None,
        };
        let start = Instant::now();
        assert!(EventReader::new(1).next(&uffd, wait).unwrap().is_none());
        assert!(start.elapsed() >= limit, "spin {spin:?}");
    }
}

#[test]
fn a_wait_returns_the_event_that_ends_it_while_it_spins_and_while_it_sleeps() {
    let Some(uffd) = open(Features::MISSING_SHMEM) else {
        return;
    };
    for (page, spin) in [(0, LIMIT), (1, Duration::ZERO)] {
        let memory = Memory::shared(2);
        memory.register(&uffd, RegisterMode::MISSING);
        let wait = Wait {
            spin,
            limit: Some(LIMIT),
            stop: None,
        };
        thread::scope(|scope| {
            let waiter = scope.spawn(|| EventReader::new(1).next(&uffd, wait).unwrap());
            let toucher = memory.touch(page, None);
            assert_eq!(fault(waiter.join().unwrap()).address, memory.at(page));
            uffd.zeropage(memory.at(page), PAGE, Wake::Now).unwrap();
            assert_eq!(toucher.value(), 0);
        });
    }
}

#[test]
fn a_stop_ends_a_sleep_and_no_event_is_lost() {
    let Some(uffd) = open(Features::MISSING_SHMEM) else {
        return;
    };
    let memory = Memory::shared(1);
    memory.register(&uffd, RegisterMode::MISSING);
    let (stopped, stop) = rustix::pipe::pipe().unwrap();
    let wait = Wait {
        spin: Duration::ZERO,
        limit: Some(LIMIT),
        stop: Some(stopped.as_fd()),
    };
    let start = Instant::now();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| EventReader::new(1).next(&uffd, wait).unwrap());
        write(&stop, b"!").unwrap();
        assert!(waiter.join().unwrap().is_none());
    });
    assert!(start.elapsed() < LIMIT, "the limit ended the wait");
    // An event that waits already comes first, even though `stopped` is still readable.
    let toucher = memory.touch(0, None);
    wait_until("the fault", || pending(&uffd) == 1);
    let event = EventReader::new(1).next(&uffd, wait).unwrap();
    assert_eq!(fault(event).address, memory.at(0));
    uffd.zeropage(memory.at(0), PAGE, Wake::Now).unwrap();
    assert_eq!(toucher.value(), 0);
    assert_eq!(read(&stopped, &mut [0; 2]).unwrap(), 1, "the stop stays");
}
