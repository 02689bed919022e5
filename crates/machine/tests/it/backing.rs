//! The kinds of memory behind guests: what they hold, and what is refused in one sentence.

use crate::place::placing;
use pageferry_addr::{PAGE_SIZE, PageSize, RamPage};
use pageferry_machine::{
    Backing, Collapsed, Engine, GuestRam, MachineError, MachineSpec, RamLayout, create,
};
use pageferry_testkit::HugePages;
use pageferry_userfault::PageBitmap;
use std::sync::Arc;

const HUGE: u64 = PageSize::Size2M.pages();

fn ram(backing: Backing, pages: u64) -> Result<GuestRam, MachineError> {
    GuestRam::with_backing(RamLayout::for_memory(pages * PAGE_SIZE).unwrap(), backing)
}

#[test]
fn memory_of_a_pool_is_like_other_memory() {
    let Some(_pool) = HugePages::at_least(4) else {
        return;
    };
    let ram = ram(Backing::Hugetlb2M, 4 * HUGE).unwrap();
    for hva in [ram.guest_hva(RamPage(0)), ram.alias_hva(RamPage(0))] {
        assert!(hva.0.is_multiple_of(PageSize::Size2M.bytes()), "{hva:?}");
    }
    let mut page = [1; PAGE_SIZE as usize];
    placing(&ram).read(RamPage(HUGE + 7), &mut page);
    assert_eq!(page, [0; PAGE_SIZE as usize]);
    ram.allocate().unwrap();
    placing(&ram).write(RamPage(HUGE + 7), &[9; PAGE_SIZE as usize]);
    placing(&ram).read(RamPage(HUGE + 7), &mut page);
    assert_eq!(page, [9; PAGE_SIZE as usize]);
    // A file of a pool shows no holes, so no page is taken for zero that is not.
    assert_eq!(ram.next_allocated(RamPage(5), 64).unwrap(), Some(5..69));
    for (first, pages) in [(HUGE, 1), (HUGE + 1, HUGE)] {
        let refused = placing(&ram).punch_hole(RamPage(first), pages);
        assert!(
            matches!(refused, Err(MachineError::WrongState(_))),
            "{refused:?}"
        );
    }
    placing(&ram).punch_hole(RamPage(HUGE), HUGE).unwrap();
    placing(&ram).read(RamPage(HUGE + 7), &mut page);
    assert_eq!(page, [0; PAGE_SIZE as usize]);
}

#[test]
fn private_memory_is_like_other_memory() {
    let ram = ram(Backing::Anonymous, 2 * HUGE).unwrap();
    assert_eq!(ram.guest_hva(RamPage(0)), ram.alias_hva(RamPage(0)));
    let start = ram.guest_hva(RamPage(0)).0;
    assert!(start.is_multiple_of(PageSize::Size2M.bytes()));
    // An unmapped page may be swapped out, so all memory counts.
    assert_eq!(
        ram.next_allocated(RamPage(5), u64::MAX).unwrap(),
        Some(5..2 * HUGE)
    );
    let byte = |page: u64| {
        let mut byte = [1];
        ram.try_read((RamPage(page), 99), &mut byte).unwrap();
        byte[0]
    };
    assert_eq!(byte(7), 0);
    for page in 0..HUGE {
        ram.try_write(RamPage(page), &[9; PAGE_SIZE as usize])
            .unwrap();
    }
    ram.allocate().unwrap();
    placing(&ram).punch_hole(RamPage(7), 2).unwrap();
    assert_eq!([6, 7, 8, 9].map(byte), [9, 0, 0, 9]);
}

#[test]
fn private_memory_is_made_of_huge_pages_on_request() {
    let spec = MachineSpec {
        backing: Backing::Anonymous,
        ..MachineSpec::new(1, 8 << 20)
    };
    let machine = create(Engine::Soft, spec).unwrap().machine;
    for page in (0..2 * HUGE).map(RamPage) {
        machine
            .ram()
            .try_write(page, &page.0.to_le_bytes())
            .unwrap();
    }
    // Never touched, unless the host's policy made it huge beforehand.
    let untouched = machine.collapse(RamPage(3 * HUGE));
    assert_ne!(untouched, Collapsed::Refused);
    let collapsed = || machine.collapse(RamPage(HUGE));
    // Other cores may hold pages that were just written.
    if !(0..100).any(|_| collapsed() == Collapsed::Huge) {
        pageferry_testkit::skip("thp", "this host makes no huge pages of private memory");
        return;
    }
    assert!(machine.host_large_bytes().unwrap() >= 2 << 20);
    for page in (0..2 * HUGE).map(RamPage) {
        let mut bytes = [0; 8];
        machine.ram().try_read(page, &mut bytes).unwrap();
        assert_eq!(u64::from_le_bytes(bytes), page.0);
    }
}

