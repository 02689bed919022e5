//! The MMU and the plain model make the same calls, and must agree after each.
//!
//! The test compares the result of each call, every leaf (by `scan` and by `walk`), the counts and
//! the bytes, and the log's reports. It also checks four more rules:
//!
//! - After a call has returned, no TLB entry contradicts the tables.
//! - Each store of the guest is in the log, or in a dirty bit, until a reader has taken it.
//! - If the format needs break-before-make, each such change breaks the entry first.
//! - In the end all memory is free.

use super::machine::{Cached, Machine, Parts, range};
use super::model::{Model, Rules, frames};
use super::ops::{At, Grant, Op, Span, op};
use pageferry_addr::{Gfn, GfnRange, Pfn};
use pageferry_tdp::format::{Access, Format, MemoryType, Writes};
use pageferry_tdp::{Fault, Found, How, Log, Look, Mmu, Refused, Target, Ticket, Worker};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The reports that the log received.
#[derive(Default)]
struct Told {
    on: Cell<bool>,
    dirtied: RefCell<Vec<(u64, u64)>>,
    accessed: RefCell<Vec<(u64, u64)>>,
}

impl Log for Told {
    fn is_on(&self) -> bool {
        self.on.get()
    }

    fn dirtied(&self, gfn: Gfn, pages: u64) {
        self.dirtied.borrow_mut().push((gfn.0, pages));
    }

    fn accessed(&self, gfn: Gfn, pages: u64) {
        self.accessed.borrow_mut().push((gfn.0, pages));
    }
}

type W<F> = Worker<F, Machine>;

struct Agree<F: Format> {
    parts: Arc<Parts>,
    mmu: Arc<Mmu<F, Machine>>,
    model: Model,
    told: Told,
    /// The log's bits: pages that were reported, and that the log's reader has not taken.
    bits: Vec<(u64, u64)>,
    /// Frames that the guest has stored to and no reader has taken.
    stored: BTreeSet<u64>,
    /// Selects the frames behind the regions.
    generation: u64,
}

/// The frame behind `gfn`, in a page of the level that is granted.
fn target(generation: u64, gfn: u64, grant: Grant) -> Target {
    let region = (gfn >> 18) % 8;
    let behind = (region * 8 + generation % 8 + 1) << 18 | gfn & 0x3_ffff;
    let pfn = match (grant.wrong, grant.level) {
        (false, _) | (true, 3..) => behind,
        (true, 2) => behind ^ 512,
        (true, _) => behind ^ 1,
    };
    let memory = match region % 3 {
        0 => MemoryType::WriteBack,
        1 => MemoryType::WriteCombining,
        _ => MemoryType::Device,
    };
    Target {
        pfn: Pfn(pfn),
        level: grant.level,
        access: grant.access,
        writes: grant.writes,
        memory,
    }
}

fn covers(bits: &[(u64, u64)], gfn: u64) -> bool {
    bits.iter()
        .any(|&(first, pages)| first <= gfn && gfn < first + pages)
}

fn sorted(mut events: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    events.sort_unstable();
    events.dedup();
    events
}

fn whole<F: Format>((start, end): (u64, u64)) -> GfnRange {
    debug_assert!(end <= F::GFN_LIMIT.0);
    range(start, end - start)
}

impl<F: Format> Agree<F> {
    fn new() -> Self {
        let parts = Arc::new(Parts::default());
        let mmu = Mmu::<F, _>::new(Machine(Arc::clone(&parts))).unwrap();
        parts.watch::<F>(mmu.root());
        Self {
            parts,
            mmu,
            model: Model::new(Rules::of::<F>()),
            told: Told::default(),
            bits: Vec::new(),
            stored: BTreeSet::new(),
            generation: 0,
        }
    }

    fn fault_with(
        &mut self,
        w: &mut W<F>,
        ticket: Ticket,
        gfn: u64,
        access: Access,
        target: Target,
    ) -> Result<(How, Found), Refused> {
        let fault = Fault {
            gfn: Gfn(gfn),
            access,
        };
        let mapped = w.fault(ticket, fault, target, &self.told)?;
        assert_eq!(mapped.found().level, mapped.level);
        Ok((mapped.how, mapped.found()))
    }

