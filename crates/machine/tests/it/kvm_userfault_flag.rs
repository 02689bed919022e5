//! `KVM_MEM_USERFAULT` on a kernel that has it, as the one of `cargo xtask lab kernel`: no guest
//! access maps a page whose bit is set, whenever the flag and the bit came, and nothing is lost.

use crate::kvm_large_pages::Stats;
use crate::raw::{EXIT_USERFAULT, Ended, RawVm, USERFAULT};
use crate::support::no_kvm;
use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY, KVM_MEMORY_EXIT_FLAG_PRIVATE};
use pageferry_addr::PAGE_SIZE;
use pageferry_testkit::{LIMIT, Random, Stop, skip};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Pages whose bits fill one page of a bitmap.
const PER_BITMAP_PAGE: u64 = 8 * PAGE_SIZE;

/// A VM whose data has `pages`; none where there is no KVM, or the kernel does not have the flag.
/// The capability's number differs from kernel to kernel, so this sets the flag and looks.
fn vm(pages: u64) -> Option<RawVm> {
    if no_kvm() {
        return None;
    }
    let mut scratch = RawVm::new(2, false).unwrap();
    scratch.slots.bitmap.set_bit(1, true);
    if let Err(why) = scratch.slots.set(USERFAULT) {
        let why = format!("this kernel refuses KVM_MEM_USERFAULT ({why})");
        skip("kvm-userfault", why);
        return None;
    }
    assert_eq!(scratch.guest.count(0..2), fault(1));
    Some(RawVm::new(pages, false).unwrap())
}

/// [`vm`] with private memory.
fn private_vm(pages: u64) -> Option<RawVm> {
    vm(pages)?;
    match RawVm::new(pages, true) {
        Ok(vm) => Some(vm),
        Err(why) => {
            skip("tdp", format!("no guest_memfd: {why}"));
            None
        }
    }
}

fn fault(page: u64) -> Ended {
    let flags = EXIT_USERFAULT;
    Ended::Fault { page, flags }
}

#[test]
fn only_pages_whose_bits_are_set_leave_the_guest() {
    let Some(mut vm) = vm(200) else { return };
    let set: Vec<u64> = (0..200)
        .filter(|page| page % 3 == 0 || *page > 190)
        .collect();
    set.iter()
        .for_each(|page| vm.slots.bitmap.set_bit(*page, true));
    vm.slots.set(USERFAULT).unwrap();
    let mut ended = vm.guest.count(0..200);
    for page in set {
        assert_eq!(ended, fault(page));
        // The bit is still set, so the guest gets no further.
        assert_eq!(vm.guest.resume(), fault(page));
        vm.slots.bitmap.set_bit(page, false);
        ended = vm.guest.resume();
    }
    assert_eq!(ended, Ended::Done(1));
    let counted = |page| vm.slots.data.word(page * PAGE_SIZE).load(Ordering::Acquire);
    assert!((0..200).all(|page| counted(page) == 1));
}

#[test]
fn a_late_flag_takes_mapped_pages_away() {
    let Some(mut vm) = vm(64) else { return };
    vm.slots.set(0).unwrap();
    for round in 0..3 {
        assert_eq!(vm.guest.count(0..64), Ended::Done(3 * round + 1));
        vm.slots.bitmap.set_bit(44, true);
        // Without the flag the bitmap says nothing.
        assert_eq!(vm.guest.count(44..45), Ended::Done(3 * round + 2));
        vm.slots.set(USERFAULT).unwrap();
        // KVM may map neighbours ahead of their faults, but not the page whose bit is set.
        assert_eq!(vm.guest.count(0..44), Ended::Done(3 * round + 2));
        assert_eq!(vm.guest.count(44..45), fault(44));
        // A page that is mapped stays, as only the flag takes mappings away.
        vm.slots.bitmap.set_bit(43, true);
        assert_eq!(vm.guest.count(43..44), Ended::Done(3 * round + 3));
        vm.slots.bitmap.set_bit(43, false);
        vm.slots.set(0).unwrap();
        assert_eq!(vm.guest.count(44..45), Ended::Done(3 * round + 3));
        // All pages get the same count again.
        assert_eq!(vm.guest.count(0..43), Ended::Done(3 * round + 3));
        assert_eq!(vm.guest.count(45..64), Ended::Done(3 * round + 2));
        assert_eq!(vm.guest.count(45..64), Ended::Done(3 * round + 3));
    }
}

