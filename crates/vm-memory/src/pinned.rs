#![expect(
    unsafe_code,
    reason = "a reader, the guard that borrows it and the view that borrows the guard live in one allocation"
)]
//! One version of the slots, owned rather than borrowed.
//!
//! **Guarantee.** While any [`PinnedRef`] of a pin lives, its view shows one version of the slots,
//! and nothing seen through it is freed. Making one takes no lock. If the thread has made one
//! before, it takes no allocation either.
//!
//! **Mechanism.** A reader of `memslot` belongs to one thread at a time. Its guards borrow the
//! reader, and its views borrow a guard. `vm-memory` needs an object that borrows nothing. So the
//! three share an allocation that never moves and has a count of users. The last user drops the
//! guard, which ends the pin, and puts the reader into a [`FreeList`] for the next pin of that
//! thread.
//!
//! **Proof of soundness.**
//! 1. From its making to its return to the list, the allocation is reached through a raw pointer
//!    only. So no Rust reference to the whole of it ever conflicts with the references that guard
//!    and view hold into it.
//! 2. Guard and view have the lifetime `'static`, but leave this file only as borrows of the
//!    `PinnedRef`.
//! 3. The fields that change (`guard`, `view`, the reader inside its borrow) change while one
//!    thread owns the allocation: before the first `PinnedRef` exists and after the last is gone.
//!    In between, threads share the view, which only reads, and two atomics: the count and the slot
//!    that was found last.

use crate::free_list::{self, FreeList};
use crate::sync::{AtomicPtr, AtomicUsize, Ordering, fence};
use pageferry_addr::Gfn;
use pageferry_memslot::{Slot, SlotGuard, SlotReader, SlotTable, SlotView};
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull, null_mut};
use std::sync::Arc;

/// A reader and, while it is in use, its guard and view.
pub(crate) struct Pinned<R: Send + Sync + 'static> {
    users: AtomicUsize,
    /// The slot that was found last through the view, or null.
    last: AtomicPtr<Slot<Arc<R>>>,
    /// Valid while `guard` is.
    view: MaybeUninit<SlotView<'static, Arc<R>>>,
    /// Valid while there are users.
    guard: MaybeUninit<SlotGuard<'static, Arc<R>>>,
    reader: SlotReader<Arc<R>>,
    /// The list that keeps the allocation while there are no users.
    home: Arc<FreeList<Pinned<R>>>,
    row: usize,
}

/// One user of a pin.
pub(crate) struct PinnedRef<R: Send + Sync + 'static>(NonNull<Pinned<R>>);

const fn send<T: Send>() {}
const fn sync<T: Sync>() {}

impl<R: Send + Sync + 'static> PinnedRef<R> {
    /// The conditions of the impls of `Send` and `Sync` below, checked by the compiler.
    const PARTS_MAY_TRAVEL: () = {
        send::<SlotReader<Arc<R>>>();
        sync::<SlotTable<Arc<R>>>();
    };
}

// SAFETY: one thread after another may use a reader. Its guard alone is not `Send`, because it
// shares the reader with that reader's owner, perhaps on another thread. Here both are in one
// allocation and move together. One thread at a time makes and drops the guard (3). It has acquired
// all accesses of the thread before.
unsafe impl<R: Send + Sync + 'static> Send for PinnedRef<R> {}
// SAFETY: a shared `PinnedRef` gives clones, which are counted atomically, and the view. The view
// has a version and shared references into the table, which is `Sync`. It only reads.
unsafe impl<R: Send + Sync + 'static> Sync for PinnedRef<R> {}
// SAFETY: as for `PinnedRef`. No thread uses an allocation in the list, and one thread takes it,
// with acquire order.
unsafe impl<R: Send + Sync + 'static> Send for Pinned<R> {}

