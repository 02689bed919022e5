//! The operations on the entries of all formats: one set of functions moves the bits.

use super::entry::{Access, AccessedBy, DirtyBy, Leaf, Meaning, MemoryType, Writes};
use super::layout::{EntryLayout, MMIO_GFN_SHIFT, MMIO_LOW_BITS, MMIO_LOW_SHIFT, low_bits};
use pageferry_addr::{Gfn, PAGE_SHIFT, Pfn};

/// The operations on entries, the same for every [`EntryLayout`].
///
/// The level is that of the table in which the entry stands. A function whose doc says *leaf*
/// expects a present leaf, and `debug_assert`s check that.
///
/// All functions are pure. An MMU that changes a live entry computes the new value from the one it
/// has read, and stores it by compare-exchange. The hardware may set
/// [`HARDWARE_UPDATES`](EntryLayout::HARDWARE_UPDATES) in between.
pub trait Format: EntryLayout {
    /// The number of entries in a table of `level`.
    #[inline]
    #[must_use]
    fn entries(level: u32) -> usize {
        1 << if level == Self::LEVELS {
            Self::ROOT_INDEX_BITS
        } else {
            Self::INDEX_BITS
        }
    }

    /// The number of guest frames that one entry of a table of `level` covers.
    #[inline]
    #[must_use]
    fn frames_per_entry(level: u32) -> u64 {
        1 << ((level - 1) * Self::INDEX_BITS)
    }

    /// The index of the entry for `gfn` in a table of `level`. Bits of `gfn` above the format's are
    /// ignored.
    #[inline]
    #[must_use]
    fn index(gfn: Gfn, level: u32) -> usize {
        (gfn.0 >> ((level - 1) * Self::INDEX_BITS)) as usize & (Self::entries(level) - 1)
    }

    /// Whether tables of `level` may hold leaves.
    #[inline]
    #[must_use]
    fn may_hold_leaves(level: u32) -> bool {
        1 <= level && level <= Self::MAX_LEAF_LEVEL
    }

    /// The bits of the frame number that a leaf of `level` uses. Lower bits are reserved there.
    #[inline]
    #[must_use]
    fn pfn_mask(level: u32) -> u64 {
        (low_bits(Self::PFN_BITS) & !(Self::frames_per_entry(level) - 1)) << Self::PFN_SHIFT
    }

    // Making entries.

    /// A pointer to the next table, which fills frame `table` or starts in it.
    #[inline]
    #[must_use]
    fn table(table: Pfn) -> u64 {
        frame_bits::<Self>(table, 1) | Self::TABLE
    }

    /// A leaf of `level` with the [canonical](Self::canonical) contents of `leaf`.
    ///
    /// Bits of the frame number below the leaf's size or above
    /// [`PFN_LIMIT`](EntryLayout::PFN_LIMIT) are cut off.
    #[inline]
    #[must_use]
    fn leaf(leaf: Leaf, level: u32) -> u64 {
        const { Self::CHECKED };
        debug_assert!(Self::may_hold_leaves(level), "no leaves at level {level}");
        let leaf = Self::canonical(leaf);
        let execute = if leaf.access.execute {
            Self::EXECUTE
        } else {
            Self::NO_EXECUTE
        };
        let write = if leaf.access.write { Self::WRITE } else { 0 };
        let dirty = if leaf.dirty { Self::DIRTY } else { 0 };
        let entry = frame_bits::<Self>(leaf.pfn, level)
            | Self::LEAF
            | Self::leaf_kind(level)
            | Self::memory_bits(leaf.memory)
            | Self::ACCESSED
            | class_bits::<Self>(leaf.writes)
            | execute
            | write
            | dirty;
        if leaf.accessed {
            entry
        } else {
            Self::clear_accessed(entry)
        }
    }

    /// The contents that [`leaf`](Self::leaf) stores for `leaf`, the frame number aside.
    ///
    /// - A leaf allows stores only if [`Writes::mmu_writable`] holds. If permissions are saved
    ///   ([`AccessedBy::SavedPermissions`]), it must also be accessed.
    /// - Only a leaf that allows stores is dirty. If write protection keeps the dirty state
    ///   ([`DirtyBy::WriteProtection`], [`Writes::AllowedLoggedByFault`]), each such leaf is dirty.
    #[inline]
    #[must_use]
    fn canonical(leaf: Leaf) -> Leaf {
        let saved = Self::ACCESSED_BY == AccessedBy::SavedPermissions;
        let write = leaf.access.write && leaf.writes.mmu_writable() && (leaf.accessed || !saved);
        let by_fault = Self::DIRTY_BY == DirtyBy::WriteProtection
            || leaf.writes == Writes::AllowedLoggedByFault;
        let access = Access {
            write,
            ..leaf.access
        };
        Leaf {
            access,
            dirty: write && (leaf.dirty || by_fault),
            ..leaf
        }
    }