#[test]
fn mappings_are_small_with_the_flag_and_large_after_it() {
    const LARGE: u64 = 512;
    let Some(mut vm) = vm(2 * LARGE) else { return };
    let Ok(stats) = Stats::of(vm.slots.vm.as_raw_fd()) else {
        skip("kvm-userfault", "this kernel has no statistics of KVM");
        return;
    };
    vm.slots.data.large();
    // A guest that reads first gets the huge zero page, which the host then splits.
    for first in [0, LARGE] {
        let word = vm.slots.data.word(first * PAGE_SIZE);
        word.store(0, Ordering::Relaxed);
    }
    vm.slots.set(0).unwrap();
    assert_eq!(vm.guest.count(0..2 * LARGE), Ended::Done(1));
    if stats.large() < 2 && skip("kvm-userfault", "KVM maps this memory by 4 KiB") {
        return;
    }
    for log in [0, KVM_MEM_LOG_DIRTY_PAGES] {
        vm.slots.set(USERFAULT).unwrap();
        assert_eq!(stats.large(), 0, "the flag takes large mappings away");
        assert!(matches!(vm.guest.count(0..2 * LARGE), Ended::Done(_)));
        assert_eq!(stats.large(), 0, "a large mapping includes other pages");
        // The end of the log must not bring large mappings while the flag is on.
        vm.slots.set(USERFAULT | KVM_MEM_LOG_DIRTY_PAGES).unwrap();
        vm.slots.set(USERFAULT | log).unwrap();
        assert!(matches!(vm.guest.count(0..2 * LARGE), Ended::Done(_)));
        assert_eq!(stats.large(), 0);
        // Nor may the end of the flag while the log is on.
        let small = stats.small();
        vm.slots.set(log).unwrap();
        assert_eq!(stats.small() < small, log == 0, "a log keeps small ones");
        assert!(matches!(vm.guest.count(0..2 * LARGE), Ended::Done(_)));
        assert_eq!(stats.large(), if log == 0 { 2 } else { 0 });
        vm.slots.set(0).unwrap();
        assert!(matches!(vm.guest.count(0..2 * LARGE), Ended::Done(_)));
        assert_eq!(stats.large(), 2, "large mappings are recovered");
    }
}

#[test]
fn wrong_bitmaps_and_wrong_calls_are_refused() {
    let Some(vm) = vm(64) else { return };
    let with = |address: u64, flags| {
        let mut region = vm.slots.region(flags);
        region.pad2[0] = address;
        vm.slots.set_region(region)
    };
    let here = vm.slots.bitmap.address();
    for wrong in [here + 1, here + 4, 1 << 63, u64::MAX - 7] {
        assert_eq!(with(wrong, USERFAULT), Err(Errno::INVAL), "{wrong:#x}");
        // Without the flag the field is padding.
        assert_eq!(with(wrong, 0), Ok(()));
    }
    assert_eq!(vm.slots.set_v1(USERFAULT), Err(Errno::INVAL));
    assert_eq!(with(here, USERFAULT), Ok(()));
    // Pages that are mapped would not be tested against another bitmap.
    assert_eq!(with(here + 8, USERFAULT), Err(Errno::INVAL));
    let logged = USERFAULT | KVM_MEM_LOG_DIRTY_PAGES;
    assert_eq!(with(here + 8, logged), Err(Errno::INVAL));
    assert_eq!(with(here, logged), Ok(()));
    assert_eq!(with(here + 8, KVM_MEM_LOG_DIRTY_PAGES), Ok(()));
    assert_eq!(with(here + 8, USERFAULT), Ok(()));
}

