//! Events of changed mappings. (Those of forks: `uffd_adopt`.)
#![expect(unsafe_code, reason = "changes mappings, to cause events")]

use crate::support::{Memory, PAGE, in_thread, next_event, open};
use pageferry_addr::Hva;
use pageferry_testkit::wait_until;
use pageferry_userfault::uffd::{Event, Features, RegisterMode, Wake};

#[test]
fn dropped_pages_are_reported_and_fills_wait_for_the_report_to_be_read() {
    let Some(uffd) = open(Features::EVENT_REMOVE) else {
        return;
    };
    let memory = Memory::anonymous(4);
    memory.register(&uffd, RegisterMode::MISSING);
    uffd.copy(memory.at(0), &[1; 4 * PAGE as usize], Wake::Now)
        .unwrap();
    let call = in_thread(&memory, |memory| memory.drop_pages(1, 2));
    wait_until("madvise to begin", || {
        let copied = uffd.copy(memory.at(1), &[2; PAGE as usize], Wake::Now);
        copied.unwrap_err().is_changing()
    });
    // Nothing resolves a fault until the event is read.
    for refused in [
        uffd.copy(memory.at(1), &[2; PAGE as usize], Wake::Now),
        uffd.copy_protected(memory.at(1), &[2; PAGE as usize], Wake::Now),
        uffd.zeropage(memory.at(1), PAGE, Wake::Now),
        uffd.continue_range(memory.at(1), PAGE, Wake::Now),
        uffd.write_protect(memory.at(0), PAGE),
        uffd.write_unprotect(memory.at(0), PAGE, Wake::Now),
    ] {
        let error = refused.unwrap_err();
        assert!(error.is_changing() && error.done == 0, "{error}");
        assert!(error.to_string().contains("read the event of the change"));
    }
    // Waking changes no page.
    uffd.wake(memory.at(1), PAGE).unwrap();
    match next_event(&uffd) {
        Event::Remove { start, end } => assert_eq!((start, end), (memory.at(1), memory.at(3))),
        other => panic!("{other:?}"),
    }
    call.join().unwrap();
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
        assert_ne!(moved, libc::MAP_FAILED);
    });
    match next_event(&uffd) {
        Event::Remap {
            from,
            to: there,
            len,
        } => assert_eq!((from, there, len), (memory.at(1), to, PAGE)),
        other => panic!("{other:?}"),
    }
    call.join().unwrap();
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
        assert_ne!(mapped, libc::MAP_FAILED);
    });
    match next_event(&uffd) {
        Event::Unmap { start, end } => assert_eq!((start, end), (to, Hva(to.0 + PAGE))),
        other => panic!("{other:?}"),
    }
    call.join().unwrap();
}