/// The first and the last page of a range count, and those beside it do not.
#[test]
fn a_range_with_a_missing_page_is_not_collapsed() {
    for engine in [Engine::Soft, Engine::Kvm] {
        let machine = match create(engine, MachineSpec::new(1, 3 * HUGE * PAGE_SIZE)) {
            Err(why) if engine == Engine::Kvm => {
                pageferry_testkit::skip("kvm", why);
                continue;
            }
            new => new.unwrap().machine,
        };
        if machine.deliveries().is_empty() {
            pageferry_testkit::skip("uffd", "no delivery of faults on this host");
            continue;
        }
        let missing = Arc::new(PageBitmap::new(3 * HUGE as usize));
        let armed = machine.arm_userfault(Arc::clone(&missing), None.into());
        let _events = armed.unwrap();
        for page in [HUGE - 1, HUGE, HUGE + 63, HUGE + 64, 2 * HUGE - 1, 2 * HUGE] {
            missing.set(RamPage(page));
            let inside = (HUGE..2 * HUGE).contains(&page);
            let expected = if inside {
                Collapsed::Missing
            } else {
                // Nothing was ever written.
                Collapsed::Incomplete
            };
            assert_eq!(
                machine.collapse(RamPage(HUGE)),
                expected,
                "{engine:?} {page}"
            );
            missing.clear(RamPage(page));
        }
    }
}

#[test]
fn a_pool_that_is_too_small_is_found_before_a_guest_runs() {
    let Some(_pool) = HugePages::at_least(2) else {
        return;
    };
    // No host has this many.
    let spec = MachineSpec {
        backing: Backing::Hugetlb2M,
        ..MachineSpec::new(1, 15 << 40)
    };
    let refused = create(Engine::Soft, spec).err();
    let Some(MachineError::NoBacking(why)) = refused else {
        panic!("{refused:?}");
    };
    let needed = (15u64 << 40) / PageSize::Size2M.bytes();
    for part in [
        &format!("{needed} free huge pages are needed"),
        "hugepages-2048kB/nr_hugepages",
        "its pool has",
    ] {
        assert!(why.contains(part), "{why}");
    }
    assert!(!why.contains('\n'));
    // The kernel promises pages to the first of two. The second is refused, although none of the
    // first's memory was ever touched.
    let all = free();
    let first = ram(Backing::Hugetlb2M, all * HUGE).unwrap();
    let second = ram(Backing::Hugetlb2M, HUGE).err();
    assert!(
        matches!(second, Some(MachineError::NoBacking(_))),
        "{second:?}"
    );
    drop(first);
    assert_eq!(free(), all, "the first has given its pages back");
}

/// The free pages of the pool of 2 MiB pages that nobody was promised.
fn free() -> u64 {
    let number = |file: &str| -> u64 {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{file}");
        let text = std::fs::read_to_string(path).unwrap();
        text.trim().parse().unwrap()
    };
    number("free_hugepages") - number("resv_hugepages")
}

#[test]
fn a_pool_of_1_gib_pages_is_used_or_its_lack_is_said() {
    // No host has this many.
    let none = ram(Backing::Hugetlb1G, 15 << 28);
    let Err(MachineError::NoBacking(why)) = none else {
        panic!("{none:?}");
    };
    assert!(
        why.contains("hugetlb-1g") && why.contains("hugepages-1048576kB"),
        "{why}"
    );
    let Some(_pool) = HugePages::of_1_gib(1) else {
        return;
    };
    let ram = ram(Backing::Hugetlb1G, PageSize::Size1G.pages()).unwrap();
    ram.try_write(RamPage(77), &[3; PAGE_SIZE as usize])
        .unwrap();
    let hva = ram.guest_hva(RamPage(0)).0;
    assert!(hva.is_multiple_of(PageSize::Size1G.bytes()));
}

#[test]
fn memory_that_is_no_multiple_of_the_page_is_refused_by_both_engines() {
    for engine in [Engine::Soft, Engine::Kvm] {
        if engine == Engine::Kvm && pageferry_machine::kvm::probe_vm().is_err() {
            continue;
        }
        let spec = MachineSpec {
            backing: Backing::Hugetlb2M,
            ..MachineSpec::new(1, (2 << 20) + PAGE_SIZE)
        };
        let Err(MachineError::Layout(why)) = create(engine, spec) else {
            panic!("{engine} takes it");
        };
        assert_eq!(
            why.to_string(),
            "memory backed by hugetlb-2m must be a multiple of 2097152 bytes, not 2101248 bytes"
        );
    }
}
