//! Tables by hand: entries from the format's functions, stored at the test's choice of places.

use super::layout::{TABLES, pinned};
use super::vcpu::{Answer, PageFault, Space};
use super::vm::Vm;
use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::{Access, EntryLayout, Format, Leaf, MemoryType, Npt4, Writes};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A tree of tables. It answers no faults.
pub(crate) struct HandTables {
    vm: Arc<Vm>,
    root: Pfn,
    next: u64,
}

impl HandTables {
    /// Tables with the pinned pages, from the first frame for tables on.
    pub(crate) fn new(vm: &Arc<Vm>) -> Self {
        let mut tables = Self {
            vm: Arc::clone(vm),
            root: Pfn(TABLES.start),
            next: TABLES.start + 1,
        };
        for (gfn, pfn, memory) in pinned() {
            let leaf = Leaf {
                pfn,
                access: Access::ALL,
                memory,
                accessed: true,
                dirty: true,
                writes: Writes::Allowed,
            };
            tables.set(gfn, 1, Npt4::leaf(leaf, 1));
        }
        tables
    }

    /// Stores `entry` as the entry of `level` that leads to `gfn`, and makes the tables above.
    pub(crate) fn set(&mut self, gfn: Gfn, level: u32, entry: u64) {
        self.at(gfn, level).store(entry, Ordering::Release);
    }

    /// The current entry of `level` that leads to `gfn`.
    pub(crate) fn get(&mut self, gfn: Gfn, level: u32) -> u64 {
        self.at(gfn, level).load(Ordering::Acquire)
    }

    fn at(&mut self, gfn: Gfn, level: u32) -> &std::sync::atomic::AtomicU64 {
        let mut table = self.root;
        let mut above = Npt4::LEVELS;
        while above > level {
            let entry = self.vm.ram.word(entry_gpa(table, gfn, above));
            let value = entry.load(Ordering::Relaxed);
            if value == Npt4::NON_PRESENT {
                assert!(self.next < TABLES.end, "no frames for tables are left");
                table = Pfn(self.next);
                self.next += 1;
                entry.store(Npt4::table(table), Ordering::Release);
            } else {
                assert!(Npt4::is_table(value, above), "{value:#x} is in the way");
                table = Npt4::table_pfn(value);
            }
            above -= 1;
        }
        self.vm.ram.word(entry_gpa(table, gfn, level))
    }
}

fn entry_gpa(table: Pfn, gfn: Gfn, level: u32) -> u64 {
    (table.0 << 12) + Npt4::index(gfn, level) as u64 * 8
}

impl Space for HandTables {
    fn root(&mut self) -> Pfn {
        self.root
    }

    fn fault(&mut self, _: PageFault) -> Answer {
        Answer::Abandon
    }
}

/// Ordinary memory with all permissions, neither accessed nor dirty.
pub(crate) const fn plain(pfn: u64) -> Leaf {
    Leaf {
        pfn: Pfn(pfn),
        access: Access::ALL,
        memory: MemoryType::WriteBack,
        accessed: false,
        dirty: false,
        writes: Writes::Allowed,
    }
}