    /// A fault. It may find no memory.
    fn fault(
        &mut self,
        w: &mut W<F>,
        gfn: u64,
        access: Access,
        grant: Grant,
    ) -> Result<(How, Found), Refused> {
        let target = target(self.generation, gfn, grant);
        let fault = Fault {
            gfn: Gfn(gfn),
            access,
        };
        let ticket = w.ticket();
        let mut answer = self.fault_with(w, ticket, gfn, access, target);
        if matches!(answer, Err(Refused::OutOfTables(_))) {
            self.compare(w);
            *self.parts.spare.lock().unwrap() = None;
            answer = self.fault_with(w, ticket, gfn, access, target);
        }
        assert_eq!(answer, self.model.fault(fault, target));
        answer
    }

    fn fast_fault(&mut self, w: &mut W<F>, gfn: u64, access: Access) -> Option<(How, Found)> {
        let fault = Fault {
            gfn: Gfn(gfn),
            access,
        };
        let mapped = w.fast_fault(fault, &self.told);
        let answer = mapped.map(|mapped| (mapped.how, mapped.found()));
        assert_eq!(answer, self.model.fast_fault(gfn, access));
        answer
    }

    /// Hardware's walk on a TLB miss. The TLB then has the translation.
    fn look(&mut self, w: &mut W<F>, gfn: u64, access: Access) -> bool {
        let seen = w.look(Gfn(gfn), access);
        assert_eq!(seen, self.model.look(gfn, access));
        let Look::Allowed(found) = seen else {
            return false;
        };
        let cached = Cached::new(gfn, found, frames(found.level), self.by_bit(found));
        let mut tlb = self.parts.tlb.lock().unwrap();
        if tlb.len() >= 24 {
            tlb.remove(0);
        }
        tlb.push(cached);
        drop(tlb);
        assert!(cached.allows(gfn, access));
        if access.write {
            self.stored.insert(gfn);
        }
        true
    }

    fn by_bit(&self, found: Found) -> bool {
        !self.model.rules.by_fault(&found.leaf)
    }

    fn guest(&mut self, w: &mut W<F>, gfn: u64, access: Access, grant: Grant) {
        let mut tlb = self.parts.tlb.lock().unwrap().clone().into_iter();
        if tlb.any(|cached| cached.allows(gfn, access)) {
            // The TLB hit neither reads nor changes the tables.
            if access.write {
                self.stored.insert(gfn);
            }
            return;
        }
        if self.look(w, gfn, access) {
            return;
        }
        if self.fast_fault(w, gfn, access).is_none() && self.fault(w, gfn, access, grant).is_err() {
            return;
        }
        // The vCPU's own TLB may hold the entry at which it faulted. Hardware drops that.
        assert!(
            self.look(w, gfn, access),
            "the access goes through after its fault"
        );
    }

