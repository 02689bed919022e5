//! Arbitrary leaves and meanings.

use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::{Access, Format, Leaf, Meaning, MemoryType, Writes};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

pub(crate) const MEMORY: [MemoryType; 3] = [
    MemoryType::WriteBack,
    MemoryType::WriteCombining,
    MemoryType::Device,
];
pub(crate) const WRITES: [Writes; 4] = [
    Writes::HostForbids,
    Writes::MmuForbids,
    Writes::Allowed,
    Writes::AllowedLoggedByFault,
];

/// All leaves of frame `pfn`: every permission, memory type, state and class.
pub(crate) fn leaves_of(pfn: Pfn) -> Vec<Leaf> {
    let mut all = Vec::new();
    for memory in MEMORY {
        for writes in WRITES {
            for flags in 0..16 {
                let [write, execute, accessed, dirty] = [1, 2, 4, 8].map(|flag| flags & flag != 0);
                let access = Access { write, execute };
                all.push(Leaf {
                    pfn,
                    access,
                    memory,
                    accessed,
                    dirty,
                    writes,
                });
            }
        }
    }
    all
}

/// A level that may hold leaves, and a frame at which such a leaf may start.
pub(crate) fn leaf_place<F: Format>() -> impl Strategy<Value = (u32, Pfn)> {
    (1..=F::MAX_LEAF_LEVEL, 0..F::PFN_LIMIT.0)
        .prop_map(|(level, pfn)| (level, Pfn(pfn & !(F::frames_per_entry(level) - 1))))
}

pub(crate) fn leaf<F: Format>() -> impl Strategy<Value = (u32, Leaf)> {
    (leaf_place::<F>(), any::<prop::sample::Index>()).prop_map(|((level, pfn), index)| {
        let all = leaves_of(pfn);
        (level, all[index.index(all.len())])
    })
}

/// A level and a meaning that an entry may have there, in the form that `decode` returns.
pub(crate) fn meaning<F: Format>() -> impl Strategy<Value = (u32, Meaning)> {
    let generations = 0..1u64 << F::MMIO_GENERATION_BITS;
    prop_oneof![
        (1..=F::LEVELS).prop_map(|level| (level, Meaning::NonPresent)),
        (1..=F::LEVELS).prop_map(|level| (level, Meaning::Frozen)),
        (1..=F::LEVELS, 0..F::GFN_LIMIT.0, generations).prop_map(|(level, gfn, generation)| (
            level,
            Meaning::Mmio {
                gfn: Gfn(gfn),
                generation
            }
        )),
        (2..=F::LEVELS, 0..F::PFN_LIMIT.0)
            .prop_map(|(level, table)| (level, Meaning::Table { table: Pfn(table) })),
        leaf::<F>().prop_map(|(level, leaf)| (level, Meaning::Leaf(F::canonical(leaf)))),
    ]
}

/// Runs `check` on 256 values of `strategy`.
pub(crate) fn run<S: Strategy>(strategy: S, check: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let config = Config {
        failure_persistence: None,
        ..Config::default()
    };
    if let Err(failure) = TestRunner::new(config).run(&strategy, check) {
        panic!("{failure}");
    }
}