impl<R: Send + Sync + 'static> PinnedRef<R> {
    /// Pins the newest version of `table`, with a reader of `home` or a new one.
    pub(crate) fn new(home: &Arc<FreeList<Pinned<R>>>, table: &SlotTable<Arc<R>>) -> Self {
        let () = Self::PARTS_MAY_TRAVEL;
        let row = free_list::own_row();
        let pinned = Box::into_raw(home.take(row).unwrap_or_else(|| {
            Box::new(Pinned {
                users: AtomicUsize::new(0),
                last: AtomicPtr::new(null_mut()),
                view: MaybeUninit::uninit(),
                guard: MaybeUninit::uninit(),
                reader: table.reader(),
                home: Arc::clone(home),
                row,
            })
        }));
        // SAFETY: this thread owned the box alone, and from here on only this pointer reaches it
        // (1). Reader, guard and view stay in this allocation until `drop` has dropped the guard.
        // So the reader does not move while the guard exists, nor the guard while the view does
        // (2).
        unsafe {
            (*pinned).users.store(1, Ordering::Relaxed);
            (*pinned).last.store(null_mut(), Ordering::Relaxed);
            let reader: &'static mut SlotReader<Arc<R>> = &mut (*pinned).reader;
            let guard = reader.pin();
            (&raw mut (*pinned).guard).write(MaybeUninit::new(guard));
            let guard: &'static SlotGuard<'static, Arc<R>> =
                &*(&raw const (*pinned).guard).cast::<SlotGuard<'static, Arc<R>>>();
            (&raw mut (*pinned).view).write(MaybeUninit::new(guard.view()));
            Self(NonNull::new_unchecked(pinned))
        }
    }

    /// The pinned version.
    #[inline]
    pub(crate) fn view(&self) -> SlotView<'_, Arc<R>> {
        // SAFETY: `self` is a user, so the view is valid, and no thread writes it (3).
        unsafe { (*self.0.as_ptr()).view.assume_init() }
    }

    /// The slot of this version that holds `gfn`. It tries the slot found last first.
    ///
    /// A hit writes nothing. Relaxed order suffices: a thread got its `PinnedRef` or the original
    /// of its clone from the thread that pinned. Every slot of the version was complete before
    /// that.
    #[inline]
    pub(crate) fn find(&self, gfn: Gfn) -> Option<&Slot<Arc<R>>> {
        // SAFETY: there is a user, so the allocation exists. The reference is to this field alone
        // (1).
        let last = unsafe { &(*self.0.as_ptr()).last };
        // SAFETY: the pointer is null or a slot of this version, which `look_up` stored since the
        // pin began. The pin keeps the slot.
        let hit = unsafe { last.load(Ordering::Relaxed).as_ref() };
        if let Some(slot) = hit.filter(|slot| slot.range.contains(gfn)) {
            return Some(slot);
        }
        self.look_up(gfn, last)
    }

    /// Not inlined, so that the path of a hit is short enough to inline into callers' loops.
    #[inline(never)]
    fn look_up(&self, gfn: Gfn, last: &AtomicPtr<Slot<Arc<R>>>) -> Option<&Slot<Arc<R>>> {
        let slot = self.view().lookup(gfn)?;
        last.store(ptr::from_ref(slot).cast_mut(), Ordering::Relaxed);
        Some(slot)
    }

    fn users(&self) -> &AtomicUsize {
        // SAFETY: there is a user, so the allocation exists. The reference is to this field alone
        // (1).
        unsafe { &(*self.0.as_ptr()).users }
    }
}

impl<R: Send + Sync + 'static> Clone for PinnedRef<R> {
    fn clone(&self) -> Self {
        let before = self.users().fetch_add(1, Ordering::Relaxed);
        // Like `Arc`: if the count could wrap, memory in use would be freed.
        if before > usize::MAX / 2 {
            std::process::abort();
        }
        Self(self.0)
    }
}

impl<R: Send + Sync + 'static> Drop for PinnedRef<R> {
    fn drop(&mut self) {
        // A clone takes a user, so the only user cannot be cloned meanwhile and needs no locked
        // instruction. Each decrement releases the accesses of its user. The last user acquires
        // them before it ends the pin.
        if self.users().load(Ordering::Acquire) != 1 {
            if self.users().fetch_sub(1, Ordering::Release) != 1 {
                return;
            }
            fence(Ordering::Acquire);
        }
        let pinned = self.0.as_ptr();
        // SAFETY: no user is left, so this thread owns the allocation alone. The guard is valid
        // until it is dropped here, once. The view needs no drop and is not read again before it is
        // rewritten. Then nothing borrows from the allocation, so it may be a box again.
        let (pinned, home, row) = unsafe {
            (&raw mut (*pinned).guard)
                .cast::<SlotGuard<'static, Arc<R>>>()
                .drop_in_place();
            let (home, row) = (Arc::as_ptr(&(*pinned).home), (*pinned).row);
            (Box::from_raw(pinned), home, row)
        };
        // SAFETY: `pinned` holds a share of its home until it is put back or dropped. `put_back`
        // makes its last access to the list before another thread may drop either.
        unsafe { (*home).put_back(row, pinned) };
    }
}
