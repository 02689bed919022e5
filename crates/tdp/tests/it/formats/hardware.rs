//! A model of how processors interpret an entry: a second reading of the manuals, without the
//! crate's constants.

use super::for_each_format;
use super::strategy::{leaf, leaf_place, leaves_of, meaning, run};
use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::{
    Access, AccessedBy, Arm64Stage2, DirtyBy, Ept, Format, Meaning, Npt, RiscvX4,
};
use proptest::prelude::*;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Load,
    Store,
    Fetch,
}

/// The result of the processor's reading of an entry.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Found {
    /// An access faults, as with a missing translation.
    Nothing,
    /// An access faults, since the entry has a reserved value.
    Reserved,
    /// The walk continues at this frame, with every permission.
    Table(u64),
    /// The access goes to this frame, and the entry gets this value.
    Page(u64, u64),
    /// The access faults, since the page does not permit it, or since software has to set a flag.
    Denied,
}

fn bit(entry: u64, bit: u32) -> bool {
    entry >> bit & 1 != 0
}

fn bits(entry: u64, high: u32, low: u32) -> u64 {
    entry >> low & ((1 << (high - low + 1)) - 1)
}

trait Hardware: Format {
    fn find(entry: u64, level: u32, kind: Kind) -> Found;
    /// The memory type, by its number in the manual.
    fn memory_type(entry: u64) -> u64;
    /// The numbers of write-back, write-combining and device memory.
    const TYPES: [u64; 3];
}

impl<const LEVELS: u32, const AD: bool> Hardware for Ept<LEVELS, AD> {
    /// Write-back (6) with "ignore PAT" as the bit above, write-combining, uncacheable.
    const TYPES: [u64; 3] = [0b1110, 0b0001, 0b0000];

    fn find(entry: u64, level: u32, kind: Kind) -> Found {
        // Present: any of 2:0, under mode-based execute control 10 as well.
        if bits(entry, 2, 0) == 0 && !bit(entry, 10) {
            return Found::Nothing;
        }
        let [read, write, execute] = [0, 1, 2].map(|n| bit(entry, n));
        // Misconfigured: not readable, but writable or (no execute-only) executable.
        if !read || bit(entry, 10) {
            return Found::Reserved;
        }
        // The controls of bits 57, 58, 60, 61 and 63 are off. The crate keeps those bits clear
        // nevertheless.
        if [57, 58, 60, 61, 63].iter().any(|&n| bit(entry, n)) {
            return Found::Reserved;
        }
        if level > 1 && !(bit(entry, 7) && level <= 3) {
            let links = write && execute && bits(entry, 7, 3) == 0;
            return if links {
                Found::Table(bits(entry, 51, 12))
            } else {
                Found::Reserved
            };
        }
        let low = if level == 1 {
            0
        } else {
            bits(entry, 9 * level + 2, 12)
        };
        if low != 0 || [2, 3, 7].contains(&bits(entry, 5, 3)) {
            return Found::Reserved;
        }
        match kind {
            Kind::Store if !write => Found::Denied,
            Kind::Fetch if !execute => Found::Denied,
            Kind::Store if AD => Found::Page(bits(entry, 51, 12), entry | 0x300),
            _ if AD => Found::Page(bits(entry, 51, 12), entry | 0x100),
            _ => Found::Page(bits(entry, 51, 12), entry),
        }
    }

    fn memory_type(entry: u64) -> u64 {
        bits(entry, 5, 3) | bits(entry, 6, 6) << 3
    }
}

impl<const LEVELS: u32> Hardware for Npt<LEVELS> {
    const TYPES: [u64; 3] = [0, 2, 3];

    fn find(entry: u64, level: u32, kind: Kind) -> Found {
        if !bit(entry, 0) {
            return Found::Nothing;
        }
        let [write, user, page, no_execute] = [1, 2, 7, 63].map(|n| bit(entry, n));
        if !user {
            return Found::Denied;
        }
        if level > 1 && !page {
            let links = write && !no_execute && bits(entry, 4, 3) == 0;
            return if links {
                Found::Table(bits(entry, 51, 12))
            } else {
                Found::Reserved
            };
        }
        // PS at levels 4 and 5, and frame bits below the page's size. PAT (7 at level 1, else 12)
        // is unused.
        let low = if level == 1 {
            u64::from(page)
        } else {
            bits(entry, 9 * level + 2, 12)
        };
        if level > 3 || low != 0 {
            return Found::Reserved;
        }
        match kind {
            Kind::Store if !write => Found::Denied,
            Kind::Fetch if no_execute => Found::Denied,
            Kind::Store => Found::Page(bits(entry, 51, 12), entry | 0x60),
            Kind::Load | Kind::Fetch => Found::Page(bits(entry, 51, 12), entry | 0x20),
        }
    }