    /// A marker that no slot held `gfn` under `generation`. It keeps only the low
    /// [`MMIO_GENERATION_BITS`](EntryLayout::MMIO_GENERATION_BITS) of that. The hardware stops at
    /// it.
    ///
    /// The frame number is stored inverted. On a processor with the L1 Terminal Fault flaw, a
    /// non-present entry must not name existing memory.
    #[inline]
    #[must_use]
    fn mmio(gfn: Gfn, generation: u64) -> u64 {
        let low = generation & low_bits(MMIO_LOW_BITS);
        let high =
            (generation >> MMIO_LOW_BITS) & low_bits(Self::MMIO_GENERATION_BITS - MMIO_LOW_BITS);
        let frame = !gfn.0 & low_bits(Self::MMIO_GFN_BITS);
        Self::MMIO
            | low << MMIO_LOW_SHIFT
            | frame << MMIO_GFN_SHIFT
            | high << (MMIO_GFN_SHIFT + Self::MMIO_GFN_BITS)
    }

    /// The entry of `level` that means `meaning`, with [canonical](Self::canonical) contents if it
    /// is a leaf.
    #[must_use]
    fn encode(meaning: Meaning, level: u32) -> u64 {
        match meaning {
            Meaning::NonPresent => Self::NON_PRESENT,
            Meaning::Frozen => Self::FROZEN,
            Meaning::Mmio { gfn, generation } => Self::mmio(gfn, generation),
            Meaning::Table { table } => Self::table(table),
            Meaning::Leaf(leaf) => Self::leaf(leaf, level),
        }
    }

    // Reading entries.

    /// Whether the entry is a leaf or a table pointer. A leaf with saved permissions is present,
    /// though the hardware stops at it.
    #[inline]
    #[must_use]
    fn is_present(entry: u64) -> bool {
        entry & Self::PRESENT != 0
    }

    /// Whether the entry is a translation.
    #[inline]
    #[must_use]
    fn is_leaf(entry: u64, level: u32) -> bool {
        Self::is_present(entry) && Self::is_leaf_kind(entry, level)
    }

    /// Whether the entry points to a table. Entries of level 1 never do.
    #[inline]
    #[must_use]
    fn is_table(entry: u64, level: u32) -> bool {
        level > 1 && Self::is_present(entry) && !Self::is_leaf_kind(entry, level)
    }

    /// Whether the entry is [`FROZEN`](EntryLayout::FROZEN).
    #[inline]
    #[must_use]
    fn is_frozen(entry: u64) -> bool {
        entry == Self::FROZEN
    }

    /// Whether the entry is an MMIO marker.
    #[inline]
    #[must_use]
    fn is_mmio(entry: u64) -> bool {
        entry & (Self::PRESENT | Self::HARDWARE_PRESENT | Self::MMIO) == Self::MMIO
    }

    /// The guest frame of an MMIO marker.
    #[inline]
    #[must_use]
    fn mmio_gfn(marker: u64) -> Gfn {
        debug_assert!(Self::is_mmio(marker));
        Gfn((!marker >> MMIO_GFN_SHIFT) & low_bits(Self::MMIO_GFN_BITS))
    }

    /// The generation of an MMIO marker.
    #[inline]
    #[must_use]
    fn mmio_generation(marker: u64) -> u64 {
        debug_assert!(Self::is_mmio(marker));
        let low = (marker >> MMIO_LOW_SHIFT) & low_bits(MMIO_LOW_BITS);
        low | (marker >> (MMIO_GFN_SHIFT + Self::MMIO_GFN_BITS)) << MMIO_LOW_BITS
    }

    /// The frame of the next table.
    #[inline]
    #[must_use]
    fn table_pfn(entry: u64) -> Pfn {
        Self::pfn(entry, 1)
    }

    /// The physical address of the next table, in bytes.
    #[inline]
    #[must_use]
    fn table_address(entry: u64) -> u64 {
        Self::table_pfn(entry).0 << PAGE_SHIFT
    }

    /// The first frame of a leaf of `level`.
    #[inline]
    #[must_use]
    fn pfn(entry: u64, level: u32) -> Pfn {
        debug_assert!(Self::is_present(entry));
        Pfn((entry & Self::pfn_mask(level)) >> Self::PFN_SHIFT)
    }