    fn apply(&mut self, w: &mut W<F>, op: &Op) {
        match *op {
            Op::Guest(at, access, grant) => self.guest(w, at.gfn::<F>(), access, grant),
            Op::Fault(at, access, grant) => drop(self.fault(w, at.gfn::<F>(), access, grant)),
            Op::Fast(at, access) => drop(self.fast_fault(w, at.gfn::<F>(), access)),
            Op::Look(at, access) => drop(self.look(w, at.gfn::<F>(), access)),
            Op::MarkMmio(at, generation) => self.mark_mmio(w, at.gfn::<F>(), generation),
            Op::ForgetMmio(at) => {
                let early = w.ticket();
                assert_eq!(w.forget_mmio(), self.model.forget_markers(0, u64::MAX));
                *self.parts.spare.lock().unwrap() = None;
                let late = w.mark_mmio(early, Gfn(at.gfn::<F>()), 0);
                assert_eq!(late, Err(Refused::Invalidated));
            }
            Op::Zap(span) => {
                let (start, end) = span.ends::<F>();
                let zapped = w.zap(whole::<F>((start, end)), &self.told);
                assert_eq!(zapped, self.model.zap(start, end));
            }
            Op::ZapAll => self.zap_all(w),
            Op::Protect(span) => {
                let range = span.ends::<F>();
                let protected = w.write_protect(whole::<F>(range), &self.told);
                assert_eq!(protected, self.model.write_protect(range, |_, _| true));
            }
            Op::ProtectMask(at, mask) => {
                let (base, range, marked) = masked::<F>(at, mask);
                let protected = w.write_protect_mask(base, mask, &self.told);
                assert_eq!(protected, self.model.write_protect(range, marked));
            }
            Op::Clean(span) => {
                let range = span.ends::<F>();
                let cleaned = w.clear_dirty(whole::<F>(range), &self.told);
                assert_eq!(cleaned, self.model.clear_dirty(range, |_, _| true));
            }
            Op::CleanMask(at, mask) => {
                let (base, range, marked) = masked::<F>(at, mask);
                let cleaned = w.clear_dirty_mask(base, mask, &self.told);
                assert_eq!(cleaned, self.model.clear_dirty(range, marked));
            }
            Op::LogByFault(span) => {
                let range = span.ends::<F>();
                let logged = w.log_by_fault(whole::<F>(range), &self.told);
                assert_eq!(logged, self.model.log_by_fault(range, |_, _| true));
            }
            Op::LogByFaultMask(at, mask) => {
                let (base, range, marked) = masked::<F>(at, mask);
                let logged = w.log_by_fault_mask(base, mask, &self.told);
                assert_eq!(logged, self.model.log_by_fault(range, marked));
            }
            Op::Unlog(span) => {
                let range = span.ends::<F>();
                let unlogged = w.unlog(whole::<F>(range), &self.told);
                assert_eq!(unlogged, self.model.unlog(range));
            }
            Op::SetWrites(span, writes) => {
                let range = span.ends::<F>();
                let changed = w.set_writes(whole::<F>(range), writes, &self.told);
                assert_eq!(changed, self.model.set_writes(range, writes));
            }
            Op::Age(span, clear) => self.age(w, span.ends::<F>(), clear),
            Op::Split(span, to) => self.split(w, span, to),
            Op::Recover(span, grant) => self.recover(w, span.ends::<F>(), grant),
            Op::Invalidate(..) | Op::Deferred(_) | Op::OtherWorker => {
                unreachable!("needs both workers")
            }
            Op::TakeLog => self.take_log(w),
            Op::LogOn(on) => {
                self.told.on.set(on);
                self.model.log_on = on;
            }
            Op::Flush => w.flush(),
            Op::Reclaim => drop(w.reclaim()),
            Op::Starve(tables) => *self.parts.spare.lock().unwrap() = Some(tables),
        }
    }

    fn mark_mmio(&mut self, w: &mut W<F>, gfn: u64, generation: u64) {
        let mark = |w: &mut W<F>| {
            let ticket = w.ticket();
            w.mark_mmio(ticket, Gfn(gfn), generation)
        };
        let mut marked = mark(w);
        if matches!(marked, Err(Refused::OutOfTables(_))) {
            self.compare(w);
            *self.parts.spare.lock().unwrap() = None;
            marked = mark(w);
        }
        assert_eq!(marked, self.model.mark_mmio(gfn, generation));
    }

    fn zap_all(&mut self, w: &mut W<F>) {
        let mut zapped = w.zap_all(&self.told);
        if zapped.is_err() {
            self.compare(w);
            *self.parts.spare.lock().unwrap() = None;
            zapped = w.zap_all(&self.told);
        }
        self.parts.watch::<F>(self.mmu.root());
        assert_eq!(zapped, Ok(self.model.zap_all()));
    }

    fn age(&mut self, w: &mut W<F>, (start, end): (u64, u64), clear: bool) {
        let young = w.age(whole::<F>((start, end)), clear, &self.told);
        assert_eq!(young, self.model.age((start, end), clear));
        if clear && self.model.rules.saved {
            for cached in self.parts.tlb.lock().unwrap().iter_mut() {
                cached.aged = true;
            }
        }
    }

