//! The memory slots of Linux before its trees (up to 5.16): a sorted array, copied at each change.
//!
//! - A look-up by frame tests the slot found last, then does a binary search. One by host address
//!   scans the array.
//! - A creation copies the array once. A deletion and a move copy it twice: first with the slot
//!   marked invalid, then without it or with it at its new place.
//! - A reader keeps the array that it used last, and compares generations by one acquire load. It
//!   takes the mutex around the newest array only if they differ.
//!
//! It is faster than the kernel's scheme in two points. An entry has 40 bytes, and
//! `struct kvm_memory_slot` had 88 on x86-64. Arrays that no reader holds are reused.

use super::{ByGfn, Change, Lookup, Reader, Scheme};
use crate::slots::input::PlainSlot;
use pageferry_addr::{Gfn, Hva};
use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The number of arrays that are kept for reuse. Readers rarely hold more than the newest.
const MAX_SPARE: usize = 3;

#[derive(Clone, Copy, Debug)]
struct ArraySlot {
    slot: PlainSlot,
    invalid: bool,
}

/// An array at one generation.
#[derive(Clone, Debug, Default)]
struct Version {
    generation: u64,
    /// Ascending and disjoint.
    entries: Vec<ArraySlot>,
}

impl Version {
    /// The index of the first slot that ends above `gfn`. If any slot holds `gfn`, it is this one.
    #[inline]
    fn place(&self, gfn: Gfn) -> usize {
        self.entries
            .partition_point(|entry| entry.slot.end() <= gfn)
    }
}

#[derive(Debug, Default)]
struct Published {
    generation: AtomicU64,
    newest: Mutex<Arc<Version>>,
}

impl Published {
    fn newest(&self) -> MutexGuard<'_, Arc<Version>> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The array that each change copies.
#[derive(Debug, Default)]
pub(crate) struct ArrayCopy {
    current: Arc<Version>,
    /// Former versions, kept for their arrays.
    spare: Vec<Arc<Version>>,
    published: Arc<Published>,
}

impl ArrayCopy {
    /// Publishes a copy of the array, changed by `edit`.
    fn publish(&mut self, edit: impl FnOnce(&mut Vec<ArraySlot>)) {
        let free = |version: &mut Arc<Version>| Arc::get_mut(version).is_some();
        let mut next = match self.spare.iter_mut().position(free) {
            Some(index) => self.spare.swap_remove(index),
            None => Arc::new(Version {
                generation: 0,
                // Room for one more slot, since `Vec` would double its capacity.
                entries: Vec::with_capacity(self.current.entries.len() + 1),
            }),
        };
        let version = Arc::get_mut(&mut next).expect("a spare version has one owner");
        version.generation = self.current.generation + 1;
        version.entries.clone_from(&self.current.entries);
        edit(&mut version.entries);
        let generation = version.generation;
        *self.published.newest() = Arc::clone(&next);
        // Release: a reader that loads this generation and then locks finds this version or a later
        // one.
        self.published
            .generation
            .store(generation, Ordering::Release);
        if self.spare.len() == MAX_SPARE {
            self.spare.swap_remove(0);
        }
        self.spare.push(std::mem::replace(&mut self.current, next));
    }

    /// Marks `slot` invalid. Returns its index.
    fn invalidate(&mut self, slot: PlainSlot) -> usize {
        let at = self.current.place(slot.start);
        self.publish(|entries| {
            assert_eq!(entries[at].slot, slot, "no such slot");
            entries[at].invalid = true;
        });
        at
    }
}

/// The slot goes in at its place.
fn insert(entries: &mut Vec<ArraySlot>, slot: PlainSlot) {
    let at = entries.partition_point(|entry| entry.slot.end() <= slot.start);
    let next = entries.get(at);
    assert!(
        next.is_none_or(|next| slot.end() <= next.slot.start),
        "{slot:?} overlaps"
    );
    let invalid = false;
    entries.insert(at, ArraySlot { slot, invalid });
}

/// The slot that was marked goes.
fn remove(entries: &mut Vec<ArraySlot>, at: usize) {
    assert!(entries.remove(at).invalid, "the slot is not marked");
}

/// A reader of [`ArrayCopy`].
#[derive(Debug)]
pub(crate) struct ArrayReader {
    published: Arc<Published>,
    version: Arc<Version>,
    /// The index of the slot found last: a guess that each use checks.
    last: Cell<usize>,
}

/// The array that a reader holds.
#[derive(Debug)]
pub(crate) struct ArrayHeld<'a>(&'a ArrayReader);

impl Scheme for ArrayCopy {
    const NAME: &'static str = "array copy (Linux)";
    type Reader = ArrayReader;

    fn reader(&self) -> ArrayReader {
        ArrayReader {
            published: Arc::clone(&self.published),
            version: Arc::clone(&self.current),
            last: Cell::new(0),
        }
    }
}

impl Change for ArrayCopy {
    fn empty() -> Self {
        Self::default()
    }

    fn add(&mut self, slot: PlainSlot) {
        self.publish(|entries| insert(entries, slot));
    }

    fn delete(&mut self, slot: PlainSlot) {
        let at = self.invalidate(slot);
        self.publish(|entries| remove(entries, at));
    }

    fn relocate(&mut self, slot: PlainSlot, to: Gfn) -> PlainSlot {
        let at = self.invalidate(slot);
        let moved = PlainSlot { start: to, ..slot };
        self.publish(|entries| {
            remove(entries, at);
            insert(entries, moved);
        });
        moved
    }
}

impl Reader for ArrayReader {
    type Held<'a> = ArrayHeld<'a>;

    #[inline]
    fn hold(&mut self) -> ArrayHeld<'_> {
        if self.published.generation.load(Ordering::Acquire) != self.version.generation {
            self.version = Arc::clone(&self.published.newest());
        }
        ArrayHeld(self)
    }
}

impl ByGfn for ArrayHeld<'_> {
    #[inline]
    fn by_gfn(&self, gfn: Gfn) -> Option<Hva> {
        let ArrayReader { version, last, .. } = self.0;
        let found = version.entries.get(last.get());
        if let Some(hva) = found.and_then(|entry| entry.slot.hva_of(gfn)) {
            return Some(hva);
        }
        last.set(version.place(gfn));
        version.entries.get(last.get())?.slot.hva_of(gfn)
    }
}

impl Lookup for ArrayHeld<'_> {
    #[inline]
    fn by_hva(&self, hva: Hva, mut visit: impl FnMut(Gfn) -> ControlFlow<()>) {
        for entry in &self.0.version.entries {
            if let Some(gfn) = entry.slot.gfn_of(hva)
                && visit(gfn).is_break()
            {
                return;
            }
        }
    }
}
