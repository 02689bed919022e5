//! The operations on page tables that are measured: nanoseconds per page of 4 KiB.

use crate::schemes;

/// One operation on page tables. With two threads, each thread's own time counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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

impl schemes::Operation for Operation {
    fn case(self) -> &'static str {
        match self {
            Self::MapPage => "tables.map_page",
            Self::MapRange => "tables.map_range",
            Self::Find => "tables.find",
            Self::FindRandom => "tables.find_random",
            Self::ProtectRange => "tables.protect_range",
            Self::UnmapRange => "tables.unmap_range",
            Self::UnmapPage => "tables.unmap_page",
            Self::MapPartitioned => "tables.map_partitioned",
            Self::MapOverlapping => "tables.map_overlapping",
        }
    }

    fn threads(self) -> u32 {
        match self {
            Self::MapPartitioned | Self::MapOverlapping => 2,
            _ => 1,
        }
    }
}
