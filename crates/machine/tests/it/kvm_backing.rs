//! Guest memory of huge pages on KVM: it is mapped whole, once all of it is there.

use crate::kvm_userfault::{CHECK, armed, bytes_of, no_delivery};
use crate::place::placing;
use crate::support::{DATA, drive_beside, machine_on, no_kvm, run, rung, start, word};
use pageferry_addr::{PAGE_SIZE, PageSize, RamPage};
use pageferry_machine::{
    AccessError, Backing, Collapsed, Delivery, GuestRam, MachineError, NewMachine,
};
use pageferry_testkit::{HugePages, Random, Stop};
use pageferry_userfault::PageBitmap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const HUGE: u64 = PageSize::Size2M.pages();

/// Whether the guest's mapping has this page.
fn is_mapped(ram: &GuestRam, page: u64) -> bool {
    const PRESENT: u64 = 1 << 63;
    let mut entry = [0; 8];
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let offset = ram.guest_hva(RamPage(page)).0 / PAGE_SIZE * 8;
    pagemap.read_exact_at(&mut entry, offset).unwrap();
    u64::from_ne_bytes(entry) & PRESENT != 0
}

/// A machine of `larges` pages of 2 MiB, or `None` where this test cannot run.
fn hugetlb(vcpus: u32, larges: u64) -> Option<(HugePages, NewMachine)> {
    if no_kvm() {
        return None;
    }
    let pool = HugePages::at_least(larges)?;
    let new = machine_on(Backing::Hugetlb2M, vcpus, larges * HUGE);
    (!no_delivery(new.machine.as_ref(), Delivery::Minor)).then_some((pool, new))
}

#[test]
fn a_huge_page_is_mapped_with_its_last_piece() {
    let Some((_pool, new)) = hugetlb(1, 3) else {
        return;
    };
    let machine = new.machine.as_ref();
    let ram = machine.ram();
    let (missing, _events) = armed(machine, Delivery::Minor);
    // Of the second huge page every other piece is missing. The third is there, and all zero.
    (HUGE..2 * HUGE).step_by(2).for_each(|page| {
        missing.set(RamPage(page));
    });
    machine.begin_postcopy().unwrap();
    machine.install(RamPage(HUGE + 1), 1).unwrap();
    assert!(!is_mapped(ram, HUGE), "a piece alone maps nothing");
    let last = 2 * HUGE - 2;
    for page in (HUGE..last).step_by(2).map(RamPage) {
        machine.install(page, 1).unwrap();
        assert!(!is_mapped(ram, HUGE), "{page:?}");
        missing.clear(page);
    }
    machine.install(RamPage(last), 1).unwrap();
    assert!(is_mapped(ram, HUGE) && is_mapped(ram, 2 * HUGE - 1));
    missing.clear(RamPage(last));
    assert!(!is_mapped(ram, 2 * HUGE));
    machine.install(RamPage(3 * HUGE - 1), 1).unwrap();
    assert!(is_mapped(ram, 2 * HUGE));
    // Again, and over the border of two.
    machine.install(RamPage(HUGE), 2 * HUGE).unwrap();
    machine.disarm_userfault().unwrap();
}

#[test]
fn a_page_of_1_gib_is_mapped_with_its_last_piece() {
    let all = PageSize::Size1G.pages();
    if no_kvm() {
        return;
    }
    let Some(_pool) = HugePages::of_1_gib(1) else {
        return;
    };
    let mut new = machine_on(Backing::Hugetlb1G, 1, all);
    let machine = Arc::clone(&new.machine);
    if no_delivery(machine.as_ref(), Delivery::Minor) {
        return;
    }
    let (missing, _events) = armed(machine.as_ref(), Delivery::Minor);
    let ram = machine.ram();
    let last = RamPage(all - 1);
    for page in [RamPage(all / 2), last] {
        placing(ram).write(page, &[0x5a; PAGE_SIZE as usize]);
        missing.set(page);
    }
    machine.begin_postcopy().unwrap();
    machine.install(RamPage(0), all / 2).unwrap();
    for page in [RamPage(all / 2), last] {
        assert!(!is_mapped(ram, 0), "a piece is missing");
        placing(ram).write(page, &bytes_of(page));
        machine.install(page, 1).unwrap();
        missing.clear(page);
    }
    assert!(is_mapped(ram, 0) && is_mapped(ram, last.0));
    machine.disarm_userfault().unwrap();
    let range = [last.byte_offset(), all * PAGE_SIZE];
    start(ram, new.vcpus[0].as_mut(), 0, &CHECK, range);
    assert_eq!(rung(run(new.vcpus[0].as_mut())), 1);
}

#[test]
fn only_minor_faults_serve_huge_pages_of_a_pool() {
    let Some((_pool, new)) = hugetlb(1, 2) else {
        return;
    };
    let machine = new.machine.as_ref();
    assert_eq!(machine.deliveries(), [Delivery::Minor]);
    let missing = Arc::new(PageBitmap::new(2 * HUGE as usize));
    for other in [Delivery::Poison, Delivery::Missing, Delivery::Userfault] {
        let refused = machine.arm_userfault(Arc::clone(&missing), other.into());
        assert!(
            matches!(refused, Err(MachineError::NoDelivery(refused)) if refused == other),
            "{other}"
        );
    }
    machine.arm_userfault(missing, None.into()).unwrap();
    assert_eq!(machine.delivery().unwrap().delivery, Delivery::Minor);
}

