//! `UFFDIO_MOVE`: pages arrive without a copy, their source is empty, and errors say where and why.
#![expect(unsafe_code, reason = "moves pages away from their address")]

use crate::support::{
    Memory, PAGE, assert_no_event, exit_code, fork, in_thread, lock_forks, next_event, next_fault,
    open,
};
use pageferry_addr::Hva;
use pageferry_testkit::wait_until;
use pageferry_userfault::uffd::{
    Event, Features, RangeError, RangeIoctls, RangeOp, RegisterMode, SourceHoles, Userfaultfd, Wake,
};
use rustix::io::{Errno, read};
use std::sync::Arc;

/// An address in the middle of the gap between heap and mappings.
const NOWHERE: Hva = Hva(1 << 46);

/// Moves `pages` pages between the memories of a test.
fn move_pages(
    uffd: &Userfaultfd,
    (to, from): (Hva, Hva),
    pages: u64,
    holes: SourceHoles,
    wake: Wake,
) -> Result<(), RangeError> {
    // SAFETY: the source is memory of the test, and nobody has a reference into it.
    unsafe { uffd.move_pages(to, from, pages * PAGE, holes, wake) }
}

/// Missing memory of four pages, and a source with the contents 1, 2, 3, 4. A page that a fork
/// shares does not move, so the caller holds `lock_forks`.
fn memories(uffd: &Userfaultfd) -> (Arc<Memory>, Arc<Memory>) {
    let (memory, source) = (Memory::anonymous(4), Memory::anonymous(4));
    let ioctls = memory.register(uffd, RegisterMode::MISSING);
    assert!(ioctls.contains(RangeIoctls::MOVE));
    for page in 0..4 {
        source.write(page, 1 + page as u8);
    }
    (memory, source)
}

#[test]
fn a_missing_fault_is_resolved_by_move_and_the_source_is_empty() {
    let Some(uffd) = open(Features::MOVE) else {
        return;
    };
    let _turn = lock_forks();
    let (memory, source) = memories(&uffd);
    let toucher = memory.touch(1, None);
    assert_eq!(next_fault(&uffd).address, memory.at(1));
    let places = (memory.at(1), source.at(2));
    move_pages(&uffd, places, 2, SourceHoles::Refuse, Wake::Later).unwrap();
    toucher.assert_asleep();
    uffd.wake(memory.at(1), PAGE).unwrap();
    assert_eq!(toucher.value(), 3);
    assert_eq!(memory.get(2), 4);
    let left: Vec<_> = (0..4).map(|page| source.get(page)).collect();
    assert_eq!(left, [1, 2, 0, 0]);
    let toucher = memory.touch(0, None);
    next_fault(&uffd);
    let places = (memory.at(0), source.at(0));
    move_pages(&uffd, places, 1, SourceHoles::Refuse, Wake::Now).unwrap();
    assert_eq!(toucher.value(), 1);
    assert_no_event(&uffd);
}

#[test]
fn a_hole_in_the_source_stops_the_call_or_is_skipped() {
    let Some(uffd) = open(Features::MOVE) else {
        return;
    };
    let _turn = lock_forks();
    let (memory, source) = memories(&uffd);
    source.drop_pages(2, 1);
    let all = (memory.at(0), source.at(0));
    let error = move_pages(&uffd, all, 4, SourceHoles::Refuse, Wake::Now).unwrap_err();
    assert_eq!((error.op, error.errno), (RangeOp::Move, Errno::NOENT));
    assert_eq!((error.start, error.done), (memory.at(0), 2 * PAGE));
    assert!(!error.is_not_registered(), "{error}");
    assert!(
        error.to_string().contains("the source has a hole"),
        "{error}"
    );
    let rest = (memory.at(2), source.at(2));
    move_pages(&uffd, rest, 2, SourceHoles::Skip, Wake::Now).unwrap();
    assert_eq!([0, 1, 3].map(|page| memory.get(page)), [1, 2, 4]);
    // The page of the hole is still missing.
    let toucher = memory.touch(2, None);
    assert_eq!(next_fault(&uffd).address, memory.at(2));
    uffd.zeropage(memory.at(2), PAGE, Wake::Now).unwrap();
    assert_eq!(toucher.value(), 0);
}

