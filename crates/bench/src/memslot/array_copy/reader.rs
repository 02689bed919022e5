//! The reader's side.

use super::{GONE, Published, Version};
use pageferry_addr::Gfn;
use pageferry_memslot::Slot;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A reader.
pub(in crate::memslot) struct ArrayReader<D> {
    published: Arc<Published<D>>,
    version: Arc<Version<D>>,
    /// The index of the slot found last: a guess that each use checks.
    last: usize,
    seen: Arc<AtomicU64>,
}

impl<D> ArrayReader<D> {
    pub(super) fn new(published: &Arc<Published<D>>) -> Self {
        let mut newest = published.newest();
        let version = Arc::clone(&newest.version);
        let seen = Arc::new(AtomicU64::new(version.generation));
        newest.seen.push(Arc::clone(&seen));
        Self {
            published: Arc::clone(published),
            version,
            last: 0,
            seen,
        }
    }

    /// Takes the newest version, if there is a newer one.
    #[inline]
    pub(in crate::memslot) fn take_newest(&mut self) {
        if self.published.generation.load(Ordering::Acquire) != self.version.generation {
            self.take_newer();
        }
    }

    #[cold]
    fn take_newer(&mut self) {
        let version = {
            let newest = self.published.newest();
            // Release: pairs with the acquire load in `free_retired`. This reader does not use its
            // old version from here on.
            self.seen
                .store(newest.version.generation, Ordering::Release);
            Arc::clone(&newest.version)
        };
        self.version = version;
    }

    /// Calls `f` with the slot that holds `gfn`, and whether that slot is invalid.
    #[inline]
    pub(in crate::memslot) fn find<R>(
        &mut self,
        gfn: Gfn,
        f: impl FnOnce(Option<(&Slot<D>, bool)>) -> R,
    ) -> R {
        self.take_newest();
        let entries = &self.version.entries;
        let last = entries
            .get(self.last)
            .filter(|entry| entry.range.contains(gfn));
        let entry = match last {
            Some(entry) => entry,
            None => {
                let place = self.version.place(gfn);
                match entries.get(place).filter(|entry| entry.range.contains(gfn)) {
                    Some(entry) => {
                        self.last = place;
                        entry
                    }
                    None => return f(None),
                }
            }
        };
        // SAFETY: points 1 to 3 of the parent module; the entry is in this reader's version.
        f(Some((unsafe { entry.slot.as_ref() }, entry.invalid)))
    }
}

impl<D> Drop for ArrayReader<D> {
    fn drop(&mut self) {
        self.seen.store(GONE, Ordering::Release);
    }
}