    fn memory_type(entry: u64) -> u64 {
        bits(entry, 4, 3)
    }
}

impl<const LEVELS: u32, const SVADU: bool> Hardware for RiscvX4<LEVELS, SVADU> {
    const TYPES: [u64; 3] = [0, 1, 2];

    fn find(entry: u64, level: u32, kind: Kind) -> Found {
        if !bit(entry, 0) {
            return Found::Nothing;
        }
        let [read, write, execute, user] = [1, 2, 3, 4].map(|n| bit(entry, n));
        // 60:54 reserved, N (63) without Svnapot, PBMT 3, writable but not readable. G is never set
        // here.
        let reserved = bits(entry, 60, 54) != 0 || bit(entry, 63) || bits(entry, 62, 61) == 3;
        if reserved || (write && !read) || bit(entry, 5) {
            return Found::Reserved;
        }
        if !read && !write && !execute {
            // D, A, U and PBMT are reserved in a pointer.
            let clear = bits(entry, 7, 6) == 0 && !user && bits(entry, 62, 61) == 0;
            return if clear && level > 1 {
                Found::Table(bits(entry, 53, 10))
            } else {
                Found::Reserved
            };
        }
        if level > 1 && bits(entry, 9 * level, 10) != 0 {
            return Found::Reserved;
        }
        let allowed = match kind {
            Kind::Load => read,
            Kind::Store => write,
            Kind::Fetch => execute,
        };
        let updates = if kind == Kind::Store { 0xc0 } else { 0x40 };
        if !allowed || !user || (!SVADU && entry & updates != updates) {
            return Found::Denied;
        }
        Found::Page(bits(entry, 53, 10), entry | updates)
    }

    fn memory_type(entry: u64) -> u64 {
        bits(entry, 62, 61)
    }
}

impl<const IPA_BITS: u32, const HAFDBS: bool, const FWB: bool> Hardware
    for Arm64Stage2<IPA_BITS, HAFDBS, FWB>
{
    const TYPES: [u64; 3] = [if FWB { 6 } else { 15 }, 5, 1];

    fn find(entry: u64, level: u32, kind: Kind) -> Found {
        if !bit(entry, 0) {
            return Found::Nothing;
        }
        if level > 1 && bit(entry, 1) {
            // All other bits of a pointer are ignored or reserved.
            let clear = bits(entry, 11, 2) == 0 && bits(entry, 63, 48) == 0;
            return if clear {
                Found::Table(bits(entry, 47, 12))
            } else {
                Found::Reserved
            };
        }
        // A level-3 descriptor without bit 1 is a block at the manual's level 0.
        if (level == 1 && !bit(entry, 1)) || level > 3 {
            return Found::Reserved;
        }
        // The frame below the block's size, FnXS (11), 50:48, the contiguous hint (52), XN bit 0
        // (53); SH = 3.
        let low = if level == 1 {
            0
        } else {
            bits(entry, 9 * level + 2, 12)
        };
        let odd = bit(entry, 11) || bits(entry, 50, 48) != 0 || bits(entry, 53, 52) != 0;
        if low != 0 || odd || bits(entry, 9, 8) != 3 || bits(entry, 63, 58) != 0 {
            return Found::Reserved;
        }
        let [read, write, used, modifier, never] = [6, 7, 10, 51, 54].map(|n| bit(entry, n));
        let mut updated = entry;
        if !used {
            if !HAFDBS {
                return Found::Denied;
            }
            updated |= 1 << 10;
        }
        let allowed = match kind {
            Kind::Load => read,
            Kind::Fetch => read && !never,
            Kind::Store => {
                if HAFDBS && modifier {
                    updated |= 1 << 7;
                }
                read && (write || HAFDBS && modifier)
            }
        };
        if allowed {
            Found::Page(bits(entry, 47, 12), updated)
        } else {
            Found::Denied
        }
    }

    fn memory_type(entry: u64) -> u64 {
        bits(entry, 5, 2)
    }
}

const KINDS: [(Kind, Access); 3] = [
    (Kind::Load, Access::READ),
    (Kind::Store, Access::READ_WRITE),
    (Kind::Fetch, Access::READ_EXECUTE),
];

