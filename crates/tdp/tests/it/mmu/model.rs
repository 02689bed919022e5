//! A model of an MMU without tables: a map from each leaf's first frame to its contents, and a set
//! of tables.

use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::{Access, AccessedBy, DirtyBy, Format, Leaf, Writes};
use pageferry_tdp::{Fault, Found, How, Look, Refused, Stats, Target};
use std::collections::{BTreeMap, BTreeSet};

/// The properties of a format that the model needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) levels: u32,
    top_leaf: u32,
    root_bytes: u64,
    pub(crate) dirty_bit: bool,
    /// An access through a leaf that is not marked as accessed faults.
    faults_unused: bool,
    /// Such a leaf has lost the permission to store.
    pub(crate) saved: bool,
    pub(crate) breaks: bool,
    /// The bits of a generation that a marker keeps.
    generations: u64,
}

impl Rules {
    pub(crate) fn of<F: Format>() -> Self {
        Self {
            levels: F::LEVELS,
            top_leaf: F::MAX_LEAF_LEVEL,
            root_bytes: (8 * F::entries(F::LEVELS) as u64).max(4096),
            dirty_bit: F::DIRTY_BY == DirtyBy::Hardware,
            faults_unused: F::ACCESSED_BY != AccessedBy::Hardware,
            saved: F::ACCESSED_BY == AccessedBy::SavedPermissions,
            breaks: F::BREAK_BEFORE_MAKE,
            generations: (1 << F::MMIO_GENERATION_BITS) - 1,
        }
    }

    /// Whether the leaf is dirty exactly while it is writable.
    pub(crate) fn by_fault(self, leaf: &Leaf) -> bool {
        !self.dirty_bit || leaf.writes == Writes::AllowedLoggedByFault
    }

    /// The canonical contents of `leaf`.
    fn settle(self, mut leaf: Leaf) -> Leaf {
        leaf.access.write &= leaf.writes.mmu_writable() && (leaf.accessed || !self.saved);
        leaf.dirty = leaf.access.write && (leaf.dirty || self.by_fault(&leaf));
        leaf
    }

    fn allows(self, leaf: &Leaf, access: Access) -> bool {
        (leaf.accessed || !self.faults_unused)
            && (leaf.access.write || !access.write)
            && (leaf.access.execute || !access.execute)
    }
}

/// The number of frames that an entry of `level` covers.
pub(crate) const fn frames(level: u32) -> u64 {
    1 << (9 * (level - 1))
}

#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) rules: Rules,
    /// By first frame.
    pub(crate) leaves: BTreeMap<u64, (u32, Leaf)>,
    /// Generations of markers, by frame.
    pub(crate) markers: BTreeMap<u64, u64>,
    /// Tables below the root, by level and first frame.
    pub(crate) tables: BTreeSet<(u32, u64)>,
    /// The reports that the log must get in this step: first frames and numbers of pages.
    pub(crate) dirtied: Vec<(u64, u64)>,
    pub(crate) accessed: Vec<(u64, u64)>,
    pub(crate) log_on: bool,
}

impl Model {
    pub(crate) fn new(rules: Rules) -> Self {
        Self {
            rules,
            leaves: BTreeMap::new(),
            markers: BTreeMap::new(),
            tables: BTreeSet::new(),
            dirtied: Vec::new(),
            accessed: Vec::new(),
            log_on: false,
        }
    }

    /// The leaf that covers `gfn`: its first frame, its level, its contents.
    pub(crate) fn at(&self, gfn: u64) -> Option<(u64, u32, Leaf)> {
        let (&first, &(level, leaf)) = self.leaves.range(..=gfn).next_back()?;
        (gfn < first + frames(level)).then_some((first, level, leaf))
    }

    pub(crate) fn found(&self, gfn: u64) -> Option<Found> {
        self.at(gfn).map(|(_, level, leaf)| Found { leaf, level })
    }

