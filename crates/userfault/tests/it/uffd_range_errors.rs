//! Calls that stop before their end return the place and the kernel's errno.
#![expect(unsafe_code, reason = "registering ranges that the kernel must refuse")]

use crate::support::{Memory, PAGE, open};
use pageferry_addr::{Hva, PageSize};
use pageferry_userfault::uffd::{Features, RangeOp, RegisterMode, Userfaultfd, Wake};
use rustix::io::Errno;

const SHARED: Features = Features::MISSING_SHMEM.union(Features::MINOR_SHMEM);

fn filled(uffd: &Userfaultfd, pages: u64) -> std::sync::Arc<Memory> {
    let memory = Memory::shared(pages);
    memory.register(uffd, RegisterMode::MISSING | RegisterMode::MINOR);
    for page in 0..pages {
        memory.put(page, 1 + page as u8);
    }
    memory
}

#[test]
fn continue_stops_at_a_mapped_page_and_says_how_far_it_came() {
    let Some(uffd) = open(SHARED) else { return };
    let memory = filled(&uffd, 8);
    uffd.continue_range(memory.at(5), PAGE, Wake::Now).unwrap();
    let error = uffd
        .continue_range(memory.at(2), 6 * PAGE, Wake::Now)
        .unwrap_err();
    assert!(error.is_already_there());
    assert_eq!(
        (error.op, error.start, error.len),
        (RangeOp::Continue, memory.at(2), 6 * PAGE)
    );
    assert_eq!((error.done, error.errno), (3 * PAGE, Errno::EXIST));
    assert_eq!(
        (2..6).map(|page| memory.get(page)).collect::<Vec<_>>(),
        [3, 4, 5, 6]
    );
    let again = uffd
        .continue_range(memory.at(2), PAGE, Wake::Now)
        .unwrap_err();
    assert!(again.is_already_there() && again.done == 0);
}

#[test]
fn continue_unmapped_steps_over_what_is_mapped() {
    let Some(uffd) = open(SHARED) else { return };
    let memory = filled(&uffd, 16);
    for page in [0, 3, 4, 9, 15] {
        uffd.continue_range(memory.at(page), PAGE, Wake::Now)
            .unwrap();
    }
    let all = || uffd.continue_unmapped(memory.at(0), memory.len(), PageSize::Size4K, Wake::Now);
    assert_eq!(all(), Ok(11 * PAGE));
    assert_eq!(all(), Ok(0));
    assert_eq!(
        (0..16).map(|page| memory.get(page)).collect::<Vec<_>>(),
        (1..17).collect::<Vec<_>>()
    );
}

#[test]
fn continue_stops_where_the_page_cache_has_nothing() {
    let Some(uffd) = open(SHARED) else { return };
    let memory = Memory::shared(4);
    memory.register(&uffd, RegisterMode::MINOR);
    memory.put(0, 1);
    memory.put(1, 1);
    uffd.continue_range(memory.at(0), PAGE, Wake::Now).unwrap();
    for error in [
        uffd.continue_range(memory.at(1), 3 * PAGE, Wake::Now)
            .unwrap_err(),
        uffd.continue_unmapped(memory.at(1), 3 * PAGE, PageSize::Size4K, Wake::Now)
            .unwrap_err(),
    ] {
        assert!(error.is_not_in_page_cache(), "{error}");
        assert_eq!(error.start, memory.at(1));
    }
    let error = uffd
        .continue_unmapped(memory.at(0), 4 * PAGE, PageSize::Size4K, Wake::Now)
        .unwrap_err();
    assert_eq!(
        (error.start, error.len, error.done),
        (memory.at(0), 4 * PAGE, 2 * PAGE)
    );
}

#[test]
fn copy_and_zeropage_never_replace_contents() {
    let Some(uffd) = open(SHARED) else { return };
    for memory in [Memory::shared(4), Memory::anonymous(4)] {
        memory.register(&uffd, RegisterMode::MISSING);
        uffd.copy(memory.at(2), &[6; PAGE as usize], Wake::Now)
            .unwrap();
        let error = uffd
            .copy(memory.at(0), &[7; 4 * PAGE as usize], Wake::Now)
            .unwrap_err();
        assert!(error.is_already_there());
        assert_eq!((error.op, error.done), (RangeOp::Copy, 2 * PAGE));
        let error = uffd
            .zeropage(memory.at(1), 3 * PAGE, Wake::Now)
            .unwrap_err();
        assert!(error.is_already_there());
        assert_eq!((error.op, error.done), (RangeOp::Zeropage, 0));
        assert_eq!(
            (0..3).map(|page| memory.get(page)).collect::<Vec<_>>(),
            [7, 7, 6]
        );
    }
}

