//! The calls of dirty logs and dirty rings: their exact contents, and their errors.

use crate::support::fleet::{LARGE, LargeRam, dirty_log, named, set};
use crate::support::vm::{HostRam, PAGE, asm::*};
use pageferry_addr::{Gpa, Hva};
use pageferry_hypervisor::{
    DirtyBy, DirtyPage, DirtyProtect, Exit, Harvester, LrSc, Region, SlotFlags, VcpuCore, Vm,
    VmConfig, VmError,
};
use std::sync::Arc;

const MEMORY: u64 = 0x4000_0000;
const BOTH: [DirtyBy; 2] = [DirtyBy::WriteProtection, DirtyBy::Bits];

/// One vCPU, and a program in slot 0 that loads from, or stores to, one page after another.
struct One {
    vm: Vm,
    vcpu: VcpuCore,
    ram: Arc<HostRam>,
    pages: u64,
}

impl One {
    /// Makes slot 1 with `pages` pages, without a log.
    fn new(config: VmConfig, pages: u64) -> Self {
        let ram = HostRam::new(pages as usize);
        let (vm, vcpu) = vm_and_vcpu(config);
        vm.set_user_memory_region2(ram.region(1, MEMORY, 0, pages))
            .unwrap();
        Self {
            vm,
            vcpu,
            ram,
            pages,
        }
    }

    fn logging(config: VmConfig, pages: u64) -> Self {
        let one = Self::new(config, pages);
        one.log(true);
        one
    }

    fn log(&self, on: bool) {
        let mut region = self.ram.region(1, MEMORY, 0, self.pages);
        if on {
            region.flags = SlotFlags::LOG_DIRTY_PAGES;
        }
        self.vm.set_user_memory_region2(region).unwrap();
    }

    fn store(&mut self, pages: impl IntoIterator<Item = u64>) {
        for page in pages {
            assert_eq!(store(&mut self.vcpu, MEMORY + page * PAGE), Exit::Halted);
        }
    }

    fn load(&mut self, pages: impl IntoIterator<Item = u64>) {
        for page in pages {
            set(&mut self.vcpu, LOAD, &[(A1, MEMORY + page * PAGE)]);
            assert_eq!(self.vcpu.run(), Exit::Halted);
        }
    }

    /// The pages in a fetched log.
    fn fetch(&self) -> Vec<u64> {
        named(&dirty_log(&self.vm, 1, self.pages)).collect()
    }

    fn clear(&self, first: u64, words: &[u64]) -> u64 {
        self.vm.clear_dirty_log(1, first, words).unwrap()
    }
}

const STORE: u64 = 0;
const LOAD: u64 = 16;

fn vm_and_vcpu(config: VmConfig) -> (Vm, VcpuCore) {
    let code = HostRam::new(1);
    code.code(STORE, &[addi(A0, A0, 1), sd(A0, A1, 0), WFI]);
    code.code(LOAD, &[ld(A2, A1, 0), WFI]);
    let vm = Vm::new(config);
    vm.set_user_memory_region2(code.region(0, 0, 0, 1)).unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    (vm, vcpu)
}

fn store(vcpu: &mut VcpuCore, gpa: u64) -> Exit {
    set(vcpu, STORE, &[(A1, gpa)]);
    vcpu.run()
}

fn config(dirty_by: DirtyBy, dirty_protect: DirtyProtect) -> VmConfig {
    VmConfig {
        dirty_by,
        dirty_protect,
        ..VmConfig::default()
    }
}

#[test]
fn a_vm_says_how_it_was_made() {
    let default = VmConfig::default();
    assert_eq!(Vm::new(default).config(), default);
    assert_eq!(default.dirty_protect, DirtyProtect::ByGet);
    assert_eq!(
        (default.dirty_by, default.dirty_ring),
        (DirtyBy::WriteProtection, None)
    );
    let other = VmConfig {
        max_vcpus: 3,
        max_slots: 5,
        dirty_by: DirtyBy::Bits,
        dirty_protect: DirtyProtect::InitiallySet,
        dirty_ring: Some(256),
        lr_sc: LrSc::ByValue,
    };
    let vm = Vm::new(other);
    assert_eq!(vm.clone().config(), other);
    let capabilities = vm.capabilities();
    assert_eq!((capabilities.max_vcpus, capabilities.max_slots), (3, 5));
}

