//! The memory behind guest frames, and a log of the guests' actions on them.

use pageferry_addr::{Gfn, GfnRange, Pfn};
use pageferry_tdp::format::{Access, MemoryType, Npt4, Writes};
use pageferry_tdp::{Log, Target, largest_level};
use std::sync::atomic::{AtomicU64, Ordering};

/// The memory behind guest frames, as a memory slot gives it.
pub(crate) trait Slot: Sync {
    /// The page that may be mapped for an access to `gfn`, if any.
    fn target(&self, gfn: Gfn, access: Access) -> Option<Target>;
}

impl<F: Fn(Gfn, Access) -> Option<Target> + Sync> Slot for F {
    fn target(&self, gfn: Gfn, access: Access) -> Option<Target> {
        self(gfn, access)
    }
}

/// Consecutive frames behind consecutive guest frames.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Linear {
    pub(crate) range: GfnRange,
    pub(crate) pfn: Pfn,
    /// The level of the largest page that its backing allows.
    pub(crate) level: u32,
}

impl Linear {
    pub(crate) fn new(gfn: u64, pages: u64, pfn: u64, level: u32) -> Self {
        Self {
            range: GfnRange::new(Gfn(gfn), pages).expect("a range of frames"),
            pfn: Pfn(pfn),
            level,
        }
    }

    /// The guest-virtual address of its first page.
    pub(crate) fn gva(&self) -> u64 {
        self.range.start().gpa().0
    }

    /// The guest-physical address behind its first page.
    pub(crate) fn gpa(&self) -> u64 {
        self.pfn.0 << 12
    }

    /// The page that may be mapped at `gfn`: all permissions, the largest size.
    pub(crate) fn everything(&self, gfn: Gfn) -> Option<Target> {
        let offset = gfn.checked_offset_from(self.range.start())?;
        let pfn = Pfn(self.pfn.0 + offset);
        self.range.contains(gfn).then(|| Target {
            pfn,
            level: largest_level::<Npt4>(self.range, gfn, pfn, self.level),
            access: Access::ALL,
            writes: Writes::Allowed,
            memory: MemoryType::WriteBack,
        })
    }
}

impl Slot for Linear {
    fn target(&self, gfn: Gfn, _: Access) -> Option<Target> {
        self.everything(gfn)
    }
}

/// Frames that the guest has written, or can write unnoticed.
pub(crate) struct DirtyLog {
    range: GfnRange,
    is_on: bool,
    bits: Vec<AtomicU64>,
}

impl DirtyLog {
    /// A log that keeps writable pages small.
    pub(crate) fn new(range: GfnRange) -> Self {
        Self::with(range, true)
    }

    /// A log that leaves pages large, but records reports.
    pub(crate) fn off(range: GfnRange) -> Self {
        Self::with(range, false)
    }

    fn with(range: GfnRange, is_on: bool) -> Self {
        let words = range.pages().div_ceil(64);
        Self {
            range,
            is_on,
            bits: (0..words).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Takes the recorded frames of the range out, counted from its start, in order.
    pub(crate) fn take(&self) -> Vec<u64> {
        let mut found = Vec::new();
        for (number, word) in (0..).zip(&self.bits) {
            let bits = word.swap(0, Ordering::AcqRel);
            found.extend(
                (0..64)
                    .filter(|bit| bits >> bit & 1 != 0)
                    .map(|bit| number * 64 + bit),
            );
        }
        found
    }
}

impl Log for DirtyLog {
    fn is_on(&self) -> bool {
        self.is_on
    }

    fn dirtied(&self, gfn: Gfn, pages: u64) {
        // The guest also writes pinned pages, which have no slot.
        let dirtied = GfnRange::new(gfn, pages).expect("a range of frames");
        let Some(part) = dirtied.intersection(self.range) else {
            return;
        };
        for gfn in part.iter() {
            let page = gfn.0 - self.range.start().0;
            self.bits[page as usize / 64].fetch_or(1 << (page % 64), Ordering::AcqRel);
        }
    }
}
