//! The three orders of an address space's slots: by frame, by id, by host address.

use crate::Slot;
use crate::rules::{HALF, is_canonical};
use crate::sync::{AtomicU64, Ordering};
use pageferry_addr::PAGE_MASK;

/// The most children of an inner node. Inner nodes are copied rarely, so they may be large.
pub(crate) const INNER: usize = if cfg!(loom) { 4 } else { 64 };

/// The least key: less than or equal to all keys.
pub(crate) const LEAST: u64 = 0;
/// Above all keys.
pub(crate) const MOST: u64 = u64::MAX;

/// An order of slots.
pub(crate) trait Order: Sized + 'static {
    /// The number of slots for which a leaf below an inner node has room.
    const LEAF: usize;
    /// The most slots for which a leaf that is the whole tree may have room.
    const FLAT: usize;
    /// Upper bounds of the ends below each child, for orders in which slots overlap. Leaves of such
    /// orders keep ends.
    type Reach: Reach;
    /// The key of a slot, unique in an address space.
    fn key<D>(slot: &Slot<D>) -> u64;

    /// The end of the slot. Not used if the order keeps no ends.
    #[inline]
    fn end<D>(_slot: &Slot<D>) -> u64 {
        0
    }
}

/// By first guest frame. Slots do not overlap, so order by start is order by end.
pub(crate) struct ByGfn;

impl Order for ByGfn {
    const LEAF: usize = if cfg!(loom) { 4 } else { 32 };
    const FLAT: usize = if cfg!(loom) { 4 } else { 128 };
    type Reach = ();

    #[inline]
    fn key<D>(slot: &Slot<D>) -> u64 {
        slot.range.start().0
    }
}

/// By id.
pub(crate) struct ById;

impl Order for ById {
    const LEAF: usize = if cfg!(loom) { 4 } else { 16 };
    const FLAT: usize = if cfg!(loom) { 8 } else { 64 };
    type Reach = ();

    #[inline]
    fn key<D>(slot: &Slot<D>) -> u64 {
        u64::from(slot.id)
    }
}

/// By host address, then id: an interval tree, since slots may share host memory.
pub(crate) struct ByHva;

impl ByHva {
    /// The key of a slot that begins at `hva`, which is page-aligned and
    /// [canonical](crate::rules::is_canonical). The other bits determine its lowest 12 and its
    /// highest 4, so the id fits.
    #[inline]
    pub(crate) const fn starting_at(hva: u64, id: u16) -> u64 {
        hva << 4 | id as u64
    }

    /// The greatest key of a slot that begins at or below `hva`. `hva` may be any address.
    #[inline]
    pub(crate) const fn up_to(hva: u64) -> u64 {
        // If `hva` lies between the two halves, all slots of the lower half are below it.
        let hva = if is_canonical(hva, 0) { hva } else { HALF - 1 };
        // Ids are below `max_slots`, a `u16`. So no id is `u16::MAX`.
        Self::starting_at(hva & !PAGE_MASK, u16::MAX - 1)
    }
}

impl Order for ByHva {
    const LEAF: usize = if cfg!(loom) { 4 } else { 16 };
    const FLAT: usize = if cfg!(loom) { 4 } else { 64 };
    type Reach = Bounds;

    #[inline]
    fn key<D>(slot: &Slot<D>) -> u64 {
        Self::starting_at(slot.hva.0, slot.id)
    }

    #[inline]
    fn end<D>(slot: &Slot<D>) -> u64 {
        slot.hva_range().end.0
    }
}

/// For each child of an inner node, an upper bound of the ends below it. Orders that keep no ends
/// have no bounds.
///
/// A bound may be too high, which costs readers a wasted visit. It is never too low for a reader:
/// the writer raises it before a slot that needs it becomes visible, and lowers it only in a new
/// node. Lowering a bound is worth a new node only if the old bound [passes](Self::passes) the keys
/// of the next child. Otherwise it wastes no visit. The last child of the tree has no next child,
/// and usually has the bound `MOST`.
pub(crate) trait Reach {
    /// Whether there are bounds.
    const KEPT: bool;
    /// Makes the bounds of a node's children.
    fn new(bounds: &[u64]) -> Self;
    /// Whether a slot that ends at `bound` overlaps one with `key`.
    fn passes(bound: u64, key: u64) -> bool;
    /// The bound of one child.
    fn get(&self, child: usize) -> u64;
    /// The greatest bound of all children up to and including this one.
    fn up_to(&self, child: usize) -> u64;
    /// Raises a child's bound to `end` if it is lower.
    fn raise(&self, child: usize, end: u64);
}

impl Reach for () {
    const KEPT: bool = false;
    fn new(_: &[u64]) -> Self {}
    #[inline]
    fn passes(_: u64, _: u64) -> bool {
        false
    }
    #[inline]
    fn get(&self, _: usize) -> u64 {
        0
    }
    #[inline]
    fn up_to(&self, _: usize) -> u64 {
        0
    }
    #[inline]
    fn raise(&self, _: usize, _: u64) {}
}

/// A [`Reach`] with bounds.
pub(crate) struct Bounds {
    each: [AtomicU64; INNER],
    /// The greatest bound up to each child. One load usually shows that no child further left needs
    /// a visit.
    up_to: [AtomicU64; INNER],
}

// All accesses are relaxed. A slot becomes visible by the store of a leaf's pointer or of a slot's
// cell, and by the version. `Reach` says why the bounds need no more order.
impl Reach for Bounds {
    const KEPT: bool = true;

    fn new(bounds: &[u64]) -> Self {
        let mut highest = 0;
        let bound = |child: usize| bounds.get(child).copied().unwrap_or(0);
        Self {
            each: core::array::from_fn(|child| AtomicU64::new(bound(child))),
            up_to: core::array::from_fn(|child| {
                highest = highest.max(bound(child));
                AtomicU64::new(highest)
            }),
        }
    }

    #[inline]
    fn passes(bound: u64, key: u64) -> bool {
        ByHva::starting_at(bound, 0) > key
    }

    #[inline]
    fn get(&self, child: usize) -> u64 {
        self.each[child].load(Ordering::Relaxed)
    }

    #[inline]
    fn up_to(&self, child: usize) -> u64 {
        self.up_to[child].load(Ordering::Relaxed)
    }

    #[inline]
    fn raise(&self, child: usize, end: u64) {
        if self.get(child) < end {
            self.each[child].store(end, Ordering::Relaxed);
            let lower = |up_to: &&AtomicU64| up_to.load(Ordering::Relaxed) < end;
            for up_to in self.up_to[child..].iter().take_while(lower) {
                up_to.store(end, Ordering::Relaxed);
            }
        }
    }
}