for_each_format!(
    the_processor_does_what_the_leaf_says,
    the_processor_stops_at_what_translates_nothing,
    the_processor_follows_table_pointers,
    frames_never_reach_other_fields,
    without_a_flush_nothing_is_let_through_that_the_entry_stops,
    what_narrows_an_entry_needs_a_flush,
);

/// For all leaves at all levels: permissions, frame, memory type, and the bits that the hardware
/// then sets.
fn the_processor_does_what_the_leaf_says<F: Hardware>() {
    run(leaf_place::<F>(), |(level, pfn)| {
        for leaf in leaves_of(pfn) {
            let entry = F::leaf(leaf, level);
            let said = F::canonical(leaf);
            let memory = super::strategy::MEMORY
                .iter()
                .position(|&memory| memory == said.memory);
            prop_assert_eq!(F::memory_type(entry), F::TYPES[memory.unwrap()]);
            let stops = !said.accessed && F::ACCESSED_BY != AccessedBy::Hardware;
            for (kind, access) in KINDS {
                let permitted = match kind {
                    Kind::Load => true,
                    Kind::Store => said.access.write,
                    Kind::Fetch => said.access.execute,
                };
                prop_assert_eq!(F::allows(entry, access), permitted && !stops);
                match F::find(entry, level, kind) {
                    Found::Page(frame, updated) => {
                        prop_assert!(permitted && !stops, "{kind:?} through {leaf:?}, {entry:#x}");
                        prop_assert_eq!(frame, pfn.0);
                        prop_assert_eq!((updated ^ entry) & !F::HARDWARE_UPDATES, 0);
                        prop_assert_eq!(updated & entry, entry, "the hardware only sets bits");
                        prop_assert!(F::is_accessed(updated));
                        let stored = said.dirty || kind == Kind::Store;
                        prop_assert_eq!(F::is_dirty(updated), stored);
                        prop_assert!(F::decode(updated, level).is_some());
                    }
                    Found::Denied | Found::Nothing => {
                        prop_assert!(!permitted || stops, "{kind:?} through {leaf:?}, {entry:#x}");
                    }
                    found => prop_assert!(false, "{found:?} in {leaf:?}, {entry:#x}"),
                }
            }
        }
        Ok(())
    });
}

fn the_processor_stops_at_what_translates_nothing<F: Hardware>() {
    for level in 1..=F::LEVELS {
        for (kind, _) in KINDS {
            assert_eq!(F::find(F::NON_PRESENT, level, kind), Found::Nothing);
            assert_eq!(F::find(F::FROZEN, level, kind), Found::Nothing);
        }
    }
    run((0..=u64::MAX, 0..=u64::MAX), |(gfn, generation)| {
        let marker = F::mmio(Gfn(gfn), generation);
        for level in 1..=F::LEVELS {
            for (kind, _) in KINDS {
                prop_assert_eq!(F::find(marker, level, kind), Found::Nothing);
            }
        }
        Ok(())
    });
    if F::ACCESSED_BY == AccessedBy::Hardware {
        return;
    }
    run(leaf::<F>(), |(level, leaf)| {
        let tracked = F::clear_accessed(F::leaf(leaf, level));
        prop_assert!(F::is_present(tracked));
        for (kind, access) in KINDS {
            let found = F::find(tracked, level, kind);
            let expected = match F::ACCESSED_BY {
                AccessedBy::SavedPermissions => Found::Nothing,
                _ => Found::Denied,
            };
            prop_assert_eq!(found, expected);
            prop_assert!(!F::allows(tracked, access));
        }
        Ok(())
    });
}

fn the_processor_follows_table_pointers<F: Hardware>() {
    run(0..F::PFN_LIMIT.0, |table| {
        let entry = F::table(Pfn(table));
        for level in 2..=F::LEVELS {
            for (kind, _) in KINDS {
                prop_assert_eq!(F::find(entry, level, kind), Found::Table(table));
            }
        }
        Ok(())
    });
    // No other value is followed.
    run(meaning::<F>(), |(level, meaning)| {
        let entry = F::encode(meaning, level);
        let followed = matches!(F::find(entry, level, Kind::Load), Found::Table(_));
        prop_assert_eq!(followed, matches!(meaning, Meaning::Table { .. }));
        Ok(())
    });
}

