//! A VM of two pages, its vCPU, and its log.

use super::machine::{Cached, Gate, Machine};
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread::{self, JoinHandle};
use pageferry_addr::{Gfn, GfnRange, Pfn};
use pageferry_tdp::format::{Access, Format, Leaf, MemoryType, Writes};
use pageferry_tdp::{Fault, Found, Log, Mapped, Mmu, Refused, Target, Worker};

pub(crate) type W<F> = Worker<F, Machine>;
/// A thread that returns its worker.
pub(crate) type Run<F, O> = JoinHandle<(O, W<F>)>;

/// Tables, one vCPU's TLB, a page's contents, and a log of four frames.
pub(crate) struct Vm<F: Format> {
    pub(crate) mmu: std::sync::Arc<Mmu<F, Machine>>,
    pub(crate) gate: Arc<Gate>,
    pub(crate) log: Bits,
    /// The last value that the guest stored.
    pub(crate) memory: Arc<AtomicU64>,
}

impl<F: Format> Clone for Vm<F> {
    fn clone(&self) -> Self {
        Self {
            mmu: self.mmu.clone(),
            gate: self.gate.clone(),
            log: self.log.clone(),
            memory: self.memory.clone(),
        }
    }
}

/// A log: one bit a frame.
#[derive(Clone)]
pub(crate) struct Bits(Arc<AtomicU64>);

impl Log for Bits {
    fn dirtied(&self, gfn: Gfn, pages: u64) {
        let bits = ((1 << pages) - 1) << gfn.0;
        self.0.fetch_or(bits, Ordering::AcqRel);
    }
}

impl Bits {
    pub(crate) fn take(&self) -> u64 {
        self.0.swap(0, Ordering::AcqRel)
    }
}

pub(crate) const BOTH: u64 = 2;
/// The frame behind frame 0. The frame behind frame 1 is the next one.
pub(crate) const OLD: u64 = 8;
pub(crate) const NEW: u64 = 12;

pub(crate) fn range(pages: u64) -> GfnRange {
    GfnRange::new(Gfn(0), pages).unwrap()
}

pub(crate) fn target(pfn: u64, level: u32) -> Target {
    Target {
        pfn: Pfn(pfn),
        level,
        access: Access::READ_WRITE,
        writes: Writes::Allowed,
        memory: MemoryType::WriteBack,
    }
}

pub(crate) fn fault<F: Format>(
    worker: &mut W<F>,
    gfn: u64,
    access: Access,
    target: Target,
    log: &impl Log,
) -> Result<Mapped, Refused> {
    let fault = Fault {
        gfn: Gfn(gfn),
        access,
    };
    worker.fault(worker.ticket(), fault, target, log)
}

impl<F: Format> Vm<F> {
    pub(crate) fn new() -> Self {
        let gate = Arc::new(Mutex::new(None));
        Self {
            mmu: Mmu::new(Machine::new(gate.clone())).unwrap(),
            gate,
            log: Bits(Arc::new(AtomicU64::new(0))),
            memory: Arc::new(AtomicU64::new(0)),
        }
    }

    /// Calls a function with a worker, and drops the worker.
    pub(crate) fn before<O>(&self, body: impl FnOnce(&mut W<F>) -> O) -> O {
        body(&mut self.mmu.worker())
    }

    pub(crate) fn spawn<O: 'static>(
        &self,
        body: impl FnOnce(&Self, &mut W<F>) -> O + 'static,
    ) -> Run<F, O>
    where
        W<F>: 'static,
    {
        let (vm, mut worker) = (self.clone(), self.mmu.worker());
        thread::spawn(move || (body(&vm, &mut worker), worker))
    }

    /// Runs two threads, and loom starts the second first if `swap`. Returns their results and
    /// their workers.
    pub(crate) fn race<A: 'static, B: 'static>(
        &self,
        swap: bool,
        a: impl FnOnce(&Self, &mut W<F>) -> A + 'static,
        b: impl FnOnce(&Self, &mut W<F>) -> B + 'static,
    ) -> (A, B, [W<F>; 2])
    where
        W<F>: 'static,
    {
        let (a, b) = if swap {
            let b = self.spawn(b);
            (self.spawn(a), b)
        } else {
            (self.spawn(a), self.spawn(b))
        };
        let ((a, first), (b, second)) = (a.join().unwrap(), b.join().unwrap());
        (a, b, [first, second])
    }

    /// The vCPU's store of `value` to `gfn`, by the TLB or the tables. `fix` handles the fault.
    /// Returns whether the store succeeded.
    pub(crate) fn store(
        &self,
        worker: &mut W<F>,
        gfn: u64,
        value: u64,
        fix: impl FnOnce(&mut W<F>) -> bool,
    ) -> bool {
        let mut tlb = self.gate.lock().unwrap();
        if !tlb.is_some_and(|cached| cached.write) {
            *tlb = seen(worker, gfn);
            if tlb.is_none() && fix(worker) {
                *tlb = seen(worker, gfn);
            }
            if tlb.is_none() {
                return false;
            }
        }
        self.memory.store(value, Ordering::Relaxed);
        true
    }

    /// The counts equal the tables' contents, and all unused tables are free.
    pub(crate) fn check<const N: usize>(&self, mut workers: [W<F>; N]) {
        let mut leaves = [0; 3];
        let all = GfnRange::new(Gfn(0), F::GFN_LIMIT.0).unwrap();
        workers[0].scan(all, |_, found| leaves[found.level as usize - 1] += 1);
        drop(workers);
        let stats = self.mmu.stats();
        assert_eq!(stats.leaves, leaves);
        assert_eq!(self.mmu.platform().live() as u64, 1 + stats.tables);
    }

    /// The frames that are dirty in the tables or in the log.
    pub(crate) fn dirty(&self, worker: &mut W<F>) -> u64 {
        worker.clear_dirty(range(4), &self.log);
        self.log.take()
    }
}

/// The vCPU's TLB entry after a successful store.
pub(crate) fn seen<F: Format>(worker: &mut W<F>, gfn: u64) -> Option<Cached> {
    let Found { leaf, .. } = worker.translate(Gfn(gfn), Access::READ_WRITE)?;
    let Leaf { pfn, .. } = leaf;
    Some(Cached {
        pfn: pfn.0,
        write: true,
    })
}
pub(crate) const AT_0: Fault = Fault {
    gfn: Gfn(0),
    access: Access::READ_WRITE,
};
