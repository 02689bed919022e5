#![expect(unsafe_code, reason = "says which versions of the trees are alive")]
//! Look-ups at one version.

use crate::Slot;
use crate::table::{Generation, SharedTable, Space};
use crate::tree::{Ascending, At, ByGfn, ByHva, ById, Overlapping};
use core::fmt;
use core::ops::Range;
use pageferry_addr::{Gfn, GfnRange, Hva};

/// The slots of one address space at one version, from [`SlotGuard::view`](crate::SlotGuard::view)
/// or [`SlotWriter::view`](crate::SlotWriter::view). All look-ups of one view agree, even while a
/// writer changes the table.
///
/// Each look-up takes O(log n) steps. Under an older guard it takes one or two steps more for each
/// later change of the same part of a tree. [`Limits::max_retired`](crate::Limits::max_retired)
/// bounds the number of such changes. Only the mark [`Slot::is_invalid`] may appear under a view.
pub struct SlotView<'g, D> {
    shared: &'g SharedTable<D>,
    space: &'g Space<D>,
    version: u64,
    generation: Generation,
}

impl<'g, D> SlotView<'g, D> {
    #[inline]
    pub(crate) fn new(
        shared: &'g SharedTable<D>,
        space: &'g Space<D>,
        version: u64,
        generation: Generation,
    ) -> Self {
        Self {
            shared,
            space,
            version,
            generation,
        }
    }

    /// The same version of another address space, or `None` if there is no such space. A new view
    /// is of space 0.
    #[must_use]
    pub fn space(self, address_space: u16) -> Option<Self> {
        let space = self.shared.spaces.get(usize::from(address_space))?;
        Some(Self { space, ..self })
    }

    /// The generation in which the view was taken. Its number is the view's version.
    #[must_use]
    pub const fn generation(self) -> Generation {
        self.generation
    }

    #[inline]
    fn by_gfn(self) -> At<'g, ByGfn, D> {
        // SAFETY: for `'g` the maker of the view holds the writer, or a guard that it took before
        // it loaded the version. So nothing of this version or newer is freed. See `table.rs`.
        unsafe { self.space.by_gfn.at(self.version) }
    }

    #[inline]
    fn ids(self) -> At<'g, ById, D> {
        // SAFETY: as in `by_gfn`.
        unsafe { self.space.by_id.at(self.version) }
    }

    #[inline]
    fn by_hva(self) -> At<'g, ByHva, D> {
        // SAFETY: as in `by_gfn`.
        unsafe { self.space.by_hva.at(self.version) }
    }

    /// The slot that holds `gfn`.
    #[inline]
    #[must_use]
    pub fn lookup(self, gfn: Gfn) -> Option<&'g Slot<D>> {
        self.lookup_or_below(gfn)
            .filter(|slot| slot.range.contains(gfn))
    }

    /// The slot that holds `gfn`, or else the nearest slot below it. This is the kernel's
    /// approximate look-up.
    #[inline]
    #[must_use]
    pub fn lookup_or_below(self, gfn: Gfn) -> Option<&'g Slot<D>> {
        self.by_gfn().floor(gfn.0.min(Gfn::MAX.0))
    }

    /// The slot with this id.
    #[must_use]
    pub fn by_id(self, id: u16) -> Option<&'g Slot<D>> {
        self.ids().get(u64::from(id))
    }

    /// All slots that hold any frame of `range`, ascending by frame.
    pub fn iter_gfn(self, range: GfnRange) -> impl Iterator<Item = &'g Slot<D>> + use<'g, D> {
        let first = range.start();
        let before = self.lookup_or_below(first);
        let rest = Ascending::new(self.by_gfn(), Some(first.0));
        before
            .filter(move |slot| slot.range.end() > first && !range.is_empty())
            .into_iter()
            .chain(rest.take_while(move |slot| slot.range.start() < range.end()))
    }

    /// All slots with a byte of host memory in `hva`, ascending by host address, then id. They may
    /// overlap. [`Slot::frames_in_hva`] returns their frames in that range.
    #[inline]
    pub fn iter_hva(self, hva: Range<Hva>) -> impl Iterator<Item = &'g Slot<D>> + use<'g, D> {
        Overlapping::new(self.by_hva(), hva.start.0, hva.end.0)
    }

    /// All slots, ascending by frame.
    pub fn iter(self) -> impl Iterator<Item = &'g Slot<D>> + use<'g, D> {
        Ascending::new(self.by_gfn(), None)
    }

    /// Whether there are no slots.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.iter().next().is_none()
    }
}

// Not derived: a derived impl would need `D: Clone`.
impl<D> Clone for SlotView<'_, D> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}
impl<D> Copy for SlotView<'_, D> {}

impl<D> fmt::Debug for SlotView<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotView")
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}
