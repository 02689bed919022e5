//! Write tracking together with dirty logs, rings, userfault bits and large pages.

use crate::support::fleet::LARGE;
use crate::support::tracked::{LOAD, MEMORY, One, SD, large, leaves, one, one_of};
use crate::support::vm::{HostRam, PAGE};
use pageferry_addr::{Gpa, RamPage};
use pageferry_hypervisor::hart::Access;
use pageferry_hypervisor::{DirtyBy, DirtyProtect, Exit, SlotFlags, UserfaultBits, VmConfig};
use pageferry_userfault::PageBitmap;
use std::sync::Arc;

fn configs() -> impl Iterator<Item = VmConfig> {
    let by = [DirtyBy::WriteProtection, DirtyBy::Bits];
    let protect = [
        DirtyProtect::ByGet,
        DirtyProtect::ByClear,
        DirtyProtect::InitiallySet,
    ];
    by.into_iter().flat_map(move |dirty_by| {
        protect.map(|dirty_protect| VmConfig {
            dirty_by,
            dirty_protect,
            ..VmConfig::default()
        })
    })
}

/// The guest first stores to pages 0 to 4. Pages 1 to 3 are tracked before or after the log begins.
#[test]
fn a_log_has_the_stores_that_went_through_and_no_other() {
    for config in configs() {
        for track_first in [true, false] {
            let what = format!("{config:?}, tracked first: {track_first}");
            let mut one = one_of(config, 8);
            one.store(0..5);
            if track_first {
                one.track(1..4);
            }
            one.log(true);
            let fetch = |one: &One<HostRam>| {
                let pages = one.fetch();
                if config.dirty_protect != DirtyProtect::ByGet {
                    one.vm.clear_dirty_log(1, 0, &[u64::MAX]).unwrap();
                }
                pages
            };
            // If the log begins with all pages, its first clearing protects them.
            fetch(&one);
            if !track_first {
                one.store([1, 4]);
                one.track(1..4);
                assert_eq!(fetch(&one), [1, 4], "{what}: earlier stores are not lost");
            }
            one.refuses([1, 2]);
            one.load([3]);
            one.refuses([3]);
            assert_eq!(fetch(&one), [0; 0], "{what}");
            one.untrack(1..3);
            one.load([1, 2]);
            assert_eq!(fetch(&one), [0; 0], "{what}: untracked, without a store");
            one.store([2]);
            one.refuses([3]);
            assert_eq!(fetch(&one), [2], "{what}");
            one.store([1, 2]);
            assert_eq!(fetch(&one), [1, 2], "{what}");
            one.store([2]);
            assert_eq!(fetch(&one), [2], "{what}");
            one.log(false);
            one.store([1, 2]);
            one.refuses([3]);
        }
    }
}

#[test]
fn a_ring_has_the_stores_that_went_through_and_no_other() {
    let config = VmConfig {
        dirty_ring: Some(1024),
        ..VmConfig::default()
    };
    let mut one = one_of(config, 8);
    let mut ring = one.vcpu.take_dirty_ring().unwrap();
    let mut harvest = || -> Vec<_> {
        std::iter::from_fn(|| ring.harvest())
            .map(|page| page.offset)
            .collect()
    };
    one.log(true);
    one.store([1, 2]);
    one.track(1..4);
    assert_eq!(harvest(), [1, 2]);
    assert_eq!(one.vm.reset_dirty_rings(), 2);
    one.refuses([1, 2, 3]);
    assert_eq!(harvest(), [0; 0]);
    one.untrack(1..3);
    one.store([2, 1, 2, 1]);
    one.refuses([3]);
    assert_eq!(harvest(), [2, 1]);
    assert_eq!(one.vm.reset_dirty_rings(), 2);
    one.store([1]);
    assert_eq!(harvest(), [1]);
    assert_eq!(one.fetch(), [0; 0]);
}

#[test]
fn a_missing_page_is_brought_before_it_is_copied() {
    let mut one = one(3);
    one.store([0]);
    one.track(0..2);
    let bitmap = Arc::new(PageBitmap::new(3));
    bitmap.set_range(0..3);
    one.set(|region| {
        region.flags = SlotFlags::USERFAULT;
        region.userfault = Some(UserfaultBits {
            bitmap: Arc::clone(&bitmap),
            first: RamPage(0),
        });
    });
    let missing = |page: u64, access| Exit::MemoryFault {
        gpa: Gpa(MEMORY + page * PAGE),
        size: PAGE,
        access,
        userfault: true,
        write_tracked: false,
    };
    for page in [0, 1] {
        assert_eq!(one.run(SD, page * PAGE), missing(page, Access::Store));
        assert_eq!(one.run(LOAD, page * PAGE), missing(page, Access::Load));
        bitmap.clear(RamPage(page));
        one.refuses([page]);
        one.load([page]);
        one.refuses([page]);
        one.untrack(page..page + 1);
        one.store([page]);
    }
    // Userfault bits and tracking bits are independent.
    one.track(2..3);
    one.untrack(2..3);
    assert_eq!(one.run(SD, 2 * PAGE), missing(2, Access::Store));
}

#[test]
fn large_pages_are_split_where_a_page_is_tracked_and_large_again_afterwards() {
    let mut one = large();
    one.store([0, LARGE, 2 * LARGE]);
    assert_eq!(leaves(&one), [0, 3]);
    one.track(LARGE + 7..LARGE + 9);
    assert_eq!(leaves(&one), [LARGE, 2], "the others stay large");
    one.refuses([LARGE + 7, LARGE + 8]);
    one.store([0, LARGE, LARGE + 6, LARGE + 9, 2 * LARGE]);
    // Faults also map small pages there.
    one.vm.zap_all();
    one.store([3, LARGE + 3]);
    one.load([LARGE + 7]);
    assert_eq!(leaves(&one), [2, 1]);
    one.refuses([LARGE + 7]);
    one.untrack(LARGE + 7..LARGE + 8);
    one.store([LARGE + 7]);
    one.refuses([LARGE + 8]);
    assert_eq!(leaves(&one), [2, 1]);
    one.untrack(LARGE + 8..LARGE + 9);
    assert_eq!(leaves(&one), [0, 2], "large again");
    one.store([LARGE + 8]);
    one.store(0..3 * LARGE);
    assert_eq!(leaves(&one), [0, 3]);
}

#[test]
fn a_log_that_ends_leaves_pages_small_that_are_tracked() {
    let mut one = large();
    one.store([0, LARGE, 2 * LARGE]);
    one.track(5..6);
    one.log(true);
    assert_eq!(leaves(&one), [3 * LARGE, 0]);
    one.store([6]);
    one.log(false);
    assert_eq!(leaves(&one), [LARGE, 2]);
    one.refuses([5]);
    // While there is a log, no page becomes large.
    one.log(true);
    one.untrack(5..6);
    assert_eq!(leaves(&one), [3 * LARGE, 0]);
    one.store([5]);
    one.log(false);
    assert_eq!(leaves(&one), [0, 3]);
}

/// Pages are tracked piece by piece. After the last is untracked, all of them are large again.
#[test]
fn all_that_was_tracked_is_large_again_when_the_last_page_is_untracked() {
    let mut one = large();
    one.store([0, LARGE, 2 * LARGE]);
    for page in [2 * LARGE + 511, 0, LARGE + 1] {
        one.track(page..page + 1);
    }
    for page in [0, 2 * LARGE + 511] {
        one.untrack(page..page + 1);
        assert_eq!(leaves(&one), [3 * LARGE, 0]);
    }
    one.untrack(0..3 * LARGE);
    assert_eq!(leaves(&one), [0, 3]);
}