    /// First frames of the leaves that cover a frame of the range.
    fn within(&self, start: u64, end: u64) -> Vec<u64> {
        let from = self.at(start).map_or(start, |(first, ..)| first);
        self.leaves
            .range(from..end)
            .map(|(&first, _)| first)
            .collect()
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut leaves = [0; 3];
        for &(level, _) in self.leaves.values() {
            leaves[level as usize - 1] += 1;
        }
        let tables = self.tables.len() as u64;
        Stats {
            leaves,
            tables,
            table_bytes: tables * 4096 + self.rules.root_bytes,
            // Not modelled: it depends on grace periods.
            waiting: 0,
            invalidations: 0,
        }
    }

    /// Replaces a leaf or nothing by another leaf or nothing. Records the reports to the log.
    fn put(&mut self, first: u64, level: u32, new: Option<Leaf>) {
        let new = new.map(|leaf| self.rules.settle(leaf));
        self.forget_markers(first, first + frames(level));
        let old = match new {
            Some(leaf) => self.leaves.insert(first, (level, leaf)),
            None => self.leaves.remove(&first),
        };
        let old = old.map(|(_, leaf)| leaf);
        let stays = old.zip(new).is_some_and(|(old, new)| old.pfn == new.pfn);
        // A permission that counts as a store, and a bit that records one.
        let open = |leaf: &Leaf| self.rules.by_fault(leaf) && leaf.dirty;
        let bit = |leaf: &Leaf| !self.rules.by_fault(leaf) && leaf.dirty;
        let opened = new.as_ref().is_some_and(open) && !(stays && old.as_ref().is_some_and(open));
        let lost = old.as_ref().is_some_and(bit) && !(stays && new.as_ref().is_some_and(bit));
        if opened || lost {
            self.dirtied.push((first, frames(level)));
        }
        let used = |leaf: Leaf| leaf.accessed;
        if old.is_some_and(used) && !(stays && new.is_some_and(used)) {
            self.accessed.push((first, frames(level)));
        }
    }

    /// Changes the leaves of a range for which `applies` holds. Returns the number of frames that
    /// they cover.
    fn each(
        &mut self,
        (start, end): (u64, u64),
        applies: impl Fn(&Rules, u64, u64, &Leaf) -> bool,
        change: impl Fn(&Rules, &mut Leaf),
    ) -> u64 {
        let mut changed = 0;
        for first in self.within(start, end) {
            let (level, mut leaf) = self.leaves[&first];
            if applies(&self.rules, first, first + frames(level), &leaf) {
                change(&self.rules, &mut leaf);
                self.put(first, level, Some(leaf));
                changed += frames(level);
            }
        }
        changed
    }

    pub(crate) fn look(&mut self, gfn: u64, access: Access) -> Look {
        let Some((first, level, mut leaf)) = self.at(gfn) else {
            return self.absent(gfn);
        };
        if !self.rules.allows(&leaf, access) {
            return Look::Denied(Found { leaf, level });
        }
        leaf.accessed |= !self.rules.faults_unused;
        leaf.dirty |= self.rules.dirty_bit && access.write;
        // The hardware reports nothing.
        self.leaves.insert(first, (level, leaf));
        Look::Allowed(Found { leaf, level })
    }

    /// The result of a look at a frame that no leaf covers.
    pub(crate) fn absent(&self, gfn: u64) -> Look {
        match self.markers.get(&gfn) {
            Some(&generation) => Look::Mmio { generation },
            None => Look::Absent,
        }
    }

    pub(crate) fn mark_mmio(&mut self, gfn: u64, generation: u64) -> Result<(), Refused> {
        if let Some(existing) = self.found(gfn) {
            return Err(Refused::Conflict { existing });
        }
        self.link_down(gfn, 1);
        self.markers
            .insert(gfn, generation & self.rules.generations);
        Ok(())
    }

    /// Clears the markers of a range and returns their number.
    pub(crate) fn forget_markers(&mut self, start: u64, end: u64) -> u64 {
        let before = self.markers.len();
        self.markers.retain(|gfn, _| !(start..end).contains(gfn));
        (before - self.markers.len()) as u64
    }