    fn split(&mut self, w: &mut W<F>, span: Span, to: u32) {
        let (start, end) = match to {
            1 => span.short::<F>(),
            _ => span.ends::<F>(),
        };
        let range = whole::<F>((start, end));
        let mut split = w.split(range, to, &self.told);
        let starved = split.is_err();
        if starved {
            self.compare_halfway(w);
            *self.parts.spare.lock().unwrap() = None;
            split = w.split(range, to, &self.told);
        }
        let (split, all) = (split.unwrap(), self.model.split(start, end, to));
        assert!(split == all || starved && split < all);
    }

    fn recover(&mut self, w: &mut W<F>, (start, end): (u64, u64), grant: Grant) {
        let generation = self.generation;
        let allowed = |gfn: Gfn, level: u32| {
            // Large pages back only some of the regions.
            let small = (gfn.0 >> 9) % 3 == 1;
            let wrong = false;
            let grant = Grant {
                level,
                wrong,
                ..grant
            };
            (!small).then(|| target(generation, gfn.0, grant))
        };
        let allowed = |gfn, level| allowed(gfn, level).filter(|_| level <= grant.level);
        let range = whole::<F>((start, end));
        let recovered = w.recover(range, &self.told, allowed);
        assert_eq!(recovered, self.model.recover((start, end), allowed));
    }

    fn invalidate(&mut self, workers: &mut [W<F>; 2], spans: &[Span], at: At, grant: Grant) {
        let ranges: Vec<_> = spans.iter().map(|span| span.ends::<F>()).collect();
        let wholes: Vec<_> = ranges.iter().map(|&ends| whole::<F>(ends)).collect();
        let (gfn, access) = (at.gfn::<F>(), Access::READ);
        let [worker, other] = workers;
        let early = worker.ticket();
        let invalidating = other.invalidate(&wholes, &self.told);
        let zapped: u64 = ranges
            .iter()
            .map(|&(start, end)| self.model.zap(start, end))
            .sum();
        assert_eq!(invalidating.zapped(), zapped);
        let mut start = ranges.iter().map(|ends| ends.0).min().unwrap();
        let mut end = ranges.iter().map(|ends| ends.1).max().unwrap();
        if self.model.rules.breaks {
            // The rest of a removed large page also stays empty until the flush.
            start &= !(frames(3) - 1);
            end = end.next_multiple_of(frames(3));
        }
        assert_eq!(worker.is_invalidating(Gfn(gfn)), start <= gfn && gfn < end);
        // A fault meanwhile. It may map only a page that is wholly outside the ranges.
        let fault = Fault {
            gfn: Gfn(gfn),
            access,
        };
        let page = frames(grant.level);
        let behind = (1 << 18) | gfn & 0x3_ffff;
        let target = Target {
            pfn: Pfn(behind),
            level: grant.level,
            access: Access::ALL,
            writes: Writes::Allowed,
            memory: MemoryType::WriteBack,
        };
        *self.parts.spare.lock().unwrap() = None;
        let first = gfn & !(page - 1);
        let (hit, hit_large) = (
            start <= gfn && gfn < end,
            first < end && start < first + page,
        );
        if hit_large {
            let refused = worker.fault(worker.ticket(), fault, target, &self.told);
            assert_eq!(refused, Err(Refused::Invalidated));
        }
        if hit {
            let refused = worker.mark_mmio(worker.ticket(), Gfn(gfn), 1);
            assert_eq!(refused, Err(Refused::Invalidated));
        }
        drop(invalidating);
        self.generation += 1;
        // Faults with an old ticket succeed where no part of the page was invalidated.
        let marked = worker.mark_mmio(early, Gfn(gfn), 1);
        if hit {
            assert_eq!(marked, Err(Refused::Invalidated));
        } else {
            assert_eq!(marked, self.model.mark_mmio(gfn, 1));
        }
        let late = self.fault_with(worker, early, gfn, access, target);
        if hit_large {
            assert_eq!(late, Err(Refused::Invalidated));
        } else {
            assert_eq!(late, self.model.fault(fault, target));
        }
        assert!(!worker.is_invalidating(Gfn(gfn)));
    }

