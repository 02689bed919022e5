//! Half-open ranges of guest frames.

use crate::Gfn;

/// `pages` frames from `start`. The end never exceeds [`Gfn::MAX`] + 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GfnRange {
    start: Gfn,
    pages: u64,
}

impl GfnRange {
    /// The range `[start, start + pages)`, or `None` if it would leave the 64-bit address space.
    ///
    /// ```
    /// use pageferry_addr::{Gfn, GfnRange};
    /// let range = GfnRange::new(Gfn(16), 4).unwrap();
    /// assert!(range.contains(Gfn(19)) && !range.contains(range.end()));
    /// assert!(GfnRange::new(Gfn::MAX, 2).is_none());
    /// ```
    #[inline]
    #[must_use]
    pub const fn new(start: Gfn, pages: u64) -> Option<Self> {
        match start.0.checked_add(pages) {
            Some(end) if end <= Gfn::MAX.0 + 1 => Some(Self { start, pages }),
            _ => None,
        }
    }

    /// The first frame.
    #[inline]
    #[must_use]
    pub const fn start(self) -> Gfn {
        self.start
    }

    /// The first frame after the range.
    #[inline]
    #[must_use]
    pub const fn end(self) -> Gfn {
        Gfn(self.start.0 + self.pages)
    }

    /// The number of frames.
    #[inline]
    #[must_use]
    pub const fn pages(self) -> u64 {
        self.pages
    }

    /// Whether there are no frames.
    #[inline]
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.pages == 0
    }

    /// Whether `gfn` lies inside.
    #[inline]
    #[must_use]
    pub const fn contains(self, gfn: Gfn) -> bool {
        self.start.0 <= gfn.0 && gfn.0 < self.end().0
    }

    /// The common frames of both ranges, or `None` if there are none.
    #[inline]
    #[must_use]
    pub fn intersection(self, other: Self) -> Option<Self> {
        let start = self.start.max(other.start);
        let end = self.end().min(other.end());
        (start < end).then(|| Self {
            start,
            pages: end.0 - start.0,
        })
    }

    /// The frames, in order.
    pub fn iter(self) -> impl Iterator<Item = Gfn> {
        (self.start.0..self.end().0).map(Gfn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touching_ranges_do_not_intersect() {
        let low = GfnRange::new(Gfn(0), 8).unwrap();
        let high = GfnRange::new(Gfn(8), 8).unwrap();
        assert_eq!(low.intersection(high), None);
        let middle = GfnRange::new(Gfn(4), 8).unwrap();
        assert_eq!(low.intersection(middle), GfnRange::new(Gfn(4), 4));
        assert_eq!(middle.intersection(low), GfnRange::new(Gfn(4), 4));
    }

    #[test]
    fn the_whole_address_space_is_a_range() {
        let all = GfnRange::new(Gfn(0), Gfn::MAX.0 + 1).unwrap();
        assert!(all.contains(Gfn::MAX));
        assert_eq!(GfnRange::new(Gfn(1), Gfn::MAX.0 + 1), None);
    }

    #[test]
    fn an_empty_range_holds_nothing() {
        let empty = GfnRange::new(Gfn(3), 0).unwrap();
        assert!(empty.is_empty() && !empty.contains(Gfn(3)));
        assert_eq!(empty.iter().count(), 0);
    }
}
