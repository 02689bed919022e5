//! The cost of the tables of a VM of 12 TiB.

use super::heap::Heap;
use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::{Access, Ept4, MemoryType, Writes};
use pageferry_tdp::{Fault, Mmu, Target};
use std::sync::atomic::Ordering;

const FRAMES: u64 = (12 << 40) >> 12;
/// Frames of 2 MiB.
const LARGE: u64 = 512;

/// Bytes of `struct kvm_rmap_head`, one pointer-sized word: `arch/x86/include/asm/kvm_host.h`. A
/// memory slot has an array of them for each page size (`struct kvm_arch_memory_slot`, `rmap`),
/// with one for each page of that size.
const RMAP_HEAD: u64 = 8;
/// Bytes of `struct kvm_mmu_page`, of which there is one for each table. It has three list links of
/// two words, flags and role in 8 bytes, gfn, two pointers, two counts of 4 bytes, a
/// `kvm_rmap_head`, a bitmap of 512 bits, a count and a flag, rounded up to 8. Source:
/// `arch/x86/kvm/mmu/mmu_internal.h` of Linux 5.10, on a 64-bit processor.
const KVM_MMU_PAGE: u64 = 3 * 16 + 8 + 8 + 2 * 8 + 2 * 4 + 8 + 64 + 8;

fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

#[test]
fn the_tables_of_a_12_tib_vm_take_less_than_60_mb() {
    let mmu = Mmu::<Ept4, _>::new(Heap::default()).unwrap();
    let mut worker = mmu.worker();
    for gfn in (0..FRAMES).step_by(LARGE as usize) {
        let target = Target {
            // Host memory does not start at frame 0.
            pfn: Pfn(gfn + (1 << 20)),
            level: 2,
            access: Access::ALL,
            writes: Writes::Allowed,
            memory: MemoryType::WriteBack,
        };
        let fault = Fault {
            gfn: Gfn(gfn),
            access: Access::READ_WRITE,
        };
        worker.fault(worker.ticket(), fault, target, &()).unwrap();
    }
    drop(worker);
    let stats = mmu.stats();
    let tables = stats.tables + 1;
    let allocated = mmu.platform().live.load(Ordering::Relaxed).cast_unsigned() * 4096;
    assert_eq!(stats.leaves, [0, FRAMES / LARGE, 0]);
    // A table for each GiB, one for each 512 GiB, and the root.
    assert_eq!(tables, (12 << 10) + 24 + 1);
    assert_eq!(
        (stats.table_bytes, allocated),
        (tables * 4096, tables * 4096)
    );
    assert!(allocated < 60_000_000);
    println!(
        "12 TiB in {} pages of 2 MiB: {tables} tables, {:.1} MB, and nothing beside them (built, counted)",
        stats.leaves[1],
        megabytes(allocated)
    );
    let heads = [FRAMES, FRAMES / LARGE, FRAMES / LARGE / LARGE].map(|pages| pages * RMAP_HEAD);
    println!(
        "computed, not built: with a reverse map as KVM's shadow MMU has it, {:.1} MB of rmap heads for 4 KiB, \
         {:.1} MB for 2 MiB and {:.1} MB for 1 GiB, and {:.1} MB of struct kvm_mmu_page",
        megabytes(heads[0]),
        megabytes(heads[1]),
        megabytes(heads[2]),
        megabytes(tables * KVM_MMU_PAGE)
    );
}