    /// Whether the leaf allows stores. The hardware may have to set the dirty bit first.
    #[inline]
    #[must_use]
    fn is_writable(entry: u64) -> bool {
        debug_assert!(Self::is_present(entry));
        entry & Self::WRITE == Self::WRITE
    }

    /// Whether the leaf allows fetches, now or once its saved permissions are restored.
    #[inline]
    #[must_use]
    fn is_executable(entry: u64) -> bool {
        Self::set_accessed(entry) & (Self::EXECUTE | Self::NO_EXECUTE) == Self::EXECUTE
    }

    /// Whether the leaf was used.
    #[inline]
    #[must_use]
    fn is_accessed(entry: u64) -> bool {
        debug_assert!(Self::is_present(entry));
        match Self::ACCESSED_BY {
            AccessedBy::SavedPermissions => entry & Self::HARDWARE_PRESENT != 0,
            AccessedBy::Hardware | AccessedBy::FaultOnClear => entry & Self::ACCESSED != 0,
        }
    }

    /// Whether the leaf was stored to. If write protection keeps the dirty state: whether the leaf
    /// allows stores.
    #[inline]
    #[must_use]
    fn is_dirty(entry: u64) -> bool {
        debug_assert!(Self::is_present(entry));
        match Self::DIRTY_BY {
            DirtyBy::Hardware => entry & Self::DIRTY != 0,
            DirtyBy::WriteProtection => Self::is_writable(entry),
        }
    }

    /// The permission to make the leaf writable.
    #[inline]
    #[must_use]
    fn writes(entry: u64) -> Writes {
        debug_assert!(Self::is_present(entry));
        match (
            entry & Self::HOST_WRITABLE != 0,
            entry & Self::MMU_WRITABLE != 0,
        ) {
            (false, false) => Writes::HostForbids,
            (true, false) => Writes::MmuForbids,
            (true, true) => Writes::Allowed,
            (false, true) => Writes::AllowedLoggedByFault,
        }
    }

    /// Whether the fast path may make the leaf writable: [`Writes::mmu_writable`], tested by one
    /// bit.
    #[inline]
    #[must_use]
    fn mmu_writable(entry: u64) -> bool {
        debug_assert!(Self::is_present(entry));
        entry & Self::MMU_WRITABLE != 0
    }

    /// The caching of the leaf's page.
    #[inline]
    #[must_use]
    fn memory(entry: u64) -> MemoryType {
        debug_assert!(Self::is_present(entry));
        let bits = entry & Self::MEMORY;
        if bits == Self::memory_bits(MemoryType::WriteBack) {
            MemoryType::WriteBack
        } else if bits == Self::memory_bits(MemoryType::WriteCombining) {
            MemoryType::WriteCombining
        } else {
            MemoryType::Device
        }
    }

    /// Whether the hardware allows a load and `access` through the leaf without any fault. If so, a
    /// fault on the leaf was spurious.
    #[inline]
    #[must_use]
    fn allows(entry: u64, access: Access) -> bool {
        let used = Self::ACCESSED_BY == AccessedBy::Hardware || Self::is_accessed(entry);
        let write = !access.write || Self::is_writable(entry);
        used && write && (!access.execute || Self::is_executable(entry))
    }

    /// The meaning of the entry at `level`, or `None` for a value that no function here makes. An
    /// entry of a live table always has a meaning.
    #[must_use]
    fn decode(entry: u64, level: u32) -> Option<Meaning> {
        let meaning = if entry == Self::NON_PRESENT {
            Meaning::NonPresent
        } else if Self::is_frozen(entry) {
            Meaning::Frozen
        } else if Self::is_mmio(entry) {
            let generation = Self::mmio_generation(entry);
            Meaning::Mmio {
                gfn: Self::mmio_gfn(entry),
                generation,
            }
        } else if Self::is_table(entry, level) {
            Meaning::Table {
                table: Self::table_pfn(entry),
            }
        } else if Self::is_leaf(entry, level) && Self::may_hold_leaves(level) {
            let (write, execute) = (Self::is_writable(entry), Self::is_executable(entry));
            Meaning::Leaf(Leaf {
                pfn: Self::pfn(entry, level),
                access: Access { write, execute },
                memory: Self::memory(entry),
                accessed: Self::is_accessed(entry),
                dirty: Self::is_dirty(entry),
                writes: Self::writes(entry),
            })
        } else {
            return None;
        };
        (Self::encode(meaning, level) == entry).then_some(meaning)
    }

