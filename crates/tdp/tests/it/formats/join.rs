//! Splitting a huge leaf and joining it again.

use super::for_each_format;
use super::strategy::{large_leaf, leaf, run};
use pageferry_addr::Pfn;
use pageferry_tdp::format::{AccessedBy, Format, Leaf, Meaning};
use proptest::prelude::*;

for_each_format!(
    children_cover_exactly_the_parent,
    a_split_leaf_joins_to_itself,
    leaves_that_differ_do_not_join,
    recovery_takes_over_all_but_the_frame,
);

fn children<F: Format>(entry: u64, level: u32) -> Vec<u64> {
    (0..512)
        .map(|child| F::split(entry, level, child))
        .collect()
}

fn children_cover_exactly_the_parent<F: Format>() {
    run(large_leaf::<F>(), |(level, leaf)| {
        let entry = F::leaf(leaf, level);
        let said = F::canonical(leaf);
        let mut next = said.pfn.0;
        for child in children::<F>(entry, level) {
            let expected = Leaf {
                pfn: Pfn(next),
                ..said
            };
            prop_assert_eq!(F::decode(child, level - 1), Some(Meaning::Leaf(expected)));
            next += F::frames_per_entry(level - 1);
        }
        prop_assert_eq!(next, said.pfn.0 + F::frames_per_entry(level));
        Ok(())
    });
}

fn a_split_leaf_joins_to_itself<F: Format>() {
    run((large_leaf::<F>(), 0..512usize), |((level, leaf), one)| {
        let entry = F::leaf(leaf, level);
        let all = children::<F>(entry, level);
        prop_assert_eq!(F::join(all.iter().copied(), level - 1), Some(entry));
        prop_assert_eq!(F::parent_of(all[one], level - 1), entry);
        // One accessed child makes the whole accessed, and one child with a hardware dirty bit
        // makes it dirty.
        if F::ACCESSED_BY != AccessedBy::SavedPermissions {
            let mut all: Vec<u64> = all.into_iter().map(F::clear_accessed).collect();
            let none = F::clear_accessed(entry);
            prop_assert_eq!(F::join(all.iter().copied(), level - 1), Some(none));
            all[one] = F::set_accessed(all[one]);
            prop_assert_eq!(
                F::join(all.iter().copied(), level - 1),
                Some(F::set_accessed(entry))
            );
        }
        let mut all = children::<F>(F::clear_dirty(entry), level);
        all[one] = F::set_dirty(all[one]);
        let dirty = F::set_dirty(F::clear_dirty(entry));
        prop_assert_eq!(F::join(all, level - 1), Some(dirty));
        Ok(())
    });
}

fn leaves_that_differ_do_not_join<F: Format>() {
    run(
        (large_leaf::<F>(), leaf::<F>(), 0..512usize),
        |((level, leaf), (_, other), one)| {
            let level = level - 1;
            let entry = F::leaf(leaf, level + 1);
            let all = children::<F>(entry, level + 1);
            let without = all.iter().copied().take(one);
            prop_assert_eq!(F::join(without, level), None);
            let more = all.iter().copied().chain([all[one]]);
            prop_assert_eq!(F::join(more, level), None);

            let replace = |value| {
                let mut changed = all.clone();
                changed[one] = value;
                let joined = F::join(changed, level);
                prop_assert!(
                    all[one] == value || joined.is_none(),
                    "{value:#x} for {:#x}",
                    all[one]
                );
                Ok(())
            };
            replace(F::NON_PRESENT)?;
            replace(F::FROZEN)?;
            replace(F::mmio(pageferry_addr::Gfn(0), 0))?;
            if level > 1 {
                replace(F::table(leaf.pfn))?;
            }
            let (here, other) = (F::canonical(leaf), F::canonical(other));
            let pfn = Pfn(here.pfn.0 + one as u64 * F::frames_per_entry(level));
            let alone = Leaf { pfn, ..here };
            replace(F::leaf(
                Leaf {
                    pfn: Pfn(pfn.0 ^ F::frames_per_entry(level)),
                    ..here
                },
                level,
            ))?;
            let mut execute = alone;
            execute.access.execute ^= true;
            replace(F::leaf(execute, level))?;
            if other.memory != here.memory {
                replace(F::leaf(
                    Leaf {
                        memory: other.memory,
                        ..alone
                    },
                    level,
                ))?;
            }
            if other.writes != here.writes {
                replace(F::set_writes(all[one], other.writes))?;
            }
            if here.access.write {
                replace(F::write_protect(all[one]))?;
            }
            Ok(())
        },
    );
    // Consecutive frames that start in the middle of a huge page.
    let leaf = Leaf {
        pfn: Pfn(1),
        ..ordinary()
    };
    let moved = (0..512).map(|child| {
        F::leaf(
            Leaf {
                pfn: Pfn(leaf.pfn.0 + child),
                ..leaf
            },
            1,
        )
    });
    assert_eq!(F::join(moved, 1), None);
    // No leaves above level 3.
    assert_eq!(F::join(vec![F::leaf(ordinary(), 3); 512], 3), None);
}

fn recovery_takes_over_all_but_the_frame<F: Format>() {
    run(leaf::<F>(), |(level, leaf)| {
        if level == F::MAX_LEAF_LEVEL {
            return Ok(());
        }
        let said = F::canonical(leaf);
        let whole = F::frames_per_entry(level + 1);
        let expected = Leaf {
            pfn: Pfn(said.pfn.0 / whole * whole),
            ..said
        };
        let parent = F::parent_of(F::leaf(leaf, level), level);
        prop_assert_eq!(F::decode(parent, level + 1), Some(Meaning::Leaf(expected)));
        Ok(())
    });
}

fn ordinary() -> Leaf {
    use pageferry_tdp::format::{Access, MemoryType, Writes};
    Leaf {
        pfn: Pfn(0),
        access: Access::ALL,
        memory: MemoryType::WriteBack,
        accessed: true,
        dirty: true,
        writes: Writes::Allowed,
    }
}
