//! Tables that allow only one writer, used by several threads. Their users must put them behind a
//! mutex.

use super::{Found, Parallel, Scheme, Worker};
use pageferry_addr::{Gfn, GfnRange, Pfn};
use std::marker::PhantomData;
use std::sync::PoisonError;
use std::sync::{Arc, Mutex, MutexGuard};

/// `S` itself with one thread. With two threads, `S` behind the standard library's `Mutex`, which
/// each call locks once.
#[derive(Debug)]
pub(crate) struct Locked<S>(PhantomData<S>);

impl<S: Scheme> Scheme for Locked<S> {
    const NAME: &'static str = S::NAME;
    type Single = S::Single;

    fn single() -> S::Single {
        S::single()
    }
}

impl<S> Parallel for Locked<S>
where
    S: Scheme,
    S::Single: Send,
{
    type Tables = Arc<Mutex<S::Single>>;
    type Worker = MutexWorker<S::Single>;

    fn tables() -> Self::Tables {
        Arc::new(Mutex::new(S::single()))
    }

    fn worker(tables: &Self::Tables) -> Self::Worker {
        MutexWorker(Arc::clone(tables))
    }
}

/// A thread's handle to tables behind a mutex.
#[derive(Debug)]
pub(crate) struct MutexWorker<W>(Arc<Mutex<W>>);

impl<W> MutexWorker<W> {
    #[inline]
    fn lock(&self) -> MutexGuard<'_, W> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<W: Worker> Worker for MutexWorker<W> {
    #[inline]
    fn map(&mut self, gfn: Gfn, pfn: Pfn) {
        self.lock().map(gfn, pfn);
    }

    fn map_range(&mut self, range: GfnRange, pfn: Pfn) {
        self.lock().map_range(range, pfn);
    }

    #[inline]
    fn find(&mut self, gfn: Gfn) -> Option<Found> {
        self.lock().find(gfn)
    }

    fn protect_range(&mut self, range: GfnRange) {
        self.lock().protect_range(range);
    }

    fn unmap_range(&mut self, range: GfnRange) {
        self.lock().unmap_range(range);
    }

    #[inline]
    fn unmap(&mut self, gfn: Gfn) {
        self.lock().unmap(gfn);
    }

    fn flushes(&self) -> u64 {
        self.lock().flushes()
    }
}