#[test]
fn a_bitmap_that_cannot_be_read_ends_the_run_and_can_be_mended() {
    let Some(mut vm) = vm(PER_BITMAP_PAGE + 64) else {
        return;
    };
    vm.slots.set(USERFAULT).unwrap();
    let last = PER_BITMAP_PAGE;
    // First none of it is there, then it is too short, then it is whole.
    vm.slots.bitmap.protect(0..2 * PAGE_SIZE, false);
    assert_eq!(vm.guest.count(0..1), Ended::Failed(Errno::FAULT));
    assert_eq!(vm.guest.resume(), Ended::Failed(Errno::FAULT));
    vm.slots.bitmap.protect(0..PAGE_SIZE, true);
    assert_eq!(vm.guest.resume(), Ended::Done(1));
    assert_eq!(
        vm.guest.count(last - 1..last + 1),
        Ended::Failed(Errno::FAULT)
    );
    vm.slots.bitmap.protect(PAGE_SIZE..2 * PAGE_SIZE, true);
    vm.slots.bitmap.set_bit(last, true);
    assert_eq!(vm.guest.resume(), fault(last));
    vm.slots.bitmap.set_bit(last, false);
    assert_eq!(vm.guest.resume(), Ended::Done(1));
}

/// [`vm`] on a KVM that maps pages without a fault of the guest.
fn vm_with_pre_fault(pages: u64) -> Option<RawVm> {
    let mut scratch = vm(pages)?;
    scratch.slots.set(0).unwrap();
    if scratch.guest.pre_fault(0) == Err(Errno::OPNOTSUPP) {
        skip("tdp", "KVM uses shadow paging");
        return None;
    }
    vm(pages)
}

#[test]
fn a_prefault_maps_no_page_whose_bit_is_set() {
    let Some(mut vm) = vm_with_pre_fault(8) else {
        return;
    };
    vm.slots.bitmap.set_bit(5, true);
    vm.slots.set(USERFAULT).unwrap();
    assert_eq!(vm.guest.pre_fault(4), Ok(()));
    assert_eq!(vm.guest.pre_fault(5), Err(Errno::FAULT));
    assert_eq!(vm.guest.count(4..6), fault(5));
    vm.slots.bitmap.protect(0..PAGE_SIZE, false);
    assert_eq!(vm.guest.pre_fault(4), Err(Errno::FAULT));
}

#[test]
fn a_read_only_slot_has_the_flag_too() {
    let Some(mut vm) = vm_with_pre_fault(8) else {
        return;
    };
    vm.slots.bitmap.set_bit(3, true);
    vm.slots.set(KVM_MEM_READONLY).unwrap();
    assert_eq!(vm.guest.pre_fault(3), Ok(()));
    let Ok(stats) = Stats::of(vm.slots.vm.as_raw_fd()) else {
        skip("kvm-userfault", "this kernel has no statistics of KVM");
        return;
    };
    assert_eq!(stats.small(), 1);
    vm.slots.set(KVM_MEM_READONLY | USERFAULT).unwrap();
    assert_eq!(stats.small(), 0);
    assert_eq!(vm.guest.pre_fault(3), Err(Errno::FAULT));
    vm.slots.set(KVM_MEM_READONLY).unwrap();
    assert_eq!(vm.guest.pre_fault(3), Ok(()));
}

/// A thread fills the pages in a random order and clears their bits. Meanwhile the guest counts on
/// all of them, and faults.
fn clear_against_fault(log: u32) {
    const PAGES: u64 = 300;
    const FILLED: u32 = 0x1000;
    let Some(RawVm { slots, mut guest }) = vm(PAGES) else {
        return;
    };
    let word = |page| slots.data.word(page * PAGE_SIZE);
    for round in 0..10 {
        for page in 0..PAGES {
            word(page).store(0, Ordering::Relaxed);
            slots.bitmap.set_bit(page, true);
        }
        slots.set(USERFAULT | log).unwrap();
        let mut order: Vec<u64> = (0..PAGES).collect();
        let mut random = Random::new(round);
        for at in 1..PAGES {
            order.swap(at as usize, random.below(at + 1) as usize);
        }
        std::thread::scope(|scope| {
            let (slots, word) = (&slots, &word);
            scope.spawn(move || {
                for page in order {
                    word(page).store(FILLED, Ordering::Relaxed);
                    slots.bitmap.set_bit(page, false);
                    std::thread::yield_now();
                }
            });
            let mut ended = guest.count(0..PAGES);
            let start = Instant::now();
            while let Ended::Fault { .. } = ended {
                assert!(start.elapsed() < LIMIT, "{ended:?}");
                std::thread::yield_now();
                ended = guest.resume();
            }
            assert_eq!(ended, Ended::Done(FILLED + 1));
        });
        for page in 0..PAGES {
            let counted = word(page).load(Ordering::Acquire);
            assert_eq!(counted, FILLED + 1, "page {page} was mapped too early");
        }
        if log != 0 {
            assert_eq!(slots.dirty(), (0..PAGES).collect::<Vec<_>>());
        }
        slots.set(log).unwrap();
    }
}

