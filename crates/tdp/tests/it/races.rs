//! Races on one thread. The other side runs at a chosen moment: inside the platform's flush, or
//! inside a callback.

use crate::platform::{fault, new, range, target};
use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::{Access, Arm64Ipa48, Ept4, Ept4NoAd, MemoryType, Writes};
use pageferry_tdp::{Flush, Found, Refused, Target};

#[test]
fn who_flushes_while_a_root_is_replaced_makes_vcpus_use_the_new_one() {
    let mmu = new::<Ept4>();
    let (mut worker, mut notifier) = (mmu.worker(), mmu.worker());
    fault(&mut worker, 7, Access::READ_WRITE, target(0x77, 1)).unwrap();
    // The new root is in place, but vCPUs do not know it yet.
    let inner = std::sync::Arc::clone(&mmu);
    mmu.platform().at_next_flush(move || {
        inner.platform().take_flushes();
        drop(notifier.invalidate(&[range(7, 1)], &()));
        assert_eq!(inner.platform().take_flushes(), [Flush::Roots]);
    });
    assert_eq!(worker.zap_all(&()), Ok(1));
    worker.flush();
    assert_eq!(
        mmu.platform().take_flushes(),
        [],
        "nothing is owed any more"
    );
}

#[test]
fn a_permission_that_aging_took_is_flushed_for_the_log() {
    let mmu = new::<Ept4NoAd>();
    let mut worker = mmu.worker();
    fault(&mut worker, 7, Access::READ_WRITE, target(0x77, 1)).unwrap();
    assert_eq!(worker.age(range(0, 64), true, &()), 1);
    assert_eq!(mmu.platform().take_flushes(), [], "aging flushes nothing");
    // A TLB may still allow stores. So the log's reader needs a flush, although the entry is not
    // writable.
    assert_eq!(worker.write_protect_mask(Gfn(0), 1 << 7, &()), 0);
    assert_eq!(mmu.platform().take_flushes().len(), 1);
    worker.write_protect_mask(Gfn(0), 1 << 7, &());
    assert_eq!(mmu.platform().take_flushes(), [], "once");
}

#[test]
fn a_fault_does_not_wait_for_the_flush_of_a_split() {
    let mmu = new::<Arm64Ipa48<true>>();
    let (mut worker, mut vcpu) = (mmu.worker(), mmu.worker());
    fault(&mut worker, 0x200, Access::READ, target(0x800, 2)).unwrap();
    mmu.platform().at_next_flush(move || {
        // The entry is frozen now, and this flush would wait for this vCPU.
        let refused = fault(&mut vcpu, 0x201, Access::READ, target(0x801, 1));
        assert_eq!(refused, Err(Refused::Invalidated));
    });
    assert_eq!(worker.split(range(0x200, 0x200), 1, &()), Ok(1));
    assert_eq!(worker.walk(Gfn(0x201)).unwrap().leaf.pfn, Pfn(0x801));
}

#[test]
fn a_large_page_does_not_cover_what_is_invalidated_beside_the_fault() {
    let mmu = new::<Ept4>();
    let (mut worker, mut notifier) = (mmu.worker(), mmu.worker());
    let invalidating = notifier.invalidate(&[range(0x210, 1)], &());
    for (gfn, level) in [(0x20f, 2), (0x211, 2), (0x200, 3)] {
        let large = target(0x4_0000 + gfn, level);
        let large = Target {
            pfn: Pfn(if level == 3 { 0x200 } else { large.pfn.0 }),
            ..large
        };
        let refused = fault(&mut worker, gfn, Access::READ, large);
        assert_eq!(refused, Err(Refused::Invalidated), "{gfn:#x}");
    }
    fault(&mut worker, 0x20f, Access::READ, target(0x4_020f, 1)).unwrap();
    fault(&mut worker, 0x400, Access::READ, target(0x4_0400, 2)).unwrap();
    drop(invalidating);
}

#[test]
fn nothing_takes_the_place_of_a_large_page_before_the_flush() {
    let mmu = new::<Arm64Ipa48<true>>();
    let (mut worker, mut vcpu) = (mmu.worker(), mmu.worker());
    fault(&mut worker, 0x200, Access::READ, target(0x800, 2)).unwrap();
    let (send, receive) = std::sync::mpsc::channel();
    mmu.platform().at_next_flush(move || {
        // Outside the range, but inside the large page that was removed with it.
        send.send(fault(&mut vcpu, 0x20f, Access::READ, target(0x80f, 1)))
            .unwrap();
    });
    assert_eq!(worker.zap(range(0x210, 1), &()), 512);
    assert_eq!(receive.recv(), Ok(Err(Refused::Invalidated)));
    fault(&mut worker, 0x20f, Access::READ, target(0x80f, 1)).unwrap();
}

#[test]
fn recovery_leaves_what_is_being_invalidated() {
    let mmu = new::<Ept4>();
    let (mut worker, mut notifier) = (mmu.worker(), mmu.worker());
    for gfn in [0x20f, 0x210, 0x400] {
        fault(&mut worker, gfn, Access::READ, target(0x4_0000 + gfn, 1)).unwrap();
    }
    let large = |Gfn(gfn), level| Some(target(0x4_0000 + gfn, level));
    let invalidating = notifier.invalidate(&[range(0x210, 1)], &());
    assert_eq!(worker.recover(range(0x200, 0x400), &(), large), 1);
    assert_eq!(worker.walk(Gfn(0x210)), None);
    drop(invalidating);
    assert_eq!(worker.recover(range(0x200, 0x400), &(), large), 1);
    assert_eq!(
        worker.walk(Gfn(0x210)).map(|found: Found| found.level),
        Some(2)
    );
}

#[test]
fn a_fault_takes_nothing_away() {
    let mmu = new::<Ept4>();
    let mut worker = mmu.worker();
    let first = Target {
        access: Access::READ_WRITE,
        ..target(0x77, 1)
    };
    fault(&mut worker, 7, Access::READ_WRITE, first).unwrap();
    // The slot now allows no stores, but a fault takes no permissions away.
    let now = Target {
        writes: Writes::HostForbids,
        memory: MemoryType::Device,
        access: Access::READ_EXECUTE,
        ..first
    };
    let found = fault(&mut worker, 7, Access::READ_EXECUTE, now)
        .unwrap()
        .leaf;
    assert!(found.access.write && found.access.execute && found.dirty);
    assert_eq!((found.writes, found.memory), (first.writes, first.memory));
    worker.flush();
    assert_eq!(mmu.platform().take_flushes(), [], "and so nothing is owed");
}

#[test]
#[should_panic(expected = "there is no level below 1")]
fn the_smallest_pages_are_not_split() {
    let mmu = new::<Ept4>();
    let _ = mmu.worker().split(range(0, 1), 0, &());
}

#[test]
#[should_panic(expected = "cannot be mapped")]
fn recovery_refuses_a_frame_that_is_out_of_step() {
    let mmu = new::<Ept4>();
    let mut worker = mmu.worker();
    fault(&mut worker, 0x200, Access::READ, target(0x800, 1)).unwrap();
    worker.recover(range(0x200, 0x200), &(), |_, level| {
        Some(target(0x801, level))
    });
}
