//! Roots of all sizes, on a platform whose frames drop the low bits of addresses.

use crate::platform::{Hooked, fault, new, range, target};
use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::{Access, Arm64Stage2, Ept4, Format, Npt4, Sv48x4Svade, Sv57x4Svadu};
use pageferry_tdp::{Entry, Fault, Flush, Look, Mmu, Platform, Refused, largest_level};
use std::ptr::NonNull;

/// Maps, walks and zaps at both ends of the frames that the format can map.
fn tables_work<F: Format>() {
    let mmu = new::<F>();
    let mut worker = mmu.worker();
    assert!(mmu.platform().sizes().iter().all(|&entries| entries >= 512));
    let last = F::GFN_LIMIT.0 - 1;
    for gfn in [0, 1, 1 << 18, last] {
        fault(&mut worker, gfn, Access::READ_WRITE, target(gfn & 0xfff, 1)).unwrap();
        assert_eq!(worker.walk(Gfn(gfn)).unwrap().leaf.pfn.0, gfn & 0xfff);
    }
    assert_eq!(
        mmu.stats().table_bytes as usize,
        8 * mmu.platform().sizes().iter().sum::<usize>()
    );
    assert_eq!(worker.zap(range(0, 2), &()), 2);
    assert_eq!(worker.zap_all(&()), Ok(2));
    assert_eq!(mmu.platform().live(), 1, "the root");
}

#[test]
fn tables_work_in_formats_whose_root_is_smaller_than_a_page() {
    tables_work::<Arm64Stage2<33, true, true>>();
    tables_work::<Arm64Stage2<44, true, true>>();
}

/// A guest chooses the frames that it accesses.
fn frames_beyond_reach_are_refused<F: Format>() {
    let mmu = new::<F>();
    let mut worker = mmu.worker();
    let limit = F::GFN_LIMIT;
    for gfn in [
        limit,
        Gfn(limit.0 + 1),
        Gfn(2 * limit.0),
        Gfn::MAX,
        Gfn(u64::MAX),
    ] {
        let refused = Refused::OutOfReach { gfn, limit };
        for level in 1..=F::MAX_LEAF_LEVEL {
            let target = target(0, level);
            let answer = fault(&mut worker, gfn.0, Access::READ_WRITE, target);
            assert_eq!(answer.unwrap_err(), refused);
            let access = Access::READ;
            assert_eq!(worker.fast_fault(Fault { gfn, access }, &()), None);
        }
        let ticket = worker.ticket();
        assert_eq!(worker.mark_mmio(ticket, gfn, 5), Err(refused));
        assert_eq!(worker.walk(gfn), None);
        assert_eq!(worker.look(gfn, Access::READ), Look::Absent);
        let mut other = mmu.worker();
        let invalidation = other.invalidate(&[range(0, limit.0)], &());
        assert!(!worker.is_invalidating(gfn), "{gfn:?}");
        drop(invalidation);
        let slot = range(0, limit.0);
        assert_eq!(largest_level::<F>(slot, gfn, Pfn(gfn.0), 3), 1);
    }
    assert_eq!(mmu.stats().tables, 0, "nothing is linked");
}

#[test]
fn a_frame_beyond_the_tables_is_an_error() {
    frames_beyond_reach_are_refused::<Ept4>();
    frames_beyond_reach_are_refused::<Sv48x4Svade>();
    frames_beyond_reach_are_refused::<Arm64Stage2<33, true, true>>();
    frames_beyond_reach_are_refused::<Sv57x4Svadu>();
}

/// A whole MMU for each width takes long to compile, a root alone does not.
#[test]
fn roots_of_all_widths_take_a_page_or_more() {
    macro_rules! widths {
        ($($bits:literal),+) => { $(
            let mmu = new::<Arm64Stage2<$bits, true, true>>();
            let sizes = mmu.platform().sizes();
            assert!(sizes[0] >= 512 && sizes[0].is_power_of_two(), "{} bits: {sizes:?}", $bits);
        )+ };
    }
    widths!(
        33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48
    );
}

#[test]
fn other_formats_have_roots_of_a_page_or_more() {
    tables_work::<Npt4>();
    tables_work::<Sv57x4Svadu>();
}

/// A platform whose tables lie in the middle of frames.
struct Askew(Hooked);

#[expect(
    unsafe_code,
    reason = "breaks the contract, to see that this is noticed"
)]
// SAFETY: it breaks point 2. The MMU must notice that before it follows a pointer.
unsafe impl Platform for Askew {
    fn allocate_table(&self, _: usize) -> Option<NonNull<Entry>> {
        // The part of a page after its first 256 bytes.
        let table = self.0.allocate_table(128)?;
        // SAFETY: inside the table.
        Some(unsafe { table.add(32) })
    }

    unsafe fn free_table(&self, _: NonNull<Entry>, _: usize) {}

    fn frame(&self, table: NonNull<Entry>) -> Pfn {
        self.0.frame(table)
    }

    fn pointer(&self, table: Pfn) -> NonNull<Entry> {
        let address = (table.0 << 12) as usize;
        NonNull::new(std::ptr::with_exposed_provenance_mut(address)).unwrap()
    }

    fn flush(&self, _: Flush) {}
}

#[test]
#[should_panic(expected = "tables must be aligned to a page or more")]
fn a_platform_that_loses_low_bits_of_addresses_is_refused() {
    _ = Mmu::<Npt4, _>::new(Askew(Hooked::default()));
}