#[test]
fn what_is_cleared_by_hand_is_what_is_protected() {
    for by in BOTH {
        let mut one = One::logging(config(by, DirtyProtect::ByClear), 200);
        one.store([1, 63, 64, 130, 199]);
        one.load([2, 65]);
        // A fetch clears nothing.
        for _ in 0..2 {
            assert_eq!(one.fetch(), [1, 63, 64, 130, 199], "{by:?}");
        }
        // The result counts the given bits that are in the log. The other pages do not change.
        assert_eq!(one.clear(64, &[0b11, u64::MAX]), 2, "{by:?}");
        assert_eq!(one.fetch(), [1, 63, 199], "{by:?}");
        // The second of these pages gets protected. The first does not, and stays in the log.
        one.store([1, 64]);
        assert_eq!(one.fetch(), [1, 63, 64, 199], "{by:?}");
        // The last word of the log has 8 pages.
        assert_eq!(one.clear(192, &[u64::MAX]), 1, "{by:?}");
        assert_eq!(one.clear(0, &[u64::MAX; 4]), 3, "{by:?}");
        assert_eq!(one.clear(0, &[u64::MAX; 4]), 0, "{by:?}");
        assert_eq!(one.fetch(), [0; 0], "{by:?}");
        one.load([1, 63]);
        assert_eq!(one.fetch(), [0; 0], "{by:?}: loads");
        one.store([63, 198]);
        assert_eq!(one.fetch(), [63, 198], "{by:?}");
        if by == DirtyBy::WriteProtection {
            // One more is the page of the code.
            assert_eq!(one.vm.writable_pages(), 2 + 1);
        }
    }
}

#[test]
fn a_page_that_was_stored_to_between_fetch_and_clear_is_named_once() {
    for by in BOTH {
        let mut one = One::logging(config(by, DirtyProtect::ByClear), 64);
        one.store([5]);
        assert_eq!(one.fetch(), [5]);
        one.store([5]);
        // A copy of the page after this call has both stores.
        assert_eq!(one.clear(0, &[1 << 5]), 1);
        assert_eq!(one.fetch(), [0; 0], "{by:?}");
        one.store([5]);
        assert_eq!(one.fetch(), [5], "{by:?}");
    }
}

#[test]
fn a_clear_without_a_fetch_protects_all_the_same() {
    for by in BOTH {
        let mut one = One::new(config(by, DirtyProtect::InitiallySet), 130);
        one.store(0..130);
        one.log(true);
        assert_eq!(one.clear(0, &[u64::MAX, 0, u64::MAX]), 66, "{by:?}");
        let middle: Vec<_> = (64..128).collect();
        assert_eq!(one.fetch(), middle, "{by:?}");
        one.store([0, 64, 129]);
        let mut all = middle.clone();
        all.insert(0, 0);
        all.push(129);
        assert_eq!(one.fetch(), all, "{by:?}");
    }
}

#[test]
fn a_log_can_begin_with_all_pages_and_protect_none() {
    for by in BOTH {
        let mut one = One::new(config(by, DirtyProtect::InitiallySet), 100);
        one.store(0..50);
        let writable = one.vm.writable_pages();
        one.log(true);
        assert_eq!(
            one.vm.writable_pages(),
            writable,
            "{by:?}: no page is protected"
        );
        let all: Vec<_> = (0..100).collect();
        assert_eq!(one.fetch(), all, "{by:?}");
        one.store([7, 60]);
        assert_eq!(one.clear(0, &[u64::MAX, u64::MAX]), 100, "{by:?}");
        assert_eq!(one.fetch(), [0; 0], "{by:?}");
        one.store([7, 60]);
        assert_eq!(one.fetch(), [7, 60], "{by:?}");
        // A second log begins in the same way.
        one.log(false);
        one.log(true);
        assert_eq!(one.fetch(), all, "{by:?}");
    }
}