#[test]
fn copy_does_not_replace_what_came_through_the_alias() {
    let Some(uffd) = open(SHARED) else { return };
    let memory = Memory::shared(1);
    memory.register(&uffd, RegisterMode::MISSING);
    memory.put(0, 5);
    assert!(
        uffd.copy(memory.at(0), &[6; PAGE as usize], Wake::Now)
            .unwrap_err()
            .is_already_there()
    );
    assert_eq!(memory.get(0), 5);
}

#[test]
fn ranges_that_are_not_registered_are_refused() {
    let Some(uffd) = open(SHARED) else { return };
    let memory = Memory::shared(2);
    memory.put(0, 1);
    let error = uffd
        .continue_range(memory.at(0), PAGE, Wake::Now)
        .unwrap_err();
    assert!(error.is_not_registered(), "{error}");
    assert!(
        uffd.copy(memory.at(1), &[0; PAGE as usize], Wake::Now)
            .unwrap_err()
            .is_not_registered()
    );
    // Register the range, and unregister it.
    memory.register(&uffd, RegisterMode::MINOR);
    uffd.unregister(memory.at(0), memory.len()).unwrap();
    assert!(
        uffd.continue_range(memory.at(0), PAGE, Wake::Now)
            .unwrap_err()
            .is_not_registered()
    );
}

#[test]
fn unaligned_and_empty_ranges_are_invalid() {
    let Some(uffd) = open(SHARED) else { return };
    let memory = filled(&uffd, 2);
    let off = Hva(memory.at(0).0 + 1);
    let half = [0; PAGE as usize / 2];
    for error in [
        uffd.continue_range(off, PAGE, Wake::Now),
        uffd.continue_range(memory.at(0), PAGE / 2, Wake::Now),
        uffd.continue_range(memory.at(0), 0, Wake::Now),
        uffd.zeropage(off, PAGE, Wake::Now),
        uffd.copy(memory.at(0), &half, Wake::Now),
        uffd.copy(memory.at(0), &[], Wake::Now),
        uffd.wake(memory.at(0), 0),
        uffd.unregister(off, PAGE),
    ] {
        let error = error.unwrap_err();
        assert_eq!((error.errno, error.done), (Errno::INVAL, 0), "{error}");
    }
}

#[test]
fn registration_of_what_cannot_be_is_refused() {
    let Some(uffd) = open(SHARED) else { return };
    let memory = Memory::shared(2);
    // SAFETY: the kernel refuses each call, so nothing is registered.
    let register =
        |uffd: &Userfaultfd, start, len, mode| unsafe { uffd.register(start, len, mode) };
    for (start, len, mode) in [
        (Hva(memory.at(0).0 + 1), PAGE, RegisterMode::MINOR),
        (memory.at(0), PAGE - 1, RegisterMode::MINOR),
        (memory.at(0), 0, RegisterMode::MINOR),
        (memory.at(0), PAGE, RegisterMode::empty()),
        (memory.at(0), PAGE, RegisterMode::from_bits(1 << 20)),
    ] {
        let error = register(&uffd, start, len, mode).unwrap_err();
        assert_eq!(
            (error.op, error.errno),
            (RangeOp::Register, Errno::INVAL),
            "{error}"
        );
    }
    let anonymous = Memory::anonymous(1);
    let error = register(&uffd, anonymous.at(0), PAGE, RegisterMode::MINOR).unwrap_err();
    assert_eq!(error.errno, Errno::INVAL, "minor faults need a file");
    memory.register(&uffd, RegisterMode::MINOR);
    let Some(second) = open(SHARED) else { return };
    let error = register(&second, memory.at(0), memory.len(), RegisterMode::MINOR).unwrap_err();
    assert_eq!(error.errno, Errno::BUSY);
}
