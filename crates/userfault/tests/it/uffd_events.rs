//! Reading events: in batches, without blocking, and events other than page faults.
#![expect(unsafe_code, reason = "changes mappings and forks, to cause events")]

use crate::support::{Memory, PAGE, next_event, next_fault, open};
use pageferry_addr::Hva;
use pageferry_testkit::LIMIT;
use pageferry_userfault::uffd::{Event, Features, RegisterMode, Wake};
use rustix::io::{FdFlags, fcntl_getfd};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

#[test]
fn faults_of_many_threads_come_in_batches_up_to_the_limit() {
    const THREADS: u64 = 70; // more than one read(2) returns
    let Some(uffd) = open(Features::MINOR_SHMEM) else {
        return;
    };
    let memory = Memory::shared(THREADS);
    memory.register(&uffd, RegisterMode::MINOR);
    let mut events = Vec::new();
    assert_eq!(uffd.read_events(&mut events, 8), Ok(0));
    assert!(uffd.read_event().unwrap().is_none());
    let touchers: Vec<_> = (0..THREADS)
        .map(|page| {
            memory.put(page, page as u8);
            memory.touch(page, None)
        })
        .collect();
    let first = next_fault(&uffd);
    let mut pages = BTreeSet::from([first.address]);
    let start = Instant::now();
    while (pages.len() as u64) < THREADS {
        assert!(start.elapsed() < LIMIT, "only {} faults came", pages.len());
        events.clear();
        // Alternate between a small and a very large limit.
        let limit = if pages.len() % 2 == 0 { 3 } else { 1000 };
        let count = uffd.read_events(&mut events, limit).unwrap();
        assert!(count == events.len() && count <= limit);
        for event in events.drain(..) {
            let Event::PageFault(fault) = event else {
                panic!("{event:?}")
            };
            assert!(pages.insert(fault.address), "a fault came twice");
        }
    }
    assert_eq!(pages, (0..THREADS).map(|page| memory.at(page)).collect());
    uffd.continue_range(memory.at(0), memory.len(), Wake::Now)
        .unwrap();
    for (page, toucher) in touchers.into_iter().enumerate() {
        assert_eq!(toucher.value(), page as u8);
    }
    assert_eq!(uffd.read_events(&mut events, 0), Ok(0));
}

/// Runs a call that sleeps until its event is read.
fn in_thread(
    memory: &Arc<Memory>,
    call: impl FnOnce(&Memory) -> i32 + Send + 'static,
) -> thread::JoinHandle<i32> {
    let memory = Arc::clone(memory);
    thread::spawn(move || call(&memory))
}

#[test]
fn dropped_pages_are_reported_and_fills_wait_for_the_report_to_be_read() {
    let Some(uffd) = open(Features::EVENT_REMOVE) else {
        return;
    };
    let memory = Memory::anonymous(4);
    memory.register(&uffd, RegisterMode::MISSING);
    uffd.copy(memory.at(0), &[1; 4 * PAGE as usize], Wake::Now)
        .unwrap();
    let call = in_thread(&memory, |memory| {
        let (at, len) = (
            memory.guest().wrapping_byte_add(PAGE as usize),
            2 * PAGE as usize,
        );
        // SAFETY: these are two pages of our mapping, and nobody has a reference into it.
        unsafe { libc::madvise(at.cast(), len, libc::MADV_DONTNEED) }
    });
    let start = Instant::now();
    // The kernel refuses to fill until the event is read.
    while !uffd
        .copy(memory.at(1), &[2; PAGE as usize], Wake::Now)
        .unwrap_err()
        .is_changing()
    {
        assert!(start.elapsed() < LIMIT, "madvise does not begin");
    }
    match next_event(&uffd) {
        Event::Remove { start, end } => assert_eq!((start, end), (memory.at(1), memory.at(3))),
        other => panic!("{other:?}"),
    }
    assert_eq!(call.join().unwrap(), 0);
    uffd.copy(memory.at(1), &[2; PAGE as usize], Wake::Now)
        .unwrap();
    assert_eq!((memory.get(0), memory.get(1), memory.get(3)), (1, 2, 1));
}

#[test]
fn moved_and_unmapped_ranges_are_reported() {
    // These are dropped last, because unmapping waits for a reader of its event while the
    // userfaultfd is open.
    let (memory, target) = (Memory::anonymous(2), Memory::anonymous(1));
    let Some(uffd) = open(Features::EVENT_REMAP | Features::EVENT_UNMAP) else {
        return;
    };
    memory.register(&uffd, RegisterMode::MISSING);
    // No address may become free in between, or another thread's mapping could take it. So the page
    // is moved over a mapping of ours and leaves an empty mapping behind. Then that one is mapped
    // over.
    let to = target.at(0);
    let call = in_thread(&memory, move |memory| {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
        let to: *mut libc::c_void = std::ptr::with_exposed_provenance_mut(to.0 as usize);
        let from = memory.guest().wrapping_byte_add(PAGE as usize);
        // SAFETY: this replaces `target` with a page of `memory`. Both are ours, and nobody touches
        // `target`.
        let moved = unsafe { libc::mremap(from.cast(), PAGE as usize, PAGE as usize, flags, to) };
        i32::from(moved == libc::MAP_FAILED)
    });
    match next_event(&uffd) {
        Event::Remap {
            from,
            to: there,
            len,
        } => assert_eq!((from, there, len), (memory.at(1), to, PAGE)),
        other => panic!("{other:?}"),
    }
    assert_eq!(call.join().unwrap(), 0);
    let call = in_thread(&target, |target| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: this replaces a page of ours that nobody touches.
        let mapped = unsafe {
            libc::mmap(
                target.guest().cast(),
                PAGE as usize,
                libc::PROT_READ,
                flags,
                -1,
                0,
            )
        };
        i32::from(mapped == libc::MAP_FAILED)
    });
    match next_event(&uffd) {
        Event::Unmap { start, end } => assert_eq!((start, end), (to, Hva(to.0 + PAGE))),
        other => panic!("{other:?}"),
    }
    assert_eq!(call.join().unwrap(), 0);
}

#[test]
fn a_fork_hands_over_the_childs_userfaultfd() {
    let Some(uffd) = open(Features::EVENT_FORK) else {
        return;
    };
    let memory = Memory::anonymous(1);
    memory.register(&uffd, RegisterMode::MISSING);
    // SAFETY: the child only exits, which is safe after a fork of a process with many threads.
    let call = in_thread(&memory, |_| unsafe {
        match libc::fork() {
            0 => libc::_exit(7),
            child => child,
        }
    });
    let Event::Fork { child } = next_event(&uffd) else {
        panic!("no fork event")
    };
    assert!(fcntl_getfd(&child).unwrap().contains(FdFlags::CLOEXEC));
    drop(child);
    let pid = call.join().unwrap();
    let mut status = 0;
    // SAFETY: the call waits for our child and writes `status`.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(
        (libc::WIFEXITED(status), libc::WEXITSTATUS(status)),
        (true, 7)
    );
}