#[test]
fn parts_that_are_none_of_the_log_are_not_cleared() {
    for by in BOTH {
        let mut one = One::logging(config(by, DirtyProtect::ByClear), 200);
        one.store([0, 64, 199]);
        let part = |first, words| VmError::DirtyLogPart {
            slot: 1,
            first,
            words,
            log: 4,
        };
        let ones = [u64::MAX; 5];
        for (first, words) in [
            (1, 1),
            (63, 1),
            (32, 0),
            (0, 5),
            (192, 2),
            (256, 1),
            (320, 0),
            (1 << 40, 1),
            (u64::MAX - 63, 1),
            (u64::MAX, 1),
        ] {
            let refused = one.vm.clear_dirty_log(1, first, &ones[..words]);
            assert_eq!(refused, Err(part(first, words)));
        }
        let message = part(1, 2).to_string();
        assert!(
            message.contains("slot 1") && message.contains("4 words"),
            "{message}"
        );
        // An empty part is valid, also at the end.
        for first in [0, 64, 256] {
            assert_eq!(one.clear(first, &[]), 0);
        }
        assert_eq!(
            one.vm.clear_dirty_log(0, 0, &[1]),
            Err(VmError::NoDirtyLog(0))
        );
        assert_eq!(
            one.vm.clear_dirty_log(2, 0, &[1]),
            Err(VmError::NoSuchSlot(2))
        );
        assert_eq!(one.fetch(), [0, 64, 199], "{by:?}: nothing has changed");
    }
}

/// `clear_dirty_log` also works if fetching clears the log. KVM refuses that only by its check of
/// the capability.
#[test]
fn a_log_that_fetching_clears_can_be_cleared_by_hand_too() {
    for by in BOTH {
        let mut one = One::logging(config(by, DirtyProtect::ByGet), 64);
        one.store([3, 4]);
        // Reading the log moves the dirty bits of entries to it.
        let mut log = [0];
        assert_eq!(one.vm.read_dirty_log(1, &mut log).unwrap(), 2);
        assert_eq!(one.clear(0, &[1 << 3]), 1);
        assert_eq!(one.fetch(), [4], "{by:?}");
        one.store([3]);
        assert_eq!(one.fetch(), [3], "{by:?}");
    }
}

#[test]
fn a_visit_finds_the_words_that_are_not_zero_and_leaves_them() {
    for by in BOTH {
        let mut one = One::logging(config(by, DirtyProtect::ByGet), 200);
        one.store([3, 4, 130, 199]);
        let mut found = Vec::new();
        let visited = one
            .vm
            .visit_dirty_log(1, |word, bits| found.push((word, bits)));
        assert_eq!(visited, Ok(()));
        assert_eq!(found, [(0, 0b11 << 3), (2, 1 << 2), (3, 1 << 7)], "{by:?}");
        assert_eq!(one.fetch(), [3, 4, 130, 199], "{by:?}");
        let visited = one.vm.visit_dirty_log(2, |_, _| ());
        assert_eq!(visited, Err(VmError::NoSuchSlot(2)));
    }
}

#[test]
fn what_a_notifier_unmaps_stays_in_the_log() {
    for by in BOTH {
        let mut one = One::logging(config(by, DirtyProtect::ByGet), 64);
        one.store([3, 4]);
        one.load([9]);
        let all = one.ram.hva()..Hva(one.ram.hva().0 + 64 * PAGE);
        assert_eq!(one.vm.invalidate_hva(all), 3);
        assert_eq!(one.fetch(), [3, 4], "{by:?}");
        assert_eq!(one.fetch(), [0; 0], "{by:?}");
    }
}

#[test]
fn a_slot_that_moves_takes_its_log_along() {
    for by in BOTH {
        let mut one = One::logging(config(by, DirtyProtect::ByGet), 70);
        one.store([3, 69]);
        one.load([9]);
        let mut region = one.ram.region(1, MEMORY + 7 * PAGE, 0, 70);
        region.flags = SlotFlags::LOG_DIRTY_PAGES;
        one.vm.set_user_memory_region2(region.clone()).unwrap();
        assert_eq!(one.fetch(), [3, 69], "{by:?}");
        // Page 1 is now at frame 8.
        one.store([8]);
        assert_eq!(one.fetch(), [1], "{by:?}");
        // Deleting a slot drops its log. The next slot with its id has a new log.
        one.store([8]);
        one.vm.set_user_memory_region2(Region::delete(1)).unwrap();
        one.vm.set_user_memory_region2(region).unwrap();
        assert_eq!(one.fetch(), [0; 0], "{by:?}");
    }
}

