//! The operations on page tables that are measured: nanoseconds per page of 4 KiB.

use serde::Serialize;

/// One operation on page tables. With two threads, each thread's own time counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Operation {
    /// Maps pages into empty tables in order, one page per call. Missing tables are created.
    MapPage,
    /// Maps pages into empty tables, many pages per call.
    MapRange,
    /// Looks up pages in order, one page per call.
    Find,
    /// Looks up random pages, one page per call.
    FindRandom,
    /// Write-protects pages, many pages per call.
    ProtectRange,
    /// Unmaps pages, many pages per call.
    UnmapRange,
    /// Unmaps pages in order, one page per call.
    UnmapPage,
    /// As [`Self::MapPage`], by two threads at once with disjoint pages.
    MapPartitioned,
    /// As [`Self::MapPage`], by two threads at once with the same pages.
    MapOverlapping,
}

impl Operation {
    /// All operations, in the order of the table's columns.
    pub(crate) const ALL: [Self; 9] = [
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