/// An armed machine of private memory, with a page that was written and others that were not.
fn private() -> Option<NewMachine> {
    if no_kvm() {
        return None;
    }
    let new = machine_on(Backing::Anonymous, 1, HUGE);
    let ram = new.machine.ram();
    ram.try_write(DATA, &bytes_of(DATA)).unwrap();
    (!no_delivery(new.machine.as_ref(), Delivery::Missing)).then_some(new)
}

#[test]
fn only_missing_faults_serve_private_memory() {
    let Some(new) = private() else {
        return;
    };
    let machine = new.machine.as_ref();
    assert_eq!(machine.deliveries(), [Delivery::Missing]);
    let missing = Arc::new(PageBitmap::new(HUGE as usize));
    for other in [Delivery::Poison, Delivery::Minor, Delivery::Userfault] {
        let refused = machine.arm_userfault(Arc::clone(&missing), other.into());
        assert!(
            matches!(refused, Err(MachineError::NoDelivery(refused)) if refused == other),
            "{other}"
        );
    }
    machine.arm_userfault(missing, None.into()).unwrap();
    let in_use = machine.delivery().unwrap();
    assert_eq!(in_use.delivery, Delivery::Missing);
    assert_eq!(in_use.because, "it is the only one for private memory");
}

#[test]
fn private_memory_keeps_its_bytes_when_delivery_ends_before_post_copy() {
    for abandon in [false, true] {
        let Some(new) = private() else {
            return;
        };
        let (_missing, _events) = armed(new.machine.as_ref(), Delivery::Missing);
        if abandon {
            new.machine.abandon();
        }
        new.machine.disarm_userfault().unwrap();
        let mut bytes = [0; PAGE_SIZE as usize];
        new.machine.ram().try_read(DATA, &mut bytes).unwrap();
        assert_eq!(bytes, bytes_of(DATA));
    }
}

/// Nobody reads events here: an access that slept would never return.
#[test]
fn the_vmms_accesses_to_private_memory_do_not_sleep_on_holes() {
    let Some(new) = private() else {
        return;
    };
    let machine = Arc::clone(&new.machine);
    let (missing, _events) = armed(machine.as_ref(), Delivery::Missing);
    let page = |n| RamPage(DATA.0 + n);
    placing(machine.ram()).write(page(1), &[0x5a; PAGE_SIZE as usize]);
    missing.set(page(1));
    machine.begin_postcopy().unwrap();
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let ram = machine.ram();
        let mut bytes = [1; PAGE_SIZE as usize];
        let missed = ram.try_read(page(1), &mut bytes);
        assert_eq!(missed, Err(AccessError::Missing(page(1))));
        ram.try_read(DATA, &mut bytes).unwrap();
        assert_eq!(bytes, bytes_of(DATA));
        // Holes: read, written, and both in one access.
        ram.try_read(page(2), &mut bytes).unwrap();
        assert_eq!(bytes, [0; PAGE_SIZE as usize]);
        ram.try_write(page(4), b"here").unwrap();
        let mut three = [1; 3 * PAGE_SIZE as usize];
        ram.try_read(page(3), &mut three).unwrap();
        assert!(three[4096..].starts_with(b"here\0") && three[..4096] == [0; 4096]);
        machine.install_copy(page(1), &bytes_of(page(1))).unwrap();
        missing.clear(page(1));
        machine.disarm_userfault().unwrap();
        ram.try_read(page(1), &mut bytes).unwrap();
        assert_eq!(bytes, bytes_of(page(1)));
        done.send(()).unwrap();
    });
    is_done
        .recv_timeout(pageferry_testkit::LIMIT)
        .expect("no access sleeps or fails");
}