    // Changing entries.

    /// The leaf without permission to store, and clean. The old value tells whether it was dirty.
    #[inline]
    #[must_use]
    fn write_protect(entry: u64) -> u64 {
        debug_assert!(Self::is_present(entry));
        entry & !(Self::WRITE | Self::DIRTY)
    }

    /// The leaf with permission to store, or `None` if its [`Writes`] forbids that.
    ///
    /// Saved permissions are restored. If write protection keeps the dirty state, the leaf is now
    /// dirty, and the caller must tell the log.
    #[inline]
    #[must_use]
    fn make_writable(entry: u64) -> Option<u64> {
        if !Self::mmu_writable(entry) {
            return None;
        }
        let dirty = if logged_by_fault::<Self>(entry) {
            Self::DIRTY
        } else {
            0
        };
        let entry = match Self::ACCESSED_BY {
            AccessedBy::SavedPermissions => Self::set_accessed(entry),
            AccessedBy::Hardware | AccessedBy::FaultOnClear => entry,
        };
        Some(entry | Self::WRITE | dirty)
    }

    /// The leaf, not accessed. Unless the hardware sets the bit, the next access through it faults.
    /// If permissions are saved, the leaf loses the permission to store, and with it the dirty
    /// state.
    ///
    /// Aging does not flush. So stores may continue through a stale translation that the entry no
    /// longer allows. A thread that reads a log must therefore flush for every page that it
    /// reports, not only for the entries that the reading has changed.
    #[inline]
    #[must_use]
    fn clear_accessed(entry: u64) -> u64 {
        debug_assert!(Self::is_present(entry));
        match Self::ACCESSED_BY {
            AccessedBy::SavedPermissions => {
                let saved = (entry & Self::SAVED) << Self::SAVED_SHIFT;
                (entry & !Self::HARDWARE_PRESENT) | saved
            }
            AccessedBy::Hardware | AccessedBy::FaultOnClear => entry & !Self::ACCESSED,
        }
    }

    /// The leaf, accessed. A fault stores this value if [`clear_accessed`](Self::clear_accessed)
    /// has stopped the access.
    #[inline]
    #[must_use]
    fn set_accessed(entry: u64) -> u64 {
        debug_assert!(Self::is_present(entry));
        match Self::ACCESSED_BY {
            AccessedBy::SavedPermissions => {
                let saved = entry & (Self::SAVED << Self::SAVED_SHIFT);
                (entry & !saved) | saved >> Self::SAVED_SHIFT
            }
            AccessedBy::Hardware | AccessedBy::FaultOnClear => entry | Self::ACCESSED,
        }
    }

    /// The leaf, clean, so that the next store is noticed. The hardware sets the dirty bit, or the
    /// store faults if write protection keeps the dirty state.
    #[inline]
    #[must_use]
    fn clear_dirty(entry: u64) -> u64 {
        if Self::DIRTY_BY == DirtyBy::WriteProtection || logged_by_fault::<Self>(entry) {
            Self::write_protect(entry)
        } else {
            entry & !Self::DIRTY
        }
    }

    /// The leaf, dirty if it is writable. This saves the hardware an update if a store is about to
    /// come.
    #[inline]
    #[must_use]
    fn set_dirty(entry: u64) -> u64 {
        if Self::is_writable(entry) {
            entry | Self::DIRTY
        } else {
            entry
        }
    }

    /// The leaf with another class of [`Writes`]. It loses the permission to store if the class
    /// forbids it. A writable leaf becomes dirty if the class equates dirty and writable.
    #[inline]
    #[must_use]
    fn set_writes(entry: u64, writes: Writes) -> u64 {
        debug_assert!(Self::is_present(entry));
        let entry =
            entry & !(Self::HOST_WRITABLE | Self::MMU_WRITABLE) | class_bits::<Self>(writes);
        match writes {
            Writes::HostForbids | Writes::MmuForbids => Self::write_protect(entry),
            Writes::Allowed => entry,
            Writes::AllowedLoggedByFault => Self::set_dirty(entry),
        }
    }