fn frames_never_reach_other_fields<F: Hardware>() {
    let top = Pfn(F::PFN_LIMIT.0 - 1);
    assert_eq!(F::table(Pfn(u64::MAX)), F::table(top));
    for level in 1..=F::MAX_LEAF_LEVEL {
        let aligned = Pfn(top.0 & !(F::frames_per_entry(level) - 1));
        for (all, none) in leaves_of(Pfn(u64::MAX)).into_iter().zip(leaves_of(Pfn(0))) {
            let (all, none) = (F::leaf(all, level), F::leaf(none, level));
            assert_eq!(F::pfn(all, level), aligned);
            assert_eq!(F::pfn(none, level), Pfn(0));
            let frame = all ^ none;
            assert_eq!(
                frame.count_ones(),
                64 - F::PFN_LIMIT.0.leading_zeros() - 1 - 9 * (level - 1)
            );
            assert_eq!(all & !frame, none, "only the frame differs");
        }
    }
}

#[test]
fn the_dirty_state_of_hardware_formats_is_the_hardwares() {
    // A clean writable leaf: one store makes it dirty without a fault.
    fn check<F: Hardware>() {
        assert_eq!(F::DIRTY_BY, DirtyBy::Hardware);
        for leaf in leaves_of(Pfn(0)) {
            let entry = F::clear_dirty(F::leaf(leaf, 1));
            assert!(!F::is_dirty(entry));
            match F::find(entry, 1, Kind::Store) {
                Found::Page(_, updated) => assert!(F::is_dirty(updated)),
                _ => assert!(!F::is_writable(entry)),
            }
        }
    }
    check::<Ept<4, true>>();
    check::<Npt<4>>();
    check::<RiscvX4<4, true>>();
    check::<Arm64Stage2<48, true, true>>();
}

/// A TLB holds the result for `old` once accessed and dirty are set, and continues to use it.
fn without_a_flush_nothing_is_let_through_that_the_entry_stops<F: Hardware>() {
    run(leaf_place::<F>(), |(level, pfn)| {
        let entries: Vec<u64> = leaves_of(pfn)
            .into_iter()
            .map(|leaf| F::leaf(leaf, level))
            .collect();
        let elsewhere = Pfn(pfn.0 ^ F::frames_per_entry(level));
        let moved = leaves_of(elsewhere)
            .into_iter()
            .map(|leaf| F::leaf(leaf, level));
        let others: Vec<u64> = entries.iter().copied().chain(moved).collect();
        for &old in entries.iter().step_by(5) {
            for &new in &others {
                if F::needs_flush(old, new, level) {
                    continue;
                }
                prop_assert_eq!(F::memory_type(old), F::memory_type(new));
                for (kind, _) in KINDS {
                    let Found::Page(frame, cached) = F::find(old, level, kind) else {
                        continue;
                    };
                    if F::is_dirty(cached) != F::is_dirty(old) {
                        continue;
                    }
                    // Apart from the accessed state, a walk of the new entry must end like the
                    // cached one.
                    let Found::Page(now, updated) = F::find(F::set_accessed(new), level, kind)
                    else {
                        return Err(TestCaseError::fail(format!(
                            "{kind:?}: {old:#x} to {new:#x}"
                        )));
                    };
                    prop_assert_eq!(now, frame);
                    let missed = kind == Kind::Store && F::is_dirty(updated) != F::is_dirty(new);
                    prop_assert!(!missed, "a store is not seen: {old:#x} to {new:#x}");
                }
            }
        }
        Ok(())
    });
}

fn what_narrows_an_entry_needs_a_flush<F: Hardware>() {
    run(
        (leaf::<F>(), 0..F::PFN_LIMIT.0),
        |((level, leaf), other)| {
            let (entry, said) = (F::leaf(leaf, level), F::canonical(leaf));
            let flush = |new| F::needs_flush(entry, new, level);
            for gone in [F::NON_PRESENT, F::FROZEN, F::mmio(Gfn(other), other)] {
                prop_assert!(flush(gone));
                prop_assert!(
                    !F::needs_flush(gone, entry, level),
                    "there was no translation"
                );
            }
            prop_assert!(!flush(entry));
            prop_assert_eq!(flush(F::write_protect(entry)), said.access.write);
            prop_assert_eq!(flush(F::clear_dirty(entry)), said.dirty);
            let tracked = pageferry_tdp::format::Writes::MmuForbids;
            prop_assert_eq!(
                flush(F::set_writes(entry, tracked)),
                said.writes.mmu_writable()
            );
            let widened = F::make_writable(entry).unwrap_or(entry);
            prop_assert!(!flush(F::set_dirty(F::set_accessed(widened))));
            if level > 1 {
                let table = F::table(Pfn(other));
                prop_assert!(flush(table));
                prop_assert!(F::needs_flush(table, entry, level));
                prop_assert!(F::needs_flush(table, F::FROZEN, level));
                prop_assert!(!F::needs_flush(table, table, level));
            }
            Ok(())
        },
    );
}