    /// Links tables down to one of level `limit` for a frame that no leaf covers. Returns the level
    /// of the lowest table.
    fn link_down(&mut self, gfn: u64, limit: u32) -> u32 {
        let first = |level: u32| gfn & !(frames(level) - 1);
        let mut level = self.rules.levels;
        while level > 1 && self.tables.contains(&(level - 1, first(level))) {
            level -= 1;
        }
        while level > limit {
            level -= 1;
            self.tables.insert((level, first(level + 1)));
        }
        level
    }

    pub(crate) fn fast_fault(&mut self, gfn: u64, access: Access) -> Option<(How, Found)> {
        let (first, level, old) = self.at(gfn)?;
        if self.rules.allows(&old, access) {
            return Some((How::Spurious, Found { leaf: old, level }));
        }
        let mut leaf = old;
        leaf.accessed = true;
        if access.write && !leaf.access.write {
            if !leaf.writes.mmu_writable() || level > 1 && self.log_on {
                return None;
            }
            leaf.access.write = true;
        }
        leaf.dirty |= access.write;
        if !self.rules.allows(&leaf, access) {
            return None;
        }
        self.put(first, level, Some(leaf));
        let found = self.found(gfn)?;
        Some((How::Upgraded, found))
    }

    pub(crate) fn fault(&mut self, fault: Fault, target: Target) -> Result<(How, Found), Refused> {
        let (gfn, access) = (fault.gfn.0, fault.access);
        let stores = target.access.write && target.writes.mmu_writable();
        if access.write && !stores || access.execute && !target.access.execute {
            return Err(Refused::Denied);
        }
        let small_only = target.access.write && self.log_on;
        let limit = if small_only { 1 } else { target.level };
        let aligned = |level: u32| gfn & !(frames(level) - 1);
        let wanted = |level: u32, old: Option<Leaf>| Leaf {
            pfn: Pfn(target.pfn.0 - (gfn - aligned(level))),
            access: Access {
                write: target.access.write || old.is_some_and(|old| old.access.write),
                execute: target.access.execute || old.is_some_and(|old| old.access.execute),
            },
            memory: old.map_or(target.memory, |old| old.memory),
            accessed: true,
            dirty: access.write || old.is_some_and(|old| old.dirty),
            writes: match old {
                Some(old) if old.writes.mmu_writable() && !target.writes.mmu_writable() => {
                    old.writes
                }
                _ => target.writes,
            },
        };
        let how = loop {
            let Some((first, level, old)) = self.at(gfn) else {
                let level = self.link_down(gfn, limit);
                self.put(aligned(level), level, Some(wanted(level, None)));
                break How::Installed;
            };
            if old.pfn.0 + (gfn - first) != target.pfn.0 {
                let existing = Found { leaf: old, level };
                return Err(Refused::Conflict { existing });
            }
            if self.rules.allows(&old, access) {
                break How::Spurious;
            }
            if level <= limit {
                self.put(first, level, Some(wanted(level, Some(old))));
                break How::Upgraded;
            }
            if self.rules.breaks {
                return Err(Refused::TooLarge { level });
            }
            self.split_one(first);
        };
        Ok((how, self.found(gfn).expect("it was just mapped")))
    }

    pub(crate) fn zap(&mut self, start: u64, end: u64) -> u64 {
        let mut zapped = 0;
        for first in self.within(start, end) {
            let (level, _) = self.leaves[&first];
            self.put(first, level, None);
            zapped += frames(level);
        }
        self.forget_markers(start, end);
        // Of the tables, those of the lowest level go if the range covers all of them.
        let spared =
            |&(level, first): &(u32, u64)| level > 1 || first < start || first + frames(2) > end;
        self.tables.retain(spared);
        zapped
    }

    pub(crate) fn zap_all(&mut self) -> u64 {
        let zapped = self.zap(0, u64::MAX);
        self.tables.clear();
        zapped
    }