    fn take_log(&mut self, w: &mut W<F>) {
        self.hear();
        let taken = std::mem::take(&mut self.bits);
        for &(first, pages) in &taken {
            let ends = (first, first + pages);
            let cleaned = w.clear_dirty(whole::<F>(ends), &self.told);
            assert_eq!(cleaned, self.model.clear_dirty(ends, |_, _| true));
        }
        self.hear();
        self.stored.retain(|&gfn| !covers(&taken, gfn));
    }

    /// Compares the reports since the last call, and keeps the bits.
    fn hear(&mut self) {
        let dirtied = sorted(self.told.dirtied.take());
        assert_eq!(
            dirtied,
            sorted(std::mem::take(&mut self.model.dirtied)),
            "dirtied"
        );
        let accessed = sorted(self.told.accessed.take());
        assert_eq!(
            accessed,
            sorted(std::mem::take(&mut self.model.accessed)),
            "accessed"
        );
        self.bits.extend(dirtied);
    }

    fn scanned(&mut self, w: &mut W<F>) -> Vec<(u64, Found)> {
        let mut scanned = Vec::new();
        let all = range(0, F::GFN_LIMIT.0);
        w.scan(all, |gfn, found| scanned.push((gfn.0, found)));
        scanned
    }

    /// The tables equal the model.
    fn compare(&mut self, w: &mut W<F>) {
        let scanned = self.scanned(w);
        let model = self.model.leaves.iter();
        let expected: Vec<_> = model
            .map(|(&first, &(level, leaf))| (first, Found { leaf, level }))
            .collect();
        if scanned != expected {
            let differs = scanned.iter().zip(&expected).find(|(a, b)| a != b);
            panic!(
                "{} leaves, {} expected; {differs:x?}",
                scanned.len(),
                expected.len()
            );
        }
        for at in At::all() {
            let gfn = at.gfn::<F>();
            assert_eq!(w.walk(Gfn(gfn)), self.model.found(gfn), "{gfn:#x}");
            if self.model.found(gfn).is_none() {
                let seen = w.look(Gfn(gfn), Access::READ);
                assert_eq!(seen, self.model.absent(gfn), "{gfn:#x}");
            }
        }
        assert_eq!(w.walk(F::GFN_LIMIT), None);
        let stats = self.mmu.stats();
        let waiting = 0;
        assert_eq!(
            pageferry_tdp::Stats { waiting, ..stats },
            self.model.stats()
        );
        self.parts.look(None);
    }

    /// The tables translate like the model, perhaps by smaller pages.
    fn compare_halfway(&mut self, w: &mut W<F>) {
        let mut covered = 0;
        for (gfn, Found { leaf, level }) in self.scanned(w) {
            let (first, old_level, mut old) = self.model.at(gfn).expect("nothing new");
            old.pfn.0 += gfn - first;
            assert!(level <= old_level && leaf == old, "{gfn:#x}");
            covered += frames(level);
        }
        let all = self.model.leaves.values();
        assert_eq!(covered, all.map(|&(level, _)| frames(level)).sum::<u64>());
    }

    /// No TLB entry allows an access that the tables forbid, or a store that nobody would notice.
    fn check_tlb(&mut self, flushed: bool) {
        let mut tlb = self.parts.tlb.lock().unwrap();
        for cached in tlb.iter_mut() {
            cached.aged &= !flushed;
            let mut gfn = cached.first;
            while gfn < cached.first + cached.frames {
                let Some((first, level, leaf)) = self.model.at(gfn) else {
                    panic!("{cached:x?} is stale: nothing is mapped at {gfn:#x}");
                };
                let same = leaf.pfn.0 + (gfn - first) == cached.pfn + (gfn - cached.first);
                let write = leaf.access.write && leaf.dirty || cached.aged;
                let execute = leaf.access.execute;
                assert!(
                    same && (write || !cached.write) && (execute || !cached.execute),
                    "{cached:x?} is stale: {leaf:x?} of level {level} is mapped at {first:#x}"
                );
                gfn = first + frames(level);
            }
        }
    }

