#![expect(
    unsafe_code,
    reason = "an entry holds the address of the next table, and following it is a dereference"
)]
//! The tree of tables: linking and following.
//!
//! **Guarantee.** A [`Node`] borrowed from a [`Tree`] is a table of that tree, at the level it says, and
//! stays one for as long as the tree is borrowed.
//!
//! **Mechanism.** The entries of levels 2 to 4 are written by [`Node::link`] only, once each, from
//! absent to the address of a fresh table, and are private to this module; so a valid one can be followed at
//! any time. Tables are freed by `Tree::drop` alone, which has the tree for itself. Frame numbers of tables
//! are addresses in this process: physical equals virtual.
//!
//! **Orderings.** Linking releases the zeroed entries of the fresh table; following acquires them. Nothing
//! else is ordered by links.
//!
//! **Neighbours.** `stage_two` and `range` walk by it and write the entries of level 1.

use crate::format::{Entry, Sv48x4};
use crate::sync::{AtomicU64, Ordering};
use alloc::boxed::Box;
use core::ptr;
use pageferry_addr::{Gfn, PAGE_SHIFT, Pfn};

/// How many entries a table below the root has.
pub(crate) const TABLE_ENTRIES: usize = 1 << Sv48x4::INDEX_BITS;
const ROOT_ENTRIES: usize = 1 << Sv48x4::ROOT_INDEX_BITS;

/// A table below the root: 4 KiB, aligned to its size, as the format wants it.
#[repr(C, align(4096))]
struct Table {
    entries: [AtomicU64; TABLE_ENTRIES],
}

/// The root: 16 KiB, aligned to its size.
#[repr(C, align(16384))]
struct Root {
    entries: [AtomicU64; ROOT_ENTRIES],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Table>() == 4096 && size_of::<Root>() == 16384);

fn absent<const N: usize>() -> [AtomicU64; N] {
    core::array::from_fn(|_| AtomicU64::new(Entry::ABSENT.0))
}

/// A root and all tables linked below it.
pub(crate) struct Tree {
    root: Box<Root>,
    /// Tables linked below the root.
    linked: AtomicU64,
}

impl Tree {
    pub(crate) fn new() -> Self {
        Self {
            root: Box::new(Root { entries: absent() }),
            linked: AtomicU64::new(0),
        }
    }

    #[inline]
    pub(crate) fn root(&self) -> Node<'_> {
        Node {
            entries: &self.root.entries,
            level: Sv48x4::LEVELS,
        }
    }

    /// The level-1 table of `gfn`, or `None` where none is linked.
    #[inline]
    pub(crate) fn leaf_table(&self, gfn: Gfn) -> Option<Node<'_>> {
        let mut node = self.root();
        while node.level > 1 {
            node = node.child(Sv48x4::index(gfn, node.level))?;
        }
        Some(node)
    }

    /// The level-1 table of `gfn`, linked with all above it where it was missing.
    #[inline]
    pub(crate) fn leaf_table_or_link(&self, gfn: Gfn) -> Node<'_> {
        // Apart, so that the usual walk is straight-line code: in one loop with linking it costs four
        // times as much.
        match self.leaf_table(gfn) {
            Some(table) => table,
            None => self.link_path(gfn),
        }
    }

    #[cold]
    fn link_path(&self, gfn: Gfn) -> Node<'_> {
        let mut node = self.root();
        while node.level > 1 {
            let index = Sv48x4::index(gfn, node.level);
            node = match node.child(index) {
                Some(child) => child,
                None => node.link(index, &self.linked),
            };
        }
        node
    }

    /// The bytes of the root and of all linked tables.
    pub(crate) fn bytes(&self) -> u64 {
        let below = self.linked.load(Ordering::Relaxed) * size_of::<Table>() as u64;
        size_of::<Root>() as u64 + below
    }
}

/// A table of a tree that is borrowed for `'t`.
#[derive(Clone, Copy)]
pub(crate) struct Node<'t> {
    entries: &'t [AtomicU64],
    level: u32,
}

impl<'t> Node<'t> {
    #[inline]
    pub(crate) const fn level(self) -> u32 {
        self.level
    }