#[test]
fn a_fault_that_races_with_the_clearing_of_its_bit_finds_the_bytes() {
    clear_against_fault(0);
}

#[test]
fn a_dirty_log_has_every_page_that_arrived() {
    clear_against_fault(KVM_MEM_LOG_DIRTY_PAGES);
}

/// Sets and clears the flag while the guest counts. No bit is set, so no run may end early.
fn toggle_beside(vm: RawVm, flags: &[u32]) {
    const PAGES: u64 = 300;
    let RawVm { slots, mut guest } = vm;
    let stop = Stop::new();
    let mut counted = 0;
    std::thread::scope(|scope| {
        let (stop, slots) = (&stop, &slots);
        scope.spawn(move || {
            let _stop = stop.on_drop();
            for flags in flags.iter().cycle().take(100) {
                slots.set(*flags).unwrap();
                std::thread::sleep(Duration::from_micros(300));
            }
        });
        while counted == 0 || !stop.is_stopped() {
            counted += 1;
            assert_eq!(guest.count(0..PAGES), Ended::Done(counted));
        }
    });
}

#[test]
fn the_flag_is_toggled_beside_a_running_guest() {
    let Some(vm) = vm(300) else { return };
    vm.slots.set(0).unwrap();
    let log = KVM_MEM_LOG_DIRTY_PAGES;
    toggle_beside(vm, &[USERFAULT | log, log, USERFAULT, 0]);
}

#[test]
fn the_flag_is_toggled_on_guest_memfd_beside_a_running_guest() {
    let Some(vm) = private_vm(300) else { return };
    vm.slots.set(0).unwrap();
    toggle_beside(vm, &[USERFAULT, 0]);
}

#[test]
fn guest_memfd_gets_the_flag_late_and_keeps_its_bytes() {
    let Some(RawVm { slots, mut guest }) = private_vm(64) else {
        return;
    };
    slots.set(0).unwrap();
    assert_eq!(guest.count(0..64), Ended::Done(1));
    slots.bitmap.set_bit(7, true);
    slots.set(USERFAULT).unwrap();
    let flags = EXIT_USERFAULT | u64::from(KVM_MEMORY_EXIT_FLAG_PRIVATE);
    assert_eq!(guest.count(6..8), Ended::Fault { page: 7, flags });
    slots.bitmap.set_bit(7, false);
    assert_eq!(guest.resume(), Ended::Done(2));
    slots.bitmap.set_bit(8, true);
    slots.set(0).unwrap();
    assert_eq!(guest.count(8..9), Ended::Done(2));
    // The file still knows who maps it.
    let private = slots.private.as_ref().unwrap();
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(private, hole, 8 * PAGE_SIZE, PAGE_SIZE).unwrap();
    assert_eq!(guest.count(8..9), Ended::Done(1));
    slots.delete().unwrap();
    slots.set(USERFAULT).unwrap();
    assert_eq!(guest.count(9..10), Ended::Done(2));
}

#[test]
fn guest_memfd_can_change_nothing_but_the_flag() {
    let Some(RawVm { slots, .. }) = private_vm(64) else {
        return;
    };
    let other = slots.guest_memfd().unwrap();
    for (now, then) in [(0, USERFAULT), (USERFAULT, 0)] {
        slots.set(now).unwrap();
        let mut regions = [slots.region(then); 6];
        regions[0].flags = slots.region(now).flags;
        regions[1].flags |= KVM_MEM_LOG_DIRTY_PAGES;
        regions[2].guest_memfd = other.as_raw_fd() as u32;
        regions[3].guest_memfd = u32::MAX;
        regions[4].guest_memfd_offset = PAGE_SIZE;
        regions[5].guest_phys_addr += PAGE_SIZE;
        for region in regions {
            assert_eq!(slots.set_region(region), Err(Errno::INVAL), "{region:?}");
        }
    }
}