#[test]
fn a_log_that_begins_with_a_move_does_not_know_what_was_before() {
    for by in BOTH {
        let mut one = One::new(config(by, DirtyProtect::ByGet), 70);
        one.store([3]);
        let mut region = one.ram.region(1, MEMORY + 7 * PAGE, 0, 70);
        region.flags = SlotFlags::LOG_DIRTY_PAGES;
        one.vm.set_user_memory_region2(region).unwrap();
        assert_eq!(one.fetch(), [0; 0], "{by:?}");
        one.store([10]);
        assert_eq!(one.fetch(), [3], "{by:?}");
    }
}

fn ring_config(entries: u32) -> VmConfig {
    VmConfig {
        dirty_ring: Some(entries),
        // With rings, this has no effect: faults fill them.
        dirty_by: DirtyBy::Bits,
        ..VmConfig::default()
    }
}

fn harvest(ring: &mut Harvester) -> Vec<u64> {
    let mut pages = Vec::new();
    while let Some(DirtyPage { slot, offset }) = ring.harvest() {
        assert_eq!(slot, 1);
        pages.push(offset);
    }
    pages
}

#[test]
fn rings_of_a_bad_size_are_refused_and_the_id_is_not_used_up() {
    for entries in [0, 1, 2, 32, 64, 100, 129, 3 << 10, 1 << 17, u32::MAX] {
        let vm = Vm::new(ring_config(entries));
        for _ in 0..2 {
            // A second attempt gives the same error, and not that the vCPU exists.
            let refused = vm.create_vcpu(0).unwrap_err();
            assert!(
                matches!(refused, VmError::DirtyRing(_)),
                "{entries}: {refused}"
            );
        }
        let max = vm.config().max_vcpus;
        assert_eq!(
            vm.create_vcpu(max).unwrap_err(),
            VmError::VcpuIdTooLarge { id: max, max }
        );
        assert_eq!(vm.reset_dirty_rings(), 0);
    }
    for entries in [128, 65_536] {
        let vm = Vm::new(ring_config(entries));
        assert!(vm.create_vcpu(0).is_ok());
        assert_eq!(vm.create_vcpu(0).unwrap_err(), VmError::VcpuExists(0));
    }
}

#[test]
fn a_ring_is_taken_once_and_only_where_there_is_one() {
    let (_, mut vcpu) = vm_and_vcpu(ring_config(128));
    assert!(vcpu.take_dirty_ring().is_some());
    assert!(vcpu.take_dirty_ring().is_none());
    let (vm, mut vcpu) = vm_and_vcpu(VmConfig::default());
    assert!(vcpu.take_dirty_ring().is_none());
    assert_eq!(vm.reset_dirty_rings(), 0);
}

#[test]
fn a_ring_has_each_page_once_until_it_is_reset() {
    let mut one = One::logging(ring_config(128), 200);
    let mut ring = one.vcpu.take_dirty_ring().unwrap();
    one.store([9, 3, 9, 199]);
    one.load([5]);
    assert_eq!(harvest(&mut ring), [9, 3, 199]);
    // The page is harvested and not reset: it is still writable, and not pushed again.
    one.store([9]);
    assert_eq!(harvest(&mut ring), [0; 0]);
    assert_eq!(one.vm.reset_dirty_rings(), 3);
    assert_eq!(one.vm.reset_dirty_rings(), 0);
    assert_eq!(one.vm.writable_pages(), 1, "the code's");
    one.store([5, 9]);
    assert_eq!(harvest(&mut ring), [5, 9]);
    assert_eq!(
        one.fetch(),
        [0; 0],
        "the bitmap does not have pages that are in a ring"
    );
    // A reset leaves pages that were pushed after the harvest.
    one.store([20]);
    assert_eq!(one.vm.reset_dirty_rings(), 2);
    one.store([20]);
    assert_eq!(harvest(&mut ring), [20]);
    // No ring has a store to a slot without a log.
    one.log(false);
    one.store([30]);
    assert_eq!(harvest(&mut ring), [0; 0]);
    assert_eq!(one.vm.reset_dirty_rings(), 1);
}

