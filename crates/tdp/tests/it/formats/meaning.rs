//! Entries and meanings map one to one, and each change of an entry is the change of its meaning.

use super::for_each_format;
use super::strategy::{WRITES, leaf, leaf_place, leaves_of, meaning, run};
use pageferry_addr::Pfn;
use pageferry_tdp::format::{AccessedBy, DirtyBy, Format, Leaf, Meaning, Writes};
use proptest::prelude::*;
use std::collections::HashMap;

for_each_format!(
    decoding_gives_back_what_was_encoded,
    different_meanings_are_different_entries,
    a_flipped_bit_never_keeps_the_meaning,
    changes_of_the_entry_are_changes_of_the_meaning,
    permissions_keep_their_order,
);

fn decoding_gives_back_what_was_encoded<F: Format>() {
    run(meaning::<F>(), |(level, meaning)| {
        let entry = F::encode(meaning, level);
        prop_assert_eq!(F::decode(entry, level), Some(meaning), "{:#x}", entry);
        prop_assert_eq!(F::is_frozen(entry), meaning == Meaning::Frozen);
        prop_assert_eq!(F::is_mmio(entry), matches!(meaning, Meaning::Mmio { .. }));
        prop_assert_eq!(
            F::is_table(entry, level),
            matches!(meaning, Meaning::Table { .. })
        );
        prop_assert_eq!(
            F::is_leaf(entry, level),
            matches!(meaning, Meaning::Leaf(_))
        );
        let present = matches!(meaning, Meaning::Table { .. } | Meaning::Leaf(_));
        prop_assert_eq!(F::is_present(entry), present);
        Ok(())
    });
    run(leaf_place::<F>(), |(level, pfn)| {
        for leaf in leaves_of(pfn) {
            let said = F::canonical(leaf);
            prop_assert_eq!(F::canonical(said), said);
            prop_assert_eq!(
                F::decode(F::leaf(leaf, level), level),
                Some(Meaning::Leaf(said))
            );
        }
        Ok(())
    });
}

/// All leaves of a few frames, all tables and markers of a few more, in one map.
fn different_meanings_are_different_entries<F: Format>() {
    for level in 1..=F::LEVELS {
        let mut meanings = vec![Meaning::NonPresent, Meaning::Frozen];
        let frame = 1u64 << (9 * (level - 1));
        for number in [0, 1, 2, 0x80, 0x1a0, 0x1ff] {
            if F::may_hold_leaves(level) {
                let leaves = leaves_of(Pfn(number * frame)).into_iter().map(F::canonical);
                meanings.extend(leaves.map(Meaning::Leaf));
            }
            if level > 1 {
                meanings.push(Meaning::Table { table: Pfn(number) });
                meanings.push(Meaning::Table {
                    table: Pfn(F::PFN_LIMIT.0 - 1 - number),
                });
            }
            for generation in [0, 1, 0x3f, 0x40, (1 << F::MMIO_GENERATION_BITS) - 1] {
                for gfn in [number, F::GFN_LIMIT.0 - 1 - number] {
                    meanings.push(Meaning::Mmio {
                        gfn: pageferry_addr::Gfn(gfn),
                        generation,
                    });
                }
            }
        }
        let mut seen = HashMap::new();
        for meaning in meanings {
            let entry = F::encode(meaning, level);
            let other = *seen.entry(entry).or_insert(meaning);
            assert_eq!(other, meaning, "{entry:#x} at level {level}");
        }
    }
}

fn a_flipped_bit_never_keeps_the_meaning<F: Format>() {
    run(meaning::<F>(), |(level, meaning)| {
        let entry = F::encode(meaning, level);
        for bit in 0..64 {
            let flipped = entry ^ 1 << bit;
            if let Some(other) = F::decode(flipped, level) {
                prop_assert_ne!(other, meaning);
                prop_assert_eq!(F::encode(other, level), flipped);
            }
        }
        Ok(())
    });
}

/// The effects of the functions that change leaves, in terms of meanings.
fn changes_of_the_entry_are_changes_of_the_meaning<F: Format>() {
    let saves = F::ACCESSED_BY == AccessedBy::SavedPermissions;
    let dirty_bit = |leaf: Leaf| {
        F::DIRTY_BY == DirtyBy::Hardware && leaf.writes != Writes::AllowedLoggedByFault
    };
    let with_write = |leaf: Leaf, write| {
        let mut leaf = leaf;
        leaf.access.write = write;
        leaf
    };
    run(leaf::<F>(), |(level, leaf)| {
        let entry = F::leaf(leaf, level);
        let old = F::canonical(leaf);
        let read = |entry| match F::decode(entry, level) {
            Some(Meaning::Leaf(leaf)) => leaf,
            other => panic!("{entry:#x} is {other:?}"),
        };
        let protected = Leaf {
            dirty: false,
            ..with_write(old, false)
        };
        prop_assert_eq!(read(F::write_protect(entry)), protected);

        let writable = F::make_writable(entry).map(read);
        let expected = old.writes.mmu_writable().then(|| {
            let dirty = old.dirty || !dirty_bit(old);
            Leaf {
                dirty,
                accessed: old.accessed || saves,
                ..with_write(old, true)
            }
        });
        prop_assert_eq!(writable, expected);

        let unused = Leaf {
            accessed: false,
            ..if saves { protected } else { old }
        };
        prop_assert_eq!(read(F::clear_accessed(entry)), unused);
        prop_assert_eq!(
            F::clear_accessed(F::clear_accessed(entry)),
            F::clear_accessed(entry)
        );
        prop_assert_eq!(
            read(F::set_accessed(entry)),
            Leaf {
                accessed: true,
                ..old
            }
        );

        let clean = if dirty_bit(old) {
            Leaf {
                dirty: false,
                ..old
            }
        } else {
            protected
        };
        prop_assert_eq!(read(F::clear_dirty(entry)), clean);
        let dirty = Leaf {
            dirty: old.access.write,
            ..old
        };
        prop_assert_eq!(read(F::set_dirty(entry)), dirty);

        for writes in WRITES {
            let mut expected = Leaf { writes, ..old };
            if !writes.mmu_writable() {
                expected = Leaf {
                    writes,
                    ..protected
                };
            } else if writes == Writes::AllowedLoggedByFault {
                expected.dirty = expected.access.write;
            }
            prop_assert_eq!(read(F::set_writes(entry, writes)), expected);
        }
        prop_assert_eq!(F::writes(entry), old.writes);
        prop_assert_eq!(F::mmu_writable(entry), old.writes.mmu_writable());
        prop_assert_eq!(F::memory(entry), old.memory);
        Ok(())
    });
}

/// Dirty implies writable, which implies MMU-writable, which implies host-writable, for every
/// request.
fn permissions_keep_their_order<F: Format>() {
    for leaf in leaves_of(Pfn(0)) {
        let entry = F::leaf(leaf, 1);
        assert!(!F::is_dirty(entry) || F::is_writable(entry));
        assert!(!F::is_writable(entry) || F::mmu_writable(entry));
        assert!(!F::writes(entry).mmu_writable() || F::writes(entry).host_writable());
        assert_eq!(
            F::writes(entry).host_writable(),
            leaf.writes != Writes::HostForbids
        );
    }
}
