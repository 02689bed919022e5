//! A thread sleeps on a page. After the page is made present, the thread continues and sees the
//! right bytes.

use crate::support::{Memory, PAGE, assert_no_event, next_fault, open};
use pageferry_addr::PageSize;
use pageferry_userfault::uffd::{Features, RangeIoctls, RegisterMode, Wake};

const SHARED: Features = Features::MISSING_SHMEM.union(Features::MINOR_SHMEM);

#[test]
fn a_minor_fault_is_resolved_by_continue_after_a_write_through_the_alias() {
    let Some(uffd) = open(SHARED) else { return };
    let memory = Memory::shared(8);
    let ioctls = memory.register(&uffd, RegisterMode::MINOR);
    assert!(ioctls.contains(RangeIoctls::CONTINUE | RangeIoctls::WAKE));
    memory.put(5, 0x5a);
    let toucher = memory.touch(5, None);
    let fault = next_fault(&uffd);
    assert_eq!(fault.address, memory.at(5));
    assert!(fault.minor && !fault.write && !fault.write_protected);
    assert_eq!(fault.thread, 0, "thread ids were not requested");
    // The bytes change while the toucher sleeps. It must see the last ones.
    memory.put(5, 0xa5);
    toucher.assert_asleep();
    uffd.continue_range(memory.at(5), PAGE, Wake::Now).unwrap();
    assert_eq!(toucher.value(), 0xa5);
    assert_no_event(&uffd);
}

#[test]
fn a_write_fault_says_so_and_the_write_lands_in_the_file() {
    let Some(uffd) = open(SHARED) else { return };
    let memory = Memory::shared(2);
    memory.register(&uffd, RegisterMode::MINOR);
    memory.put(1, 1);
    let toucher = memory.touch(1, Some(2));
    assert!(next_fault(&uffd).write);
    uffd.continue_range(memory.at(1), PAGE, Wake::Now).unwrap();
    assert_eq!(toucher.value(), 2);
}

#[test]
fn a_fault_names_its_thread_and_the_exact_address_where_asked_to() {
    let Some(uffd) = open(SHARED | Features::THREAD_ID | Features::EXACT_ADDRESS) else {
        return;
    };
    let memory = Memory::shared(2);
    memory.register(&uffd, RegisterMode::MINOR);
    memory.put(1, 1);
    let toucher = memory.touch(1, None);
    let fault = next_fault(&uffd);
    assert_eq!(
        (fault.thread, fault.address),
        (toucher.thread, memory.at(1))
    );
    uffd.continue_range(memory.at(1), PAGE, Wake::Now).unwrap();
    assert_eq!(toucher.value(), 1);
}

#[test]
fn a_missing_fault_is_resolved_by_copy() {
    let Some(uffd) = open(SHARED) else { return };
    for memory in [Memory::shared(4), Memory::anonymous(4)] {
        let ioctls = memory.register(&uffd, RegisterMode::MISSING);
        assert!(ioctls.contains(RangeIoctls::COPY | RangeIoctls::ZEROPAGE));
        assert!(!ioctls.contains(RangeIoctls::CONTINUE));
        let toucher = memory.touch(2, None);
        let fault = next_fault(&uffd);
        assert!(fault.address == memory.at(2) && !fault.minor);
        toucher.assert_asleep();
        let bytes: Vec<u8> = [7u8, 8]
            .iter()
            .flat_map(|value| [*value; PAGE as usize])
            .collect();
        uffd.copy(memory.at(2), &bytes, Wake::Now).unwrap();
        assert_eq!(toucher.value(), 7);
        assert_eq!(memory.get(3), 8, "the second page of the same copy");
        assert_no_event(&uffd);
    }
}

#[test]
fn a_missing_fault_is_resolved_by_zeropage() {
    let Some(uffd) = open(SHARED) else { return };
    for memory in [Memory::shared(4), Memory::anonymous(4)] {
        memory.register(&uffd, RegisterMode::MISSING);
        let toucher = memory.touch(1, None);
        assert_eq!(next_fault(&uffd).address, memory.at(1));
        uffd.zeropage(memory.at(0), 4 * PAGE, Wake::Now).unwrap();
        assert_eq!(toucher.value(), 0);
        assert_eq!((0..4).map(|page| memory.get(page)).sum::<u8>(), 0);
    }
}

#[test]
fn with_wake_later_the_toucher_sleeps_until_it_is_woken() {
    let Some(uffd) = open(SHARED) else { return };
    let memory = Memory::shared(2);
    memory.register(&uffd, RegisterMode::MINOR);
    memory.put(0, 3);
    let toucher = memory.touch(0, None);
    next_fault(&uffd);
    uffd.continue_range(memory.at(0), PAGE, Wake::Later)
        .unwrap();
    toucher.assert_asleep();
    uffd.wake(memory.at(0), PAGE).unwrap();
    assert_eq!(toucher.value(), 3);
}

#[test]
fn a_wake_without_a_page_makes_the_toucher_fault_again() {
    let Some(uffd) = open(SHARED) else { return };
    let memory = Memory::shared(1);
    memory.register(&uffd, RegisterMode::MINOR);
    memory.put(0, 4);
    let toucher = memory.touch(0, None);
    let first = next_fault(&uffd);
    uffd.wake(memory.at(0), PAGE).unwrap();
    assert_eq!(next_fault(&uffd), first);
    uffd.continue_range(memory.at(0), PAGE, Wake::Now).unwrap();
    assert_eq!(toucher.value(), 4);
}

#[test]
fn continue_unmapped_wakes_also_those_whose_page_was_mapped_without_a_wake() {
    let Some(uffd) = open(SHARED) else { return };
    let memory = Memory::shared(8);
    memory.register(&uffd, RegisterMode::MINOR);
    for page in 0..8 {
        memory.put(page, 10 + page as u8);
    }
    let toucher = memory.touch(3, None);
    next_fault(&uffd);
    uffd.continue_range(memory.at(3), PAGE, Wake::Later)
        .unwrap();
    toucher.assert_asleep();
    let newly = uffd
        .continue_unmapped(memory.at(0), memory.len(), PageSize::Size4K, Wake::Now)
        .unwrap();
    assert_eq!(newly, 7 * PAGE);
    assert_eq!(toucher.value(), 13);
    for page in 0..8 {
        assert_eq!(memory.get(page), 10 + page as u8);
    }
    assert_no_event(&uffd);
}

#[test]
fn sleepers_go_on_when_the_range_is_unregistered_or_the_descriptor_closed() {
    let Some(uffd) = open(SHARED) else { return };
    let memory = Memory::shared(2);
    memory.register(&uffd, RegisterMode::MISSING);
    let toucher = memory.touch(0, None);
    next_fault(&uffd);
    uffd.unregister(memory.at(0), PAGE).unwrap();
    assert_eq!(toucher.value(), 0);
    let toucher = memory.touch(1, None);
    next_fault(&uffd);
    drop(uffd);
    assert_eq!(toucher.value(), 0);
}

#[test]
fn many_touchers_of_one_page_all_go_on_after_one_continue() {
    let Some(uffd) = open(SHARED) else { return };
    let memory = Memory::shared(1);
    memory.register(&uffd, RegisterMode::MINOR);
    memory.put(0, 9);
    let touchers: Vec<_> = (0..6).map(|_| memory.touch(0, None)).collect();
    for _ in 0..6 {
        assert_eq!(next_fault(&uffd).address, memory.at(0));
    }
    uffd.continue_range(memory.at(0), PAGE, Wake::Now).unwrap();
    for toucher in touchers {
        assert_eq!(toucher.value(), 9);
    }
}
