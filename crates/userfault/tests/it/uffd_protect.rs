//! Write protection: writes sleep or are recorded, pages arrive protected, and errors say why.

use crate::support::{Memory, PAGE, assert_no_event, next_fault, open};
use pageferry_addr::Hva;
use pageferry_userfault::uffd::{
    Features, PageFault, RangeIoctls, RangeOp, RegisterMode, Userfaultfd, Wake, WrittenPages,
};
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// The bit of a pagemap entry whose page is write-protected by userfaultfd
/// (`Documentation/admin-guide/mm/pagemap.rst`).
const PM_UFFD_WP: u64 = 1 << 57;

/// Whether each page is write-protected.
fn protection(memory: &Memory, pages: u64) -> Vec<bool> {
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let is_protected = |page| {
        let mut entry = [0; 8];
        let offset = memory.at(page).0 / PAGE * 8;
        pagemap.read_exact_at(&mut entry, offset).unwrap();
        u64::from_ne_bytes(entry) & PM_UFFD_WP != 0
    };
    (0..pages).map(is_protected).collect()
}

/// The next fault, which must be a write to a protected page.
fn next_protected(uffd: &Userfaultfd) -> Hva {
    match next_fault(uffd) {
        PageFault {
            address,
            write: true,
            write_protected: true,
            minor: false,
            ..
        } => address,
        other => panic!("not a write to a protected page: {other:?}"),
    }
}

#[test]
fn a_write_to_a_protected_page_sleeps_until_the_protection_is_lifted() {
    let Some(uffd) = open(Features::PAGEFAULT_FLAG_WP) else {
        return;
    };
    let memory = Memory::anonymous(2);
    let ioctls = memory.register(&uffd, RegisterMode::MISSING | RegisterMode::WP);
    assert!(ioctls.contains(RangeIoctls::WRITEPROTECT));
    uffd.copy(memory.at(0), &[1; 2 * PAGE as usize], Wake::Now)
        .unwrap();
    uffd.write_protect(memory.at(0), memory.len()).unwrap();
    let reader = memory.touch(0, None);
    assert_eq!(reader.value(), 1, "a read does not fault");
    let writer = memory.touch(1, Some(2));
    let fault = next_fault(&uffd);
    assert!(fault.write && fault.write_protected && fault.address == memory.at(1));
    uffd.write_unprotect(memory.at(1), PAGE, Wake::Later)
        .unwrap();
    writer.assert_asleep();
    uffd.write_unprotect(memory.at(1), PAGE, Wake::Now).unwrap();
    assert_eq!(writer.value(), 2);
}

#[test]
fn a_copied_page_arrives_protected() {
    let Some(uffd) = open(Features::PAGEFAULT_FLAG_WP) else {
        return;
    };
    let memory = Memory::anonymous(2);
    memory.register(&uffd, RegisterMode::MISSING | RegisterMode::WP);
    uffd.copy_protected(memory.at(0), &[5; PAGE as usize], Wake::Now)
        .unwrap();
    uffd.copy(memory.at(1), &[6; PAGE as usize], Wake::Now)
        .unwrap();
    assert_eq!(protection(&memory, 2), [true, false]);
    memory.write(1, 7);
    let writer = memory.touch(0, Some(8));
    assert_eq!(next_protected(&uffd), memory.at(0));
    uffd.write_unprotect(memory.at(0), PAGE, Wake::Now).unwrap();
    assert_eq!(writer.value(), 8);
}

#[test]
fn a_continued_page_arrives_protected() {
    let features = Features::MINOR_SHMEM | Features::WP_HUGETLBFS_SHMEM | Features::WP_UNPOPULATED;
    let Some(uffd) = open(features) else { return };
    let memory = Memory::shared(2);
    let ioctls = memory.register(&uffd, RegisterMode::MINOR | RegisterMode::WP);
    assert!(ioctls.contains(RangeIoctls::WRITEPROTECT | RangeIoctls::CONTINUE));
    memory.put(0, 5);
    memory.put(1, 6);
    uffd.continue_protected(memory.at(0), PAGE, Wake::Now)
        .unwrap();
    uffd.continue_range(memory.at(1), PAGE, Wake::Now).unwrap();
    assert_eq!(protection(&memory, 2), [true, false]);
    let writer = memory.touch(0, Some(8));
    assert_eq!(next_protected(&uffd), memory.at(0));
    uffd.write_unprotect(memory.at(0), PAGE, Wake::Now).unwrap();
    assert_eq!(writer.value(), 8);
    memory.write(1, 7);
    assert_no_event(&uffd);
}

#[test]
fn with_wake_later_a_page_arrives_protected_and_wakes_nobody() {
    let Some(uffd) = open(Features::PAGEFAULT_FLAG_WP) else {
        return;
    };
    let memory = Memory::anonymous(1);
    memory.register(&uffd, RegisterMode::MISSING | RegisterMode::WP);
    let reader = memory.touch(0, None);
    next_fault(&uffd);
    uffd.copy_protected(memory.at(0), &[5; PAGE as usize], Wake::Later)
        .unwrap();
    reader.assert_asleep();
    uffd.wake(memory.at(0), PAGE).unwrap();
    assert_eq!(reader.value(), 5);
    assert_eq!(protection(&memory, 1), [true]);
}

