//! Tables of one writer, for several: behind a mutex, as their users have to put them.

use super::{Found, Parallel, Scheme, Worker};
use crate::sync::{Arc, Mutex, MutexGuard};
use pageferry_addr::{Gfn, GfnRange, Pfn};
use std::marker::PhantomData;
use std::sync::PoisonError;

/// `S` alone where there is one thread, and behind the standard library's `Mutex`, locked once a
/// call, where there are two.
#[derive(Debug)]
pub struct Locked<S>(PhantomData<S>);

impl<S: Scheme> Scheme for Locked<S> {
    const NAME: &'static str = S::NAME;
    type Alone = S::Alone;

    fn alone() -> S::Alone {
        S::alone()
    }
}

impl<S> Parallel for Locked<S>
where
    S: Scheme,
    S::Alone: Send,
{
    type Tables = Arc<Mutex<S::Alone>>;
    type Worker = Behind<S::Alone>;

    fn tables() -> Self::Tables {
        Arc::new(Mutex::new(S::alone()))
    }

    fn worker(tables: &Self::Tables) -> Self::Worker {
        Behind(Arc::clone(tables))
    }
}

/// A thread's way to tables behind a mutex.
#[derive(Debug)]
pub struct Behind<W>(Arc<Mutex<W>>);

impl<W> Behind<W> {
    #[inline]
    fn lock(&self) -> MutexGuard<'_, W> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<W: Worker> Worker for Behind<W> {
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