    /// No store is lost.
    fn check_log(&self) {
        for &gfn in &self.stored {
            let by_bit =
                |leaf: &pageferry_tdp::format::Leaf| leaf.dirty && !self.model.rules.by_fault(leaf);
            let bit = self.model.at(gfn).is_some_and(|(_, _, leaf)| by_bit(&leaf));
            assert!(
                bit || covers(&self.bits, gfn),
                "the store to {gfn:#x} is lost"
            );
        }
    }

    fn step(&mut self, workers: &mut [W<F>; 2], op: &Op) {
        match op {
            Op::Deferred(ops) => workers[0].deferred(|w| {
                for op in ops {
                    self.apply(w, op);
                    self.hear();
                    self.compare(w);
                }
            }),
            Op::Invalidate(spans, at, grant) => self.invalidate(workers, spans, *at, *grant),
            Op::OtherWorker => workers.swap(0, 1),
            _ => self.apply(&mut workers[0], op),
        }
        self.hear();
        self.compare(&mut workers[0]);
        let flushes = !matches!(
            op,
            Op::Guest(..)
                | Op::Fault(..)
                | Op::Fast(..)
                | Op::Look(..)
                | Op::MarkMmio(..)
                | Op::ForgetMmio(_)
                | Op::Age(..)
                | Op::Reclaim
                | Op::LogOn(_)
                | Op::Starve(_)
                | Op::OtherWorker
                | Op::ProtectMask(_, 0)
                | Op::CleanMask(_, 0)
                | Op::LogByFaultMask(_, 0)
        );
        self.check_tlb(flushes);
        self.check_log();
    }

    /// Checks that follow the drop of all workers.
    fn finish(self) {
        let Self {
            parts, mmu, model, ..
        } = self;
        let live = || parts.live.load(Ordering::Relaxed);
        assert_eq!(
            live(),
            model.tables.len() + 1,
            "no table is kept but those in use"
        );
        drop(mmu);
        assert_eq!(live(), 0);
    }
}

/// The base of a mask, its range, and the leaves that it selects.
fn masked<F: Format>(at: At, mask: u64) -> (Gfn, (u64, u64), impl Fn(u64, u64) -> bool) {
    let base = at.gfn::<F>();
    let marked = move |first: u64, end: u64| {
        (0..64).any(|bit| mask >> bit & 1 != 0 && first <= base + bit && base + bit < end)
    };
    (Gfn(base), (base, (base + 64).min(F::GFN_LIMIT.0)), marked)
}

fn run<F: Format>(ops: &[Op]) {
    let mut agree = Agree::<F>::new();
    let mut workers = [agree.mmu.worker(), agree.mmu.worker()];
    for op in ops {
        agree.step(&mut workers, op);
    }
    drop(workers);
    agree.finish();
}

/// Not generic, since a test runner takes long to compile.
fn check(run: fn(&[Op])) {
    let cases = std::env::var("PROPTEST_CASES").ok();
    let config = ProptestConfig {
        cases: cases.and_then(|n| n.parse().ok()).unwrap_or(128),
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..ProptestConfig::default()
    };
    let ops = prop::collection::vec(op(), 10..60);
    let agreed = TestRunner::new(config).run(&ops, |ops| {
        run(&ops);
        Ok(())
    });
    if let Err(failure) = agreed {
        panic!("{failure}");
    }
}

macro_rules! formats {
    ($($name:ident: $format:ty),+ $(,)?) => { $(
        #[test] fn $name() { check(run::<$format>); }
    )+ };
}

mod of {
    pub(super) use pageferry_tdp::format::*;
}

formats! {
    ept4: of::Ept4,
    ept5: of::Ept5,
    ept4_no_ad: of::Ept4NoAd,
    npt4: of::Npt4,
    npt5: of::Npt5,
    sv48x4_svade: of::Sv48x4Svade,
    sv48x4_svadu: of::Sv48x4Svadu,
    sv57x4_svade: of::Sv57x4Svade,
    sv57x4_svadu: of::Sv57x4Svadu,
    arm64_ipa40: of::Arm64Ipa40<false>,
    arm64_ipa40_hafdbs: of::Arm64Ipa40<true>,
    arm64_ipa44_hafdbs: of::Arm64Ipa44<true>,
    arm64_ipa48: of::Arm64Ipa48<false>,
}