#[test]
fn a_full_ring_makes_the_vcpu_leave_before_the_store_and_nothing_is_lost() {
    // The ring keeps 64 entries in reserve.
    let mut one = One::logging(ring_config(128), 100);
    let mut ring = one.vcpu.take_dirty_ring().unwrap();
    one.store(0..64);
    // Loads, and stores to writable pages, still work.
    one.load([90]);
    one.store([0, 63]);
    let before = one.vcpu.hart().instret();
    for _ in 0..3 {
        assert_eq!(
            store(&mut one.vcpu, MEMORY + 80 * PAGE),
            Exit::DirtyRingFull
        );
        assert_eq!(one.vcpu.hart().pc(), STORE + 4, "at the store");
        assert_eq!(one.vcpu.run(), Exit::DirtyRingFull);
        assert_eq!(one.ram.get(80 * PAGE), 0);
    }
    assert_eq!(
        one.vcpu.hart().instret(),
        before + 3,
        "no store has retired"
    );
    // Harvesting alone frees no entries.
    let all: Vec<_> = (0..64).collect();
    assert_eq!(harvest(&mut ring), all);
    assert_eq!(one.vcpu.run(), Exit::DirtyRingFull);
    assert_eq!(one.vm.reset_dirty_rings(), 64);
    let count = one.vcpu.hart().x(A0 as u8);
    assert_eq!(one.vcpu.run(), Exit::Halted, "entering again repeats it");
    assert_eq!(one.ram.get(80 * PAGE), count);
    assert_eq!(harvest(&mut ring), [80]);
    // An SC, an AMO and a store over two pages leave in the same way.
    assert_eq!(one.vm.reset_dirty_rings(), 1);
    one.store(0..64);
    let code = one.ram.region(2, 0x1000, 99, 1);
    one.vm.set_user_memory_region2(code).unwrap();
    one.ram.code(
        99 * PAGE,
        &[atomic(AMOADD, D, A0, A1, A2), sd(A2, A1, -4), WFI],
    );
    set(
        &mut one.vcpu,
        0x1000,
        &[(A1, MEMORY + 70 * PAGE), (A2, u64::MAX)],
    );
    for (retired, pc) in [(0, 0x1000), (1, 0x1004)] {
        let before = one.vcpu.hart().instret();
        assert_eq!(one.vcpu.run(), Exit::DirtyRingFull);
        assert_eq!(one.vcpu.hart().pc(), pc);
        assert_eq!(one.vcpu.hart().instret(), before + retired);
        assert_eq!(harvest(&mut ring).len(), 64);
        assert_eq!(one.vm.reset_dirty_rings(), 64);
        if pc == 0x1000 {
            // The vCPU executes the second instruction with a full ring too.
            assert_eq!(one.ram.get(70 * PAGE), 0);
            let ram = &one.ram;
            let mut region = ram.region(1, MEMORY, 0, 100);
            region.flags = SlotFlags::LOG_DIRTY_PAGES;
            one.vm.set_user_memory_region2(region).unwrap();
            let saved = one.vcpu.state();
            one.store((0..63).collect::<Vec<_>>());
            one.vcpu.set_state(&saved).unwrap();
        }
    }
    assert_eq!(one.ram.get(70 * PAGE - 8), 0, "no byte of it");
    assert_eq!(one.vcpu.run(), Exit::Halted);
    assert_eq!(one.ram.get(70 * PAGE - 8), u64::MAX << 32);
    assert_eq!(one.ram.get(70 * PAGE), u64::MAX);
    assert_eq!(harvest(&mut ring), [69, 70]);
}

#[test]
fn rings_of_pages_that_are_gone_are_reset_all_the_same() {
    let mut one = One::logging(ring_config(128), 100);
    let mut ring = one.vcpu.take_dirty_ring().unwrap();
    one.store([0, 50, 99]);
    assert_eq!(harvest(&mut ring), [0, 50, 99]);
    // The new slot is smaller: pages 50 and 99 are past its end.
    one.vm.set_user_memory_region2(Region::delete(1)).unwrap();
    let mut region = one.ram.region(1, MEMORY, 0, 50);
    region.flags = SlotFlags::LOG_DIRTY_PAGES;
    one.vm.set_user_memory_region2(region).unwrap();
    // The slot behind it must not change.
    let behind = one.ram.region(2, MEMORY + 50 * PAGE, 50, 50);
    one.vm.set_user_memory_region2(behind).unwrap();
    one.store([0, 50, 99]);
    assert_eq!(one.vm.writable_pages(), 1 + 3);
    assert_eq!(one.vm.reset_dirty_rings(), 3);
    assert_eq!(one.vm.writable_pages(), 1 + 2, "page 0 is protected");
    one.store([0, 99]);
    assert_eq!(harvest(&mut ring), [0, 0]);
    one.vm.set_user_memory_region2(Region::delete(1)).unwrap();
    assert_eq!(one.vm.reset_dirty_rings(), 2);
}

