#![expect(
    unsafe_code,
    reason = "frees tables whose grace period is over, and keeps a list without locks"
)]
//! Tables that were cut off and flushed, and wait for a grace period.
//!
//! **Guarantee.** The memory of a table is freed after every guard has ended that existed when the
//! table was handed over. A worker has at most [`MOST_WAITING`] waiting tables, plus the subtree
//! that reached the bound. Dropping a worker waits for nobody.
//!
//! **Mechanism.** Each worker has a limbo. Each time it hands tables over, it frees more expired
//! ones than it adds, so that a backlog shrinks. At the bound a sweep waits briefly. If guards
//! still exist then, it leaves tables linked
//! ([`may_cut_off`](crate::change::Session::may_cut_off)). A worker that is dropped beside a guard
//! leaves its limbo in the MMU's list. Every worker that reclaims frees from that list too.

use crate::pages::Page;
use crate::platform::Platform;
use crate::sync::{AtomicPtr, Ordering};
use alloc::boxed::Box;
use core::ptr;
use core::sync::atomic::AtomicU64;
use pageferry_epoch::{Domain, Limbo};

/// The number of one worker's waiting tables at which its sweeps stop cutting tables off.
pub(crate) const MOST_WAITING: usize = 1024;

/// Frees at most `most` tables of `limbo` whose grace period is over. Returns their number.
pub(crate) fn free_expired<P: Platform>(
    limbo: &mut Limbo<Page>,
    domain: &Domain,
    platform: &P,
    most: usize,
) -> usize {
    let now = domain.epoch();
    let mut freed = 0;
    while freed < most
        && let Some(page) = limbo.next_expired_in(now)
    {
        // SAFETY: cut off, then flushed, then stamped, and the grace period after that is over.
        unsafe { page.free(platform) };
        freed += 1;
    }
    freed
}

/// The limbos of dropped workers: a list that grows at its head, and is taken as a whole.
#[derive(Debug)]
pub(crate) struct Abandoned {
    first: AtomicPtr<Node>,
    /// The number of tables in the list, for the bound. It orders nothing, so it is not modelled.
    tables: AtomicU64,
}

#[derive(Debug)]
struct Node {
    limbo: Limbo<Page>,
    next: *mut Node,
}

impl Abandoned {
    pub(crate) fn new() -> Self {
        Self {
            first: AtomicPtr::new(ptr::null_mut()),
            tables: AtomicU64::new(0),
        }
    }

    /// The number of tables in the list.
    pub(crate) fn tables(&self) -> usize {
        self.tables.load(Ordering::Relaxed) as usize
    }

    /// Adds the limbo of a dropped worker.
    #[cold]
    pub(crate) fn leave(&self, limbo: Limbo<Page>) {
        let next = ptr::null_mut();
        self.push(Box::new(Node { limbo, next }));
    }

    fn push(&self, mut node: Box<Node>) {
        let tables = node.limbo.len() as u64;
        self.tables.fetch_add(tables, Ordering::Relaxed);
        node.next = self.first.load(Ordering::Relaxed);
        let node = Box::into_raw(node);
        // Release: the node, for the thread that takes it.
        loop {
            // SAFETY: the node is not in the list yet, so no other thread knows it.
            let next = unsafe { &mut (*node).next };
            let put =
                self.first
                    .compare_exchange(*next, node, Ordering::Release, Ordering::Relaxed);
            match put {
                Ok(_) => return,
                Err(now) => *next = now,
            }
        }
    }

    /// Takes the list. No node is taken twice.
    fn take(&self) -> impl Iterator<Item = Box<Node>> + use<> {
        // Acquire: the nodes.
        let mut next = self.first.swap(ptr::null_mut(), Ordering::Acquire);
        core::iter::from_fn(move || {
            if next.is_null() {
                return None;
            }
            // SAFETY: `push` made the node, and only this thread has taken it.
            let node = unsafe { Box::from_raw(next) };
            next = node.next;
            Some(node)
        })
    }

    /// Frees all tables whose grace period is over. Returns their number.
    pub(crate) fn free_expired<P: Platform>(&self, domain: &Domain, platform: &P) -> usize {
        if self.tables() == 0 {
            return 0;
        }
        let mut freed = 0;
        for mut node in self.take() {
            self.tables
                .fetch_sub(node.limbo.len() as u64, Ordering::Relaxed);
            freed += free_expired(&mut node.limbo, domain, platform, usize::MAX);
            if !node.limbo.is_empty() {
                self.push(node);
            }
        }
        freed
    }

    /// Frees everything.
    ///
    /// # Safety
    /// There is no guard.
    pub(crate) unsafe fn free_all<P: Platform>(&self, platform: &P) {
        for mut node in self.take() {
            while let Some(page) = node.limbo.take() {
                // SAFETY: cut off and flushed, and there is no guard.
                unsafe { page.free(platform) };
            }
        }
    }
}