    /// `marked` selects leaves, by their first frame and their end.
    pub(crate) fn write_protect(
        &mut self,
        range: (u64, u64),
        marked: impl Fn(u64, u64) -> bool,
    ) -> u64 {
        self.each(
            range,
            |_, first, end, leaf| marked(first, end) && leaf.access.write,
            |_, leaf| leaf.access.write = false,
        )
    }

    pub(crate) fn clear_dirty(
        &mut self,
        range: (u64, u64),
        marked: impl Fn(u64, u64) -> bool,
    ) -> u64 {
        self.each(
            range,
            |_, first, end, leaf| marked(first, end) && leaf.dirty,
            |rules, leaf| {
                leaf.dirty = false;
                leaf.access.write &= !rules.by_fault(leaf);
            },
        )
    }

    pub(crate) fn log_by_fault(
        &mut self,
        range: (u64, u64),
        marked: impl Fn(u64, u64) -> bool,
    ) -> u64 {
        self.each(
            range,
            |_, first, end, leaf| {
                marked(first, end) && (leaf.access.write || leaf.writes == Writes::Allowed)
            },
            |_, leaf| {
                leaf.access.write = false;
                leaf.writes = Writes::AllowedLoggedByFault;
            },
        )
    }

    pub(crate) fn unlog(&mut self, range: (u64, u64)) -> u64 {
        self.each(
            range,
            |_, _, _, leaf| leaf.writes == Writes::AllowedLoggedByFault,
            |_, leaf| leaf.writes = Writes::Allowed,
        )
    }

    pub(crate) fn set_writes(&mut self, range: (u64, u64), writes: Writes) -> u64 {
        self.each(
            range,
            |_, _, _, leaf| leaf.writes != writes,
            |_, leaf| leaf.writes = writes,
        )
    }

    pub(crate) fn age(&mut self, range: (u64, u64), clear: bool) -> u64 {
        self.each(
            range,
            |_, _, _, leaf| leaf.accessed,
            |_, leaf| leaf.accessed = !clear,
        )
    }

    fn split_one(&mut self, first: u64) {
        let (level, leaf) = self.leaves.remove(&first).expect("a leaf");
        self.tables.insert((level - 1, first));
        for child in 0..512 {
            let offset = child * frames(level - 1);
            let pfn = Pfn(leaf.pfn.0 + offset);
            let leaf = Leaf { pfn, ..leaf };
            self.leaves.insert(first + offset, (level - 1, leaf));
        }
    }

    pub(crate) fn split(&mut self, start: u64, end: u64, to: u32) -> u64 {
        let mut split = 0;
        loop {
            let mut large = self.within(start, end);
            large.retain(|first| self.leaves[first].0 > to);
            if large.is_empty() {
                return split;
            }
            split += large.len() as u64;
            for first in large {
                self.split_one(first);
            }
        }
    }

    pub(crate) fn recover(
        &mut self,
        (start, end): (u64, u64),
        allowed: impl Fn(Gfn, u32) -> Option<Target>,
    ) -> u64 {
        let mut recovered = 0;
        for level in (2..=self.rules.top_leaf).rev() {
            let tables: Vec<u64> = self
                .tables
                .iter()
                .filter(|(table, first)| {
                    table + 1 == level && *first >= start && first + frames(level) <= end
                })
                .map(|&(_, first)| first)
                .collect();
            for first in tables {
                let Some(target) = allowed(Gfn(first), level).filter(|t| t.level >= level) else {
                    continue;
                };
                for child in self.within(first, first + frames(level)) {
                    let (level, _) = self.leaves[&child];
                    self.put(child, level, None);
                }
                self.tables.retain(|&(table, at)| {
                    table >= level || at < first || at >= first + frames(level)
                });
                let leaf = Leaf {
                    pfn: target.pfn,
                    access: target.access,
                    memory: target.memory,
                    accessed: true,
                    dirty: false,
                    writes: target.writes,
                };
                self.put(first, level, Some(leaf));
                recovered += 1;
            }
        }
        recovered
    }
}
