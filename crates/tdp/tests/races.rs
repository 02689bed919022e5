//! Races whose other side runs at a chosen moment: inside the platform's flush, or inside a callback. One thread.
#![cfg(not(any(loom, shuttle)))]
#![expect(unsafe_code, reason = "a platform of tables from the heap")]

use pageferry_addr::{Gfn, GfnRange, PAGE_SHIFT, Pfn};
use pageferry_tdp::format::{Access, Arm64Ipa48, Ept4, Ept4NoAd, Format, MemoryType, Writes};
use pageferry_tdp::{Entry, Fault, Flush, Found, Mapped, Mmu, Platform, Refused, Target, Worker};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::{self, NonNull};
use std::sync::Mutex;

/// Something to do at the next flush.
type Hook = Box<dyn FnOnce() + Send>;

/// A platform that keeps what was flushed, and does something in the middle of a flush.
#[derive(Default)]
struct Hooked {
    flushes: Mutex<Vec<Flush>>,
    hook: Mutex<Option<Hook>>,
}

impl Hooked {
    fn take_flushes(&self) -> Vec<Flush> {
        std::mem::take(&mut self.flushes.lock().unwrap())
    }

    fn at_next_flush(&self, hook: impl FnOnce() + Send + 'static) {
        *self.hook.lock().unwrap() = Some(Box::new(hook));
    }
}

fn layout(entries: usize) -> Layout {
    Layout::from_size_align(entries * 8, entries * 8).unwrap()
}

// SAFETY: memory from the allocator, zeroed and aligned to its size; frames are addresses without their lowest
// bits, which are clear; there is no hardware.
unsafe impl Platform for Hooked {
    fn allocate_table(&self, entries: usize) -> Option<NonNull<Entry>> {
        // SAFETY: not of size 0.
        let table = NonNull::new(unsafe { alloc_zeroed(layout(entries)) })?;
        table.as_ptr().expose_provenance();
        Some(table.cast())
    }

    unsafe fn free_table(&self, table: NonNull<Entry>, entries: usize) {
        // SAFETY: from `allocate_table` with as many entries, by the caller.
        unsafe { dealloc(table.as_ptr().cast(), layout(entries)) };
    }

    fn frame(&self, table: NonNull<Entry>) -> Pfn {
        Pfn(table.as_ptr().addr() as u64 >> PAGE_SHIFT)
    }

    fn pointer(&self, table: Pfn) -> NonNull<Entry> {
        let address = (table.0 << PAGE_SHIFT) as usize;
        NonNull::new(ptr::with_exposed_provenance_mut(address)).expect("a table's frame")
    }

    fn flush(&self, what: Flush) {
        self.flushes.lock().unwrap().push(what);
        let hook = self.hook.lock().unwrap().take();
        if let Some(hook) = hook {
            hook();
        }
    }
}

fn range(first: u64, pages: u64) -> GfnRange {
    GfnRange::new(Gfn(first), pages).unwrap()
}

fn target(pfn: u64, level: u32) -> Target {
    Target {
        pfn: Pfn(pfn),
        level,
        access: Access::ALL,
        writes: Writes::Allowed,
        memory: MemoryType::WriteBack,
    }
}

fn fault<F: Format>(
    worker: &mut Worker<F, Hooked>,
    gfn: u64,
    access: Access,
    target: Target,
) -> Result<Mapped, Refused> {
    let ticket = worker.ticket();
    let gfn = Gfn(gfn);
    worker.fault(ticket, Fault { gfn, access }, target, &())
}

#[test]
fn who_flushes_while_a_root_is_replaced_makes_vcpus_use_the_new_one() {
    let mmu = Mmu::<Ept4, _>::new(Hooked::default()).unwrap();
    let (mut worker, mut notifier) = (mmu.worker(), mmu.worker());
    fault(&mut worker, 7, Access::READ_WRITE, target(0x77, 1)).unwrap();
    // The new root is in place, and vCPUs have not been told yet.
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
    let mmu = Mmu::<Ept4NoAd, _>::new(Hooked::default()).unwrap();
    let mut worker = mmu.worker();
    fault(&mut worker, 7, Access::READ_WRITE, target(0x77, 1)).unwrap();
    assert_eq!(worker.age(range(0, 64), true, &()), 1);
    assert_eq!(mmu.platform().take_flushes(), [], "aging flushes nothing");
    // A TLB may still let stores through, so the log's reader needs a flush though the entry is not writable.
    assert_eq!(worker.write_protect_mask(Gfn(0), 1 << 7, &()), 0);
    assert_eq!(mmu.platform().take_flushes().len(), 1);
    worker.write_protect_mask(Gfn(0), 1 << 7, &());
    assert_eq!(mmu.platform().take_flushes(), [], "once");
}

#[test]
fn a_fault_does_not_wait_for_the_flush_of_a_split() {
    let mmu = Mmu::<Arm64Ipa48<true>, _>::new(Hooked::default()).unwrap();
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
    let mmu = Mmu::<Ept4, _>::new(Hooked::default()).unwrap();
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
    let mmu = Mmu::<Arm64Ipa48<true>, _>::new(Hooked::default()).unwrap();
    let (mut worker, mut vcpu) = (mmu.worker(), mmu.worker());
    fault(&mut worker, 0x200, Access::READ, target(0x800, 2)).unwrap();
    let (send, receive) = std::sync::mpsc::channel();
    mmu.platform().at_next_flush(move || {
        // Outside the range, but inside the large page that went with it.
        send.send(fault(&mut vcpu, 0x20f, Access::READ, target(0x80f, 1)))
            .unwrap();
    });
    assert_eq!(worker.zap(range(0x210, 1), &()), 512);
    assert_eq!(receive.recv(), Ok(Err(Refused::Invalidated)));
    fault(&mut worker, 0x20f, Access::READ, target(0x80f, 1)).unwrap();
}

#[test]
fn recovery_leaves_what_is_being_invalidated() {
    let mmu = Mmu::<Ept4, _>::new(Hooked::default()).unwrap();
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
    let mmu = Mmu::<Ept4, _>::new(Hooked::default()).unwrap();
    let mut worker = mmu.worker();
    let first = Target {
        access: Access::READ_WRITE,
        ..target(0x77, 1)
    };
    fault(&mut worker, 7, Access::READ_WRITE, first).unwrap();
    // What the slot says now allows no stores, but it is not the fault that takes them.
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
    let mmu = Mmu::<Ept4, _>::new(Hooked::default()).unwrap();
    let _ = mmu.worker().split(range(0, 1), 0, &());
}

#[test]
#[should_panic(expected = "cannot be mapped")]
fn recovery_refuses_a_frame_that_is_out_of_step() {
    let mmu = Mmu::<Ept4, _>::new(Hooked::default()).unwrap();
    let mut worker = mmu.worker();
    fault(&mut worker, 0x200, Access::READ, target(0x800, 1)).unwrap();
    worker.recover(range(0x200, 0x200), &(), |_, level| {
        Some(target(0x801, level))
    });
}