/// Two vCPUs check all pages while two threads bring the pieces. The threads take the last two
/// pieces of each huge page at the same time.
#[test]
fn pieces_from_two_threads_bring_every_huge_page() {
    const LARGES: u64 = 12;
    let Some((_pool, mut new)) = hugetlb(2, LARGES) else {
        return;
    };
    let machine = Arc::clone(&new.machine);
    let ram = Arc::clone(machine.ram());
    let (missing, mut events) = armed(machine.as_ref(), Delivery::Minor);
    for (index, vcpu) in new.vcpus.iter_mut().enumerate() {
        let range = [HUGE * PAGE_SIZE, LARGES * HUGE * PAGE_SIZE];
        start(&ram, vcpu.as_mut(), index as u64, &CHECK, range);
    }
    let mut random = Random::new(6);
    for page in (DATA.0..LARGES * HUGE).map(RamPage) {
        if page.0 >= HUGE && random.below(4) > 0 {
            placing(&ram).write(page, &[0x5a; PAGE_SIZE as usize]);
            missing.set(page);
        } else {
            placing(&ram).write(page, &bytes_of(page));
        }
    }
    machine.begin_postcopy().unwrap();
    let bring = |page: RamPage| {
        placing(&ram).write(page, &bytes_of(page));
        machine.install(page, 1).unwrap();
        missing.clear(page);
    };
    let stop = Stop::new();
    let turn = [AtomicU64::new(0), AtomicU64::new(0)];
    std::thread::scope(|scope| {
        let _stop = stop.on_drop();
        let (bring, stop, missing, machine, turn) = (&bring, &stop, &missing, &machine, &turn);
        scope.spawn(move || {
            while !stop.is_stopped() {
                let Some(event) = events.next().unwrap() else {
                    std::thread::yield_now();
                    continue;
                };
                let first = RamPage(event.page.0 - event.page.0 % HUGE);
                if missing
                    .next_set(first.index())
                    .is_none_or(|at| at as u64 >= first.0 + HUGE)
                {
                    machine.install(first, HUGE).unwrap();
                }
            }
        });
        for id in 0..2 {
            scope.spawn(move || {
                for large in 1..LARGES {
                    // Both begin a huge page together.
                    turn[id].store(large, Ordering::SeqCst);
                    while turn[1 - id].load(Ordering::SeqCst) < large && !stop.is_stopped() {
                        std::hint::spin_loop();
                    }
                    for page in (large * HUGE + id as u64..(large + 1) * HUGE).step_by(2) {
                        if missing.test(RamPage(page)) {
                            bring(RamPage(page));
                        }
                    }
                }
            });
        }
        drive_beside(
            &mut new.vcpus,
            |vcpu| loop {
                match run(vcpu) {
                    pageferry_machine::Exit::MemoryFault { page, .. } => {
                        machine.install(page, 1).unwrap();
                    }
                    pageferry_machine::Exit::Kicked => {}
                    exit => break assert_eq!(rung(exit), 1),
                }
            },
            || {
                pageferry_testkit::wait_until("all pieces", || missing.next_set(0).is_none());
                pageferry_testkit::wait_until("both vCPUs", || {
                    let last = RamPage(LARGES * HUGE - 1);
                    word(&ram, last, 1) == last.byte_offset()
                });
            },
        );
        stop.stop();
    });
    machine.disarm_userfault().unwrap();
}

/// A machine whose 2 MiB ranges behind the first are written and mapped page by page.
#[test]
fn a_complete_range_comes_back_as_a_huge_page_of_the_host_and_of_kvm() {
    const RANGES: u64 = 4;
    if no_kvm() {
        return;
    }
    let mut new = machine_on(Backing::Shmem, 1, (1 + RANGES) * HUGE);
    let machine = Arc::clone(&new.machine);
    let ram = Arc::clone(machine.ram());
    if no_delivery(machine.as_ref(), Delivery::Minor) {
        return;
    }
    let (missing, _events) = armed(machine.as_ref(), Delivery::Minor);
    for page in (HUGE..(1 + RANGES) * HUGE).map(RamPage) {
        placing(&ram).write(page, &bytes_of(page));
    }
    let incomplete = RamPage(2 * HUGE);
    missing.set(RamPage(incomplete.0 + 9));
    machine.begin_postcopy().unwrap();
    machine.install(RamPage(HUGE), HUGE).unwrap();
    machine.install(RamPage(3 * HUGE), 2 * HUGE).unwrap();
    assert_eq!(machine.host_large_bytes().unwrap(), 0);
    assert_eq!(machine.collapse(incomplete), Collapsed::Missing);
    // Pages that were never written take no memory.
    assert_eq!(machine.collapse(RamPage(0)), Collapsed::Incomplete);
    missing.clear(RamPage(incomplete.0 + 9));
    machine.disarm_userfault().unwrap();
    for range in (1..=RANGES).map(|range| RamPage(range * HUGE)) {
        let mut last = Collapsed::Refused;
        // Other cores may hold pages that were just written.
        for _ in 0..100 {
            last = machine.collapse(range);
            if last == Collapsed::Huge {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        if last == Collapsed::Refused {
            pageferry_testkit::skip("thp", "this host makes no huge pages of shared memory");
            return;
        }
        assert_eq!(last, Collapsed::Huge, "{range:?}");
    }
    assert_eq!(
        machine.host_large_bytes().unwrap(),
        RANGES * HUGE * PAGE_SIZE
    );
    // The guest finds its bytes, and KVM maps them by large pages.
    let vcpu = new.vcpus[0].as_mut();
    let range = [HUGE * PAGE_SIZE, (1 + RANGES) * HUGE * PAGE_SIZE];
    start(&ram, vcpu, 0, &CHECK, range);
    assert_eq!(rung(run(vcpu)), 1);
    let by_kvm = machine.engine_large_bytes();
    println!("KVM maps {by_kvm:?} bytes by large pages");
    if let Some(by_kvm) = by_kvm {
        assert!(by_kvm >= RANGES * HUGE * PAGE_SIZE);
    }
}
