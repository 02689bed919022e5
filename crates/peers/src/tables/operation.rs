//! What is measured of every scheme: nanoseconds for a page of 4 KiB.

use serde::Serialize;

/// One operation on page tables. With two threads, it is each thread's own time that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// Pages mapped one call each, in order, into empty tables: those that are missing are made.
    MapPage,
    /// Pages mapped many a call, into empty tables.
    MapRange,
    /// Pages looked up one call each, in order.
    Find,
    /// Pages looked up one call each, at random.
    FindRandom,
    /// Pages write-protected many a call.
    ProtectRange,
    /// Pages unmapped many a call.
    UnmapRange,
    /// Pages unmapped one call each, in order.
    UnmapPage,
    /// As [`Self::MapPage`], by two threads at once, each its own pages.
    MapPartitioned,
    /// As [`Self::MapPage`], by two threads at once, both the same pages.
    MapOverlapping,
}

impl Operation {
    /// All operations, in the order of a table's columns.
    pub const ALL: [Self; 9] = [
        Self::MapPage,
        Self::MapRange,
        Self::Find,
        Self::FindRandom,
        Self::ProtectRange,
        Self::UnmapRange,
        Self::UnmapPage,
        Self::MapPartitioned,
        Self::MapOverlapping,
    ];

    /// A heading of two lines, each of at most nine characters.
    pub(crate) const fn heading(self) -> [&'static str; 2] {
        match self {
            Self::MapPage => ["map", "page"],
            Self::MapRange => ["map", "range"],
            Self::Find => ["look-up", "in order"],
            Self::FindRandom => ["look-up", "random"],
            Self::ProtectRange => ["protect", "range"],
            Self::UnmapRange => ["unmap", "range"],
            Self::UnmapPage => ["unmap", "page"],
            Self::MapPartitioned => ["2 threads", "apart"],
            Self::MapOverlapping => ["2 threads", "together"],
        }
    }
}

impl crate::Operation for Operation {
    fn name(self) -> &'static str {
        match self {
            Self::MapPage => "map a page",
            Self::MapRange => "map a range",
            Self::Find => "look-up in order",
            Self::FindRandom => "look-up at random",
            Self::ProtectRange => "protect a range",
            Self::UnmapRange => "unmap a range",
            Self::UnmapPage => "unmap a page",
            Self::MapPartitioned => "map a page, 2 threads partitioned",
            Self::MapOverlapping => "map a page, 2 threads overlapping",
        }
    }

    fn unit(self) -> &'static str {
        "ns"
    }

    fn threads(self) -> u32 {
        match self {
            Self::MapPartitioned | Self::MapOverlapping => 2,
            _ => 1,
        }
    }
}