#[test]
fn a_move_never_replaces_contents() {
    let Some(uffd) = open(Features::MOVE) else {
        return;
    };
    let _turn = lock_forks();
    let (memory, source) = memories(&uffd);
    uffd.copy(memory.at(1), &[9; PAGE as usize], Wake::Now)
        .unwrap();
    let all = (memory.at(0), source.at(0));
    let error = move_pages(&uffd, all, 4, SourceHoles::Refuse, Wake::Now).unwrap_err();
    assert!(error.is_already_there() && error.done == PAGE, "{error}");
    assert_eq!([0, 1].map(|page| memory.get(page)), [1, 9]);
    assert_eq!([0, 1].map(|page| source.get(page)), [0, 2]);
}

#[test]
fn a_page_that_a_child_shares_does_not_move() {
    let Some(uffd) = open(Features::MOVE) else {
        return;
    };
    let _turn = lock_forks();
    let (memory, source) = memories(&uffd);
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let child = fork(|| {
        // Without this the child would wait for its own end of the pipe.
        // SAFETY: the child does not use the descriptor again, and exits without dropping it.
        unsafe { libc::close(std::os::fd::AsRawFd::as_raw_fd(&writer)) };
        read(&reader, &mut [0]).map_or(1, |_| 0) // until the parent drops `writer`
    });
    source.write(0, 9); // gives this process a page of its own
    let places = (memory.at(0), source.at(0));
    let error = move_pages(&uffd, places, 2, SourceHoles::Refuse, Wake::Now).unwrap_err();
    drop(writer);
    assert_eq!(exit_code(child), 0);
    assert_eq!((error.errno, error.done), (Errno::BUSY, PAGE));
    assert_eq!((memory.get(0), source.get(1)), (9, 2));
    assert!(error.to_string().contains("a fork made"), "{error}");
}

#[test]
fn what_cannot_move_is_refused() {
    let Some(uffd) = open(Features::MOVE | Features::MISSING_SHMEM) else {
        return;
    };
    let _turn = lock_forks();
    let (memory, source) = memories(&uffd);
    let shared = Memory::shared(1);
    let off = Hva(source.at(0).0 + 1);
    let (to, from) = (memory.at(0), source.at(0));
    for (places, pages, errno) in [
        ((to, off), 1, Errno::INVAL),
        ((Hva(to.0 + 1), from), 1, Errno::INVAL),
        ((to, from), 0, Errno::INVAL),
        ((to, shared.at(0)), 1, Errno::INVAL),
        ((to, from), u64::MAX / PAGE, Errno::INVAL),
        ((source.at(1), from), 1, Errno::INVAL), // not registered
        ((to, NOWHERE), 1, Errno::NOENT),
        ((NOWHERE, from), 1, Errno::NOENT),
    ] {
        let error = move_pages(&uffd, places, pages, SourceHoles::Refuse, Wake::Now).unwrap_err();
        assert_eq!((error.errno, error.done), (errno, 0), "{error}");
    }
    assert_eq!(source.get(0), 1);
}

#[test]
fn a_move_waits_until_the_event_of_a_change_is_read() {
    let Some(uffd) = open(Features::MOVE | Features::EVENT_REMOVE) else {
        return;
    };
    let _turn = lock_forks();
    let (memory, source) = memories(&uffd);
    let call = in_thread(&memory, |memory| memory.drop_pages(3, 1));
    wait_until("madvise to begin", || {
        let zeroed = uffd.zeropage(memory.at(0), PAGE, Wake::Now);
        zeroed.is_err_and(|error| error.is_changing())
    });
    let places = (memory.at(1), source.at(1));
    let moved = || move_pages(&uffd, places, 1, SourceHoles::Refuse, Wake::Now);
    assert!(moved().unwrap_err().is_changing());
    assert!(matches!(next_event(&uffd), Event::Remove { .. }));
    call.join().unwrap();
    moved().unwrap();
    assert_eq!(memory.get(1), 2);
}
