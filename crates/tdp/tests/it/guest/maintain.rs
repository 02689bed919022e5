//! The work of the threads other than vCPUs.

use super::board::Board;
use super::machine::{Machine, Role, range};
use super::sync::{Random, point, thread};
use pageferry_addr::Gfn;
use pageferry_tdp::format::{Access, DirtyBy, Format, MemoryType, Writes};
use pageferry_tdp::{Target, Worker};

pub(crate) struct Maintainer<'m, F: Format> {
    machine: &'m Machine<F>,
    worker: Worker<F, Board<F>>,
    role: Role,
    random: Random,
}

impl<'m, F: Format> Maintainer<'m, F> {
    pub(crate) fn new(machine: &'m Machine<F>, role: Role) -> Self {
        Self {
            machine,
            worker: machine.mmu.worker(),
            role,
            random: Random::new(100 + role as u64),
        }
    }

    pub(crate) fn run(mut self) {
        let mut done = 0;
        while self.machine.goes_round(done) {
            done += 1;
            match self.role {
                Role::Notifier => self.move_pages(),
                Role::Logger | Role::LazyLogger => self.log(),
                Role::Resizer => self.resize(),
                Role::Splitter => self.split(),
                Role::Ager => self.age(),
                Role::Zapper => self.zap(),
                Role::Destroyer => self.zap_all(),
            }
            self.worker.reclaim();
            thread::yield_now();
        }
    }

    /// Some pages: a single one, or a piece whose size is a power of two.
    fn some(&mut self) -> (u64, u64) {
        let pages = self.machine.host.pages();
        let size = 1 << self.random.below(u64::from(pages.ilog2()));
        (self.random.below(pages / size) * size, size)
    }

    fn move_pages(&mut self) {
        let host = &self.machine.host;
        let (first, pages) = self.some();
        let to = self.random.below(2);
        let piece = [range(first, pages)];
        let invalidating = self.worker.invalidate(&piece, &self.machine.log);
        let moving: Vec<(u64, u64)> = (first..first + pages)
            .map(|gfn| (gfn, host.take(gfn)))
            .collect();
        point();
        for (gfn, from) in moving {
            if from == to {
                host.keep(gfn, from);
            } else {
                host.give(gfn, from, to);
            }
        }
        point();
        drop(invalidating);
    }

    fn log(&mut self) {
        let machine = self.machine;
        let all = range(0, machine.host.pages());
        machine.log.switch(true);
        machine.mmu.platform().wait_for_faults();
        if self.role == Role::Logger {
            self.worker.split(all, 1, &()).expect("memory");
        }
        if F::DIRTY_BY == DirtyBy::Hardware {
            self.worker.clear_dirty(all, &());
        } else {
            self.worker.write_protect(all, &());
        }
        let mut copy = vec![Vec::new(); machine.host.pages() as usize];
        for gfn in 0..copy.len() {
            machine.copy_page(&mut copy, gfn);
        }
        for _ in 0..2 {
            thread::yield_now();
            machine.pass(&mut self.worker, &mut copy);
        }
        machine.last_pass(&mut self.worker, &mut copy);
        machine.log.switch(false);
        machine.mmu.platform().wait_for_faults();
        self.recover();
    }

    fn recover(&mut self) {
        let host = &self.machine.host;
        let all = range(0, host.pages());
        self.worker.recover(all, &(), |Gfn(gfn), level| {
            Some(Target {
                pfn: host.piece::<F>(gfn, level)?,
                level,
                access: Access::ALL,
                writes: Writes::Allowed,
                memory: MemoryType::WriteBack,
            })
        });
    }

    fn resize(&mut self) {
        if self.random.one_in(2) {
            self.split();
        } else {
            self.recover();
        }
    }

    fn split(&mut self) {
        let (first, pages) = self.some();
        self.worker
            .split(range(first, pages), 1, &())
            .expect("memory");
    }

    fn age(&mut self) {
        let (first, pages) = self.some();
        self.worker
            .age(range(first, pages), true, &self.machine.log);
    }

    /// Keeps the log's reader out while dirty bits are on their way to the log.
    fn apart(&self) -> Option<impl Drop + use<'m, F>> {
        let machine = self.machine;
        (F::DIRTY_BY == DirtyBy::Hardware).then(|| machine.passes.lock().unwrap())
    }

    fn zap(&mut self) {
        let (first, pages) = self.some();
        let _apart = self.apart();
        self.worker.zap(range(first, pages), &self.machine.log);
    }

    fn zap_all(&mut self) {
        let _apart = self.apart();
        self.worker
            .zap_all(&self.machine.log)
            .expect("memory for a root");
    }
}