#[test]
fn what_a_notifier_finds_dirty_is_in_a_ring_or_in_the_bitmap() {
    let mut one = One::new(ring_config(128), 64);
    let mut ring = one.vcpu.take_dirty_ring().unwrap();
    one.store([1]);
    one.log(true);
    one.store([2]);
    let all = one.ram.hva()..Hva(one.ram.hva().0 + 64 * PAGE);
    assert_eq!(one.vm.invalidate_hva(all), 2);
    let mut pages = harvest(&mut ring);
    pages.extend(one.fetch());
    assert_eq!(pages, [2]);
    // The page faults and is pushed again.
    one.store([2]);
    assert_eq!(harvest(&mut ring), [2]);
}

#[test]
fn rings_get_what_is_stored_after_the_bitmap_was_cleared() {
    let mut one = One::new(
        VmConfig {
            dirty_protect: DirtyProtect::InitiallySet,
            ..ring_config(128)
        },
        64,
    );
    let mut ring = one.vcpu.take_dirty_ring().unwrap();
    one.store([1, 2]);
    one.log(true);
    // The bitmap already has the page.
    one.store([1]);
    assert_eq!(one.fetch().len(), 64);
    assert_eq!(one.clear(0, &[0b010]), 1);
    one.store([1, 2]);
    assert_eq!(harvest(&mut ring), [1]);
    assert_eq!(one.fetch().len(), 63);
    assert_eq!(one.clear(0, &[u64::MAX]), 63);
    assert_eq!(one.vm.reset_dirty_rings(), 1);
    one.store([2, 1]);
    assert_eq!(harvest(&mut ring), [2, 1]);
    assert_eq!(one.fetch(), [0; 0]);
}

#[test]
fn each_vcpu_fills_its_own_ring() {
    let mut one = One::logging(ring_config(128), 64);
    let mut second = one.vm.create_vcpu(1).unwrap();
    let mut rings = [&mut one.vcpu, &mut second].map(|vcpu| vcpu.take_dirty_ring().unwrap());
    one.store([1, 2]);
    for page in [2, 3] {
        assert_eq!(store(&mut second, MEMORY + page * PAGE), Exit::Halted);
    }
    // The vCPU that makes a page writable pushes it.
    assert_eq!(rings.each_mut().map(harvest), [vec![1, 2], vec![3]]);
    assert_eq!(one.vm.reset_dirty_rings(), 3);
    assert_eq!(store(&mut second, MEMORY + 2 * PAGE), Exit::Halted);
    assert_eq!(rings.each_mut().map(harvest), [vec![], vec![2]]);
}

#[test]
fn a_read_only_slot_is_loaded_from_and_stores_to_it_leave() {
    for backing in [1, LARGE] {
        let (vm, mut vcpu) = vm_and_vcpu(VmConfig::default());
        let ram = LargeRam::new(1);
        let mut region = ram.region(1, MEMORY, SlotFlags::READONLY | SlotFlags::LOG_DIRTY_PAGES);
        if backing == 1 {
            region = Region {
                gpa: Gpa(MEMORY + PAGE),
                size: 8 * PAGE,
                ..region
            };
        }
        let first = region.gpa.0;
        vm.set_user_memory_region2(region).unwrap();
        let words = if backing == 1 { 1 } else { 8 };
        ram.set(5 * PAGE, 77);
        for _ in 0..2 {
            set(&mut vcpu, LOAD, &[(A1, first + 5 * PAGE), (A0, 41)]);
            assert_eq!((vcpu.run(), vcpu.hart().x(A2 as u8)), (Exit::Halted, 77));
            let exit = store(&mut vcpu, first + 5 * PAGE);
            let expected = Exit::MmioWrite {
                gpa: Gpa(first + 5 * PAGE),
                size: 8,
                value: 42,
            };
            assert_eq!(exit, expected);
            // The vCPU has completed the store.
            assert_eq!(vcpu.run(), Exit::Halted);
            assert_eq!(ram.get(5 * PAGE), 77);
        }
        assert_eq!(vm.writable_pages(), 1, "the code's");
        let mut log = vec![0; words];
        assert_eq!(vm.get_dirty_log(1, &mut log).unwrap(), 0);
    }
}