#[test]
fn pages_that_were_never_touched_can_be_protected_with_the_feature() {
    for (features, protected) in [
        (Features::PAGEFAULT_FLAG_WP, false),
        (Features::WP_UNPOPULATED, true),
    ] {
        let Some(uffd) = open(features) else { return };
        let memory = Memory::anonymous(1);
        memory.register(&uffd, RegisterMode::WP);
        uffd.write_protect(memory.at(0), PAGE).unwrap();
        let writer = memory.touch(0, Some(1));
        if protected {
            assert_eq!(next_protected(&uffd), memory.at(0));
            uffd.write_unprotect(memory.at(0), PAGE, Wake::Now).unwrap();
        }
        assert_eq!(writer.value(), 1);
        assert_no_event(&uffd);
    }
}

#[test]
fn asynchronous_protection_records_writes_without_a_sleep_or_an_event() {
    let Some(uffd) = open(Features::WP_ASYNC | Features::WP_HUGETLBFS_SHMEM) else {
        return;
    };
    for memory in [Memory::anonymous(4), Memory::shared(4)] {
        memory.register(&uffd, RegisterMode::WP);
        memory.write(0, 1);
        memory.write(1, 1);
        uffd.write_protect(memory.at(0), memory.len()).unwrap();
        assert_eq!(protection(&memory, 4), [true; 4]);
        memory.write(1, 2); // present before
        memory.write(2, 2); // never touched before
        assert_eq!((memory.get(0), memory.get(1), memory.get(2)), (1, 2, 2));
        assert_eq!(protection(&memory, 4), [true, false, false, true]);
        // The next round.
        uffd.write_protect(memory.at(0), memory.len()).unwrap();
        assert_eq!(protection(&memory, 4), [true; 4]);
        assert_no_event(&uffd);
    }
}

#[test]
fn written_pages_are_taken_once_with_their_runs() {
    const PAGES: u64 = 300;
    let Some(uffd) = open(Features::WP_ASYNC | Features::WP_HUGETLBFS_SHMEM) else {
        return;
    };
    for memory in [Memory::anonymous(PAGES), Memory::shared(PAGES)] {
        memory.register(&uffd, RegisterMode::WP);
        uffd.write_protect(memory.at(0), memory.len()).unwrap();
        let pages = WrittenPages::open().unwrap();
        let take = |first: u64, count: u64| {
            let mut runs = Vec::new();
            let each = |start: Hva, len| runs.push(((start.0 - memory.at(0).0) / PAGE, len / PAGE));
            pages.take(memory.at(first), count * PAGE, each).unwrap();
            runs
        };
        assert_eq!(take(0, PAGES), []);
        // More runs than one system call reports.
        for page in (0..PAGES).filter(|page| page % 3 != 2) {
            memory.write(page, 1);
        }
        assert_eq!(take(30, 3), [(30, 2)]);
        let runs = (0..PAGES / 3).map(|run| (3 * run, 2));
        let rest: Vec<_> = runs.filter(|run| run.0 != 30).collect();
        assert_eq!(take(0, PAGES), rest);
        assert_eq!(take(0, PAGES), []);
        memory.write(PAGES - 1, 2);
        assert_eq!(take(0, PAGES), [(PAGES - 1, 1)]);
        assert_eq!((memory.get(0), memory.get(PAGES - 1)), (1, 2));
    }
}

#[test]
fn written_pages_are_known_only_with_asynchronous_protection() {
    let Some(uffd) = open(Features::WP_ASYNC) else {
        return;
    };
    let memory = Memory::anonymous(2);
    let pages = WrittenPages::open().unwrap();
    let refused = |at| {
        let error = pages.take(at, PAGE, |_, _| panic!("a page was reported"));
        let error = error.unwrap_err();
        assert_eq!((error.op, error.done), (RangeOp::Scan, 0));
        error.errno
    };
    assert_eq!(refused(memory.at(0)), Errno::PERM);
    memory.register(&uffd, RegisterMode::WP);
    assert_eq!(refused(Hva(memory.at(0).0 + 1)), Errno::INVAL);
    pages.take(memory.at(0), PAGE, |_, _| ()).unwrap();
}

#[test]
fn protection_needs_its_registration() {
    let Some(uffd) = open(Features::MINOR_SHMEM | Features::WP_HUGETLBFS_SHMEM) else {
        return;
    };
    let memory = Memory::shared(2);
    memory.register(&uffd, RegisterMode::MISSING | RegisterMode::MINOR);
    memory.put(1, 1);
    let (at, behind) = (memory.at(0), memory.at(1));
    for (result, op, errno) in [
        (
            uffd.write_protect(at, PAGE),
            RangeOp::WriteProtect,
            Errno::NOENT,
        ),
        (
            uffd.write_unprotect(at, PAGE, Wake::Now),
            RangeOp::WriteProtect,
            Errno::NOENT,
        ),
        (
            uffd.copy_protected(at, &[1; PAGE as usize], Wake::Now),
            RangeOp::Copy,
            Errno::INVAL,
        ),
        (
            uffd.continue_protected(behind, PAGE, Wake::Now),
            RangeOp::Continue,
            Errno::INVAL,
        ),
        (
            uffd.write_protect(Hva(at.0 + 1), PAGE),
            RangeOp::WriteProtect,
            Errno::INVAL,
        ),
    ] {
        let error = result.unwrap_err();
        assert_eq!(
            (error.op, error.errno, error.done),
            (op, errno, 0),
            "{error}"
        );
    }
    // Nothing was mapped.
    uffd.copy(at, &[2; PAGE as usize], Wake::Now).unwrap();
    uffd.continue_range(behind, PAGE, Wake::Now).unwrap();
}