    /// The leaf entry at `index`.
    ///
    /// # Panics
    /// If this is not a level-1 table: the entries of others are this module's.
    #[inline]
    pub(crate) fn leaf(self, index: usize) -> &'t AtomicU64 {
        assert!(self.level == 1, "leaves are in level-1 tables");
        &self.entries[index]
    }

    /// The table that the entry at `index` points to, or `None` where it is absent.
    ///
    /// # Panics
    /// If this is a level-1 table, whose entries point to no table.
    #[inline]
    pub(crate) fn child(self, index: usize) -> Option<Self> {
        assert!(self.level > 1, "level-1 tables have no children");
        let entry = Entry(self.entries[index].load(Ordering::Acquire));
        if !entry.is_table() {
            return None;
        }
        // SAFETY: loaded, with acquire order, from an entry of this table, which is above level 1.
        Some(unsafe { self.follow(entry) })
    }

    /// Links a fresh table at `index`, where none was seen, or finds that another thread has; `linked` counts.
    fn link(self, index: usize, linked: &AtomicU64) -> Self {
        let fresh = Box::into_raw(Box::new(Table { entries: absent() }));
        let pfn = Pfn(fresh.expose_provenance() as u64 >> PAGE_SHIFT);
        assert!(pfn < Sv48x4::PFN_LIMIT, "addresses have at most 56 bits");
        let link = Entry::table(pfn);
        let winner = match self.entries[index].compare_exchange(
            Entry::ABSENT.0,
            link.0,
            Ordering::Release,
            Ordering::Acquire,
        ) {
            Ok(_) => {
                linked.fetch_add(1, Ordering::Relaxed);
                link
            }
            Err(theirs) => {
                // SAFETY: `fresh` came from `Box::into_raw` above, and no entry was given its address.
                drop(unsafe { Box::from_raw(fresh) });
                Entry(theirs)
            }
        };
        // SAFETY: `winner` is what the entry of this table above level 1 holds: ours, or, with acquire
        // order, another's.
        unsafe { self.follow(winner) }
    }

    /// The table `entry` points to.
    ///
    /// # Safety
    /// `entry` is a table entry that was found in (or put into) an entry of this table, whose level is above
    /// 1, with acquire order where another thread put it there.
    #[inline]
    unsafe fn follow(self, entry: Entry) -> Self {
        // SAFETY:
        // 1. Such an entry was made by `link` from the address of a `Table` whose provenance is exposed, and
        //    tables are aligned to 4096, so that no bit of the address is lost.
        // 2. The table is freed by `Tree::drop` only, which `'t` excludes.
        // 3. Its initialisation happened before: release by `link`, acquire by the caller.
        // 4. It is only ever borrowed shared, and all of its fields are atomics.
        let table = unsafe { &*table_address(entry) };
        Self {
            entries: &table.entries,
            level: self.level - 1,
        }
    }
}

fn table_address(entry: Entry) -> *mut Table {
    ptr::with_exposed_provenance_mut((entry.pfn().0 << PAGE_SHIFT) as usize)
}

impl Drop for Tree {
    fn drop(&mut self) {
        // SAFETY: this is the root's, the tree is ours alone, and none of it is used again.
        unsafe { free_below(&self.root.entries, Sv48x4::LEVELS) };
    }
}

/// Frees all tables below the one of `level` whose entries these are.
///
/// # Safety
/// The table belongs to a tree that no other thread uses, and its entries are not followed again.
unsafe fn free_below(entries: &[AtomicU64], level: u32) {
    if level == 1 {
        return;
    }
    for entry in entries {
        let entry = Entry(entry.load(Ordering::Relaxed));
        if entry.is_table() {
            // SAFETY: entries above level 1 hold addresses that `link` took from `Box::into_raw`, each in
            // one place only, and the caller lets nobody follow this one again.
            let table = unsafe { Box::from_raw(table_address(entry)) };
            // SAFETY: as the caller vouches for the table above.
            unsafe { free_below(&table.entries, level - 1) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_grows_by_the_tables_that_are_missing() {
        let tree = Tree::new();
        assert_eq!(tree.bytes(), 16384);
        assert!(tree.leaf_table(Gfn(0)).is_none());
        tree.leaf_table_or_link(Gfn(0));
        assert_eq!(tree.bytes(), 16384 + 3 * 4096);
        tree.leaf_table_or_link(Gfn(511));
        assert_eq!(tree.bytes(), 16384 + 3 * 4096);
        tree.leaf_table_or_link(Gfn(512));
        assert_eq!(tree.bytes(), 16384 + 4 * 4096);
        tree.leaf_table_or_link(Gfn(Sv48x4::GFN_LIMIT.0 - 1));
        assert_eq!(tree.bytes(), 16384 + 7 * 4096);
    }

    #[test]
    fn a_table_is_found_where_it_was_linked() {
        let tree = Tree::new();
        let linked = tree.leaf_table_or_link(Gfn(0x12345));
        let found = tree.leaf_table(Gfn(0x12345)).unwrap();
        assert!(ptr::eq(linked.entries, found.entries) && found.level() == 1);
        assert!(tree.leaf_table(Gfn(0x12345 + 512)).is_none());
    }

    #[test]
    #[should_panic(expected = "leaves are in level-1 tables")]
    fn entries_above_the_leaves_are_not_handed_out() {
        let tree = Tree::new();
        tree.root().leaf(0);
    }
}
