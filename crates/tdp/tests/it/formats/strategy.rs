//! Arbitrary leaves and meanings.

use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::{Access, Format, Leaf, Meaning, MemoryType, Writes};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::fmt::Debug;

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

/// The limits of a format. Strategies take them as values, so that they are compiled once and not
/// for each format.
#[derive(Clone, Copy)]
struct Limits {
    levels: u32,
    max_leaf_level: u32,
    pfns: u64,
    gfns: u64,
    generations: u64,
    frames_per_entry: fn(u32) -> u64,
    canonical: fn(Leaf) -> Leaf,
}

impl Limits {
    fn of<F: Format>() -> Self {
        Self {
            levels: F::LEVELS,
            max_leaf_level: F::MAX_LEAF_LEVEL,
            pfns: F::PFN_LIMIT.0,
            gfns: F::GFN_LIMIT.0,
            generations: 1 << F::MMIO_GENERATION_BITS,
            frames_per_entry: F::frames_per_entry,
            canonical: F::canonical,
        }
    }

    fn leaf_place(self) -> BoxedStrategy<(u32, Pfn)> {
        (1..=self.max_leaf_level, 0..self.pfns)
            .prop_map(move |(level, pfn)| (level, Pfn(pfn & !((self.frames_per_entry)(level) - 1))))
            .boxed()
    }

    fn leaf(self) -> BoxedStrategy<(u32, Leaf)> {
        (self.leaf_place(), any::<prop::sample::Index>())
            .prop_map(|((level, pfn), index)| {
                let all = leaves_of(pfn);
                (level, all[index.index(all.len())])
            })
            .boxed()
    }

    fn meaning(self) -> BoxedStrategy<(u32, Meaning)> {
        prop_oneof![
            (1..=self.levels).prop_map(|level| (level, Meaning::NonPresent)),
            (1..=self.levels).prop_map(|level| (level, Meaning::Frozen)),
            (1..=self.levels, 0..self.gfns, 0..self.generations).prop_map(
                |(level, gfn, generation)| {
                    let gfn = Gfn(gfn);
                    (level, Meaning::Mmio { gfn, generation })
                }
            ),
            (2..=self.levels, 0..self.pfns)
                .prop_map(|(level, table)| (level, Meaning::Table { table: Pfn(table) })),
            self.leaf()
                .prop_map(move |(level, leaf)| (level, Meaning::Leaf((self.canonical)(leaf)))),
        ]
        .boxed()
    }
}

/// A level that may hold leaves, and a frame at which such a leaf may start.
pub(crate) fn leaf_place<F: Format>() -> BoxedStrategy<(u32, Pfn)> {
    Limits::of::<F>().leaf_place()
}

pub(crate) fn leaf<F: Format>() -> BoxedStrategy<(u32, Leaf)> {
    Limits::of::<F>().leaf()
}

/// A level above 1, and a leaf for it.
pub(crate) fn large_leaf<F: Format>() -> BoxedStrategy<(u32, Leaf)> {
    fn large(leaf: BoxedStrategy<(u32, Leaf)>) -> BoxedStrategy<(u32, Leaf)> {
        leaf.prop_filter("4 KiB", |&(level, _)| level > 1).boxed()
    }
    large(leaf::<F>())
}

/// A level and a meaning that an entry may have there, in the form that `decode` returns.
pub(crate) fn meaning<F: Format>() -> BoxedStrategy<(u32, Meaning)> {
    Limits::of::<F>().meaning()
}

/// Runs `check` on 256 values of `strategy`.
pub(crate) fn run<S: Strategy<Value: 'static> + 'static>(
    strategy: S,
    check: impl Fn(S::Value) -> Result<(), TestCaseError>,
) {
    run_boxed(&strategy.boxed(), &check);
}

fn run_boxed<T: Debug>(
    strategy: &BoxedStrategy<T>,
    check: &dyn Fn(T) -> Result<(), TestCaseError>,
) {
    let config = Config {
        failure_persistence: None,
        ..Config::default()
    };
    if let Err(failure) = TestRunner::new(config).run(strategy, check) {
        panic!("{failure}");
    }
}