    /// Whether a TLB that has used `old` may allow accesses that `new` stops. Examples are another
    /// page, a store, a fetch, or a store that should set a clear dirty bit. The change takes
    /// effect only after a flush.
    ///
    /// - The accessed state needs no flush: an access through a stale translation does not count.
    /// - A leaf that loses [`Writes::mmu_writable`] needs a flush even if it was write-protected.
    ///   The thread that write-protected it for a log may not have flushed yet (as in KVM's
    ///   `spte.h`).
    /// - A leaf that becomes a table counts as a change that needs a flush. A caller may skip it if
    ///   the table translates the same and [`BREAK_BEFORE_MAKE`](EntryLayout::BREAK_BEFORE_MAKE) is
    ///   false.
    #[inline]
    #[must_use]
    fn needs_flush(old: u64, new: u64, level: u32) -> bool {
        if !Self::is_leaf(old, level) {
            return Self::is_table(old, level) && old != new;
        }
        if !Self::is_leaf(new, level) {
            return true;
        }
        let moved = (old ^ new) & (Self::pfn_mask(level) | Self::MEMORY);
        let lost = old & !new & (Self::WRITE | Self::DIRTY | Self::MMU_WRITABLE);
        moved | lost != 0 || (Self::is_executable(old) && !Self::is_executable(new))
    }

    /// Leaf number `child` of a table of `level - 1` that translates the same as `entry`, a leaf of
    /// `level`. All else is as in `entry`: all children of a dirty leaf are dirty.
    #[inline]
    #[must_use]
    fn split(entry: u64, level: u32, child: usize) -> u64 {
        debug_assert!(level > 1 && Self::is_leaf(entry, level));
        debug_assert!(child < Self::entries(level - 1));
        let first = Self::pfn(entry, level).0;
        let pfn = Pfn(first + child as u64 * Self::frames_per_entry(level - 1));
        with_frame::<Self>(entry, level, pfn, level - 1)
    }

    /// The leaf of `level + 1` that contains `entry`, a leaf of `level`, with the same permissions
    /// and state. The recovery of a huge page installs it. The caller knows that consecutive frames
    /// back all of it.
    #[inline]
    #[must_use]
    fn parent_of(entry: u64, level: u32) -> u64 {
        debug_assert!(Self::is_leaf(entry, level) && Self::may_hold_leaves(level + 1));
        with_frame::<Self>(entry, level, Self::pfn(entry, level), level + 1)
    }

    /// The leaf of `level + 1` that translates the same as `children`, a whole table of `level`.
    ///
    /// It is accessed and dirty if one of the children is. Returns `None` unless they are a full
    /// table of leaves that map consecutive frames from an aligned one on, with the same
    /// permissions, memory type and [`Writes`]. A leaf that dirty logging has write-protected
    /// differs in permission. If the log is off, pass each child through
    /// [`make_writable`](Self::make_writable) first.
    #[must_use]
    fn join(children: impl IntoIterator<Item = u64>, level: u32) -> Option<u64> {
        let parents = level + 1;
        if !Self::may_hold_leaves(parents) {
            return None;
        }
        let (mut parent, mut accessed, mut dirty, mut count) = (None, false, 0, 0);
        for child in children {
            if count == Self::entries(level) || !Self::is_leaf(child, level) {
                return None;
            }
            accessed |= Self::is_accessed(child);
            dirty |= child & Self::DIRTY;
            let plain = Self::set_accessed(child) & !Self::DIRTY;
            let whole = *parent.get_or_insert_with(|| Self::parent_of(plain, level));
            if Self::split(whole, parents, count) != plain {
                return None;
            }
            count += 1;
        }
        let parent = parent.filter(|_| count == Self::entries(level))? | dirty;
        Some(if accessed {
            parent
        } else {
            Self::clear_accessed(parent)
        })
    }
}

impl<F: EntryLayout> Format for F {}

#[inline]
fn frame_bits<F: Format>(pfn: Pfn, level: u32) -> u64 {
    (pfn.0 << F::PFN_SHIFT) & F::pfn_mask(level)
}

/// The leaf with another level and frame, and all else as in `entry`.
#[inline]
fn with_frame<F: Format>(entry: u64, level: u32, pfn: Pfn, new_level: u32) -> u64 {
    let rest = entry & !(F::pfn_mask(level) | F::leaf_kind(level));
    rest | F::leaf_kind(new_level) | frame_bits::<F>(pfn, new_level)
}

#[inline]
fn class_bits<F: Format>(writes: Writes) -> u64 {
    match writes {
        Writes::HostForbids => 0,
        Writes::MmuForbids => F::HOST_WRITABLE,
        Writes::Allowed => F::HOST_WRITABLE | F::MMU_WRITABLE,
        Writes::AllowedLoggedByFault => F::MMU_WRITABLE,
    }
}

#[inline]
fn logged_by_fault<F: Format>(entry: u64) -> bool {
    entry & (F::HOST_WRITABLE | F::MMU_WRITABLE) == F::MMU_WRITABLE
}
