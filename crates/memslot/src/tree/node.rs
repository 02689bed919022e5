#![expect(unsafe_code, reason = "tells by its head what a node is")]
//! Nodes, how to tell them apart, and the cells that point at them.
//!
//! A node begins with a [`Head`]. Its `level` says what follows: nothing (an empty tree), a
//! [`Leaf`] or an [`Inner`]. After a node was published only cells change: one for each child of an
//! inner node, and the root. (`leaf.rs` says what changes in leaves.)
//!
//! A cell holds the newest node of its place. Each node knows the version in which it came into its
//! place, `born`, and the node that was there before, `previous`. So a reader of an older version
//! goes back until it finds the node of its version (Wei, Ben-David, Blelloch, Fatourou, Ruppert,
//! Sun: *Constant-time snapshots with applications to concurrent data structures*, 2021).

use super::kind::{INNER, Order};
use super::leaf::Leaf;
use crate::sync::{Alive, AtomicPtr, AtomicU8, AtomicU64, Ordering};

/// A version that is newer than all.
pub(crate) const NEWEST: u64 = u64::MAX;

const EMPTY: u8 = u8::MAX;

pub(crate) struct Head {
    /// The version in which this node came into its place.
    pub(crate) born: u64,
    /// The node that was in its place before. Only readers of versions below `born` use it, and
    /// for them it is kept.
    pub(crate) previous: *const Head,
    /// How many children or slots there are; it may grow in a leaf that is in the tree.
    len: AtomicU8,
    /// 0 for leaves, 1 and up for inner nodes.
    level: u8,
    /// How many slots a leaf has room for.
    room: u8,
    pub(crate) alive: Alive,
}

impl Head {
    pub(crate) fn new(born: u64, previous: *const Self, level: u8, len: usize) -> Self {
        debug_assert!(len <= INNER);
        Self {
            born,
            previous,
            len: AtomicU8::new(len as u8),
            level,
            room: 0,
            alive: Alive::new(),
        }
    }

    pub(crate) fn leaf(born: u64, previous: *const Self, len: usize, room: usize) -> Self {
        debug_assert!(len <= room && room <= 128);
        Self {
            born,
            previous,
            len: AtomicU8::new(len as u8),
            level: 0,
            room: room as u8,
            alive: Alive::new(),
        }
    }

    #[inline]
    pub(crate) const fn room(&self) -> usize {
        self.room as usize
    }

    pub(crate) fn empty(born: u64, previous: *const Self) -> Self {
        Self::new(born, previous, EMPTY, 0)
    }

    /// `Acquire`: their keys were written before.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire).into()
    }

    /// There are `len` slots now. Writer only.
    #[inline]
    pub(crate) fn grow(&self, len: usize) {
        self.len.store(len as u8, Ordering::Release);
    }

    #[inline]
    pub(crate) const fn level(&self) -> u8 {
        self.level
    }

    #[inline]
    pub(crate) const fn is_empty_tree(&self) -> bool {
        self.level == EMPTY
    }
}

#[repr(C)]
pub(crate) struct Inner<O: Order> {
    pub(crate) head: Head,
    /// No key below child `i` is less than `keys[i]`, unless `i` is 0. Unused keys are `MOST`.
    pub(crate) keys: [u64; INNER],
    pub(crate) cells: [Cell; INNER],
    pub(crate) reach: O::Reach,
}

impl<O: Order> Inner<O> {
    /// A lower bound of the keys to the right of a child; `next` is one for the keys to the right
    /// of this node.
    #[inline]
    pub(crate) fn next_key(&self, child: usize, next: u64) -> u64 {
        // Unused keys are `MOST`, so then the bound from further up is the better one.
        self.keys.get(child + 1).map_or(next, |&key| next.min(key))
    }
}

/// A node of any kind.
pub(crate) enum Node<'g, O: Order, D> {
    Empty,
    Leaf(Leaf<'g, O, D>),
    Inner(&'g Inner<O>),
}

impl<'g, O: Order, D> Node<'g, O, D> {
    /// # Safety
    /// `node` is a node of this order and data, by the pointer it was allocated with. During `'g`
    /// it is not freed, and nothing of it changes but its cells and reach, or what
    /// [`Leaf::extend`] changes.
    #[inline(always)]
    pub(crate) unsafe fn at(node: *const Head) -> Self {
        // SAFETY: alive, as the caller says; all nodes begin with their head (`repr(C)`).
        let head = unsafe { &*node };
        if head.level() == 0 {
            // SAFETY: level 0 is the head of a leaf.
            Self::Leaf(unsafe { Leaf::at(node) })
        } else if head.is_empty_tree() {
            Self::Empty
        } else {
            // SAFETY: all others are heads of inner nodes.
            Self::Inner(unsafe { &*node.cast::<Inner<O>>() })
        }
    }
}

/// A place for a node.
pub(crate) struct Cell(AtomicPtr<Head>);

impl Cell {
    pub(crate) fn new(node: *const Head) -> Self {
        Self(AtomicPtr::new(node.cast_mut()))
    }

    /// The newest node. `Acquire`: its contents were written before.
    #[inline]
    pub(crate) fn newest(&self) -> *const Head {
        self.0.load(Ordering::Acquire)
    }

    /// Publishes the node and all that was written before. Writer only.
    #[inline]
    pub(crate) fn publish(&self, node: *const Head) {
        self.0.store(node.cast_mut(), Ordering::Release);
    }
}

/// A key in an array that is searched.
pub(crate) trait Key {
    fn value(&self) -> u64;
}

impl Key for u64 {
    #[inline(always)]
    fn value(&self) -> u64 {
        *self
    }
}

impl Key for AtomicU64 {
    #[inline(always)]
    fn value(&self) -> u64 {
        self.load(Ordering::Relaxed)
    }
}

/// How many of `keys` are at most `key`. Unused keys are `MOST`, and `key` is less than that. The
/// number of keys is a power of two, 4 or more.
///
/// Keys may be added after the others meanwhile ([`Leaf::extend`]), some of which this sees and
/// some not. Then the count is at most the final one, and at least that of the keys which are seen
/// at every look. Each step counts keys of ascending places: missing one of them counts less, but
/// never less than there were before.
#[inline(always)]
pub(crate) fn upper_bound<K: Key>(keys: &[K], key: u64) -> usize {
    // Counts without branches: which 16, which 4 of them, which of these. That takes fewer
    // comparisons than counting all, and fewer that depend on each other than a binary search.
    // Up to 32 keys need no first step, so that their cache lines are loaded at the same time.
    let room = keys.len();
    debug_assert!(room.is_power_of_two() && room >= 4);
    // SAFETY: whatever the keys are, `sixteens` is less than the number of sixteens, `fours` less
    // than that of the fours left, and the last index is at most 3 above. So all indices are
    // less than `room`.
    let at_most = |index: usize| usize::from(unsafe { keys.get_unchecked(index) }.value() <= key);
    let (start, left) = match room {
        ..=32 => (0, room),
        _ => {
            let sixteens: usize = (1..room / 16).map(|i| at_most(16 * i - 1)).sum();
            (16 * sixteens, 16)
        }
    };
    let fours: usize = (1..left / 4).map(|i| at_most(start + 4 * i - 1)).sum();
    let start = start + 4 * fours;
    start + (0..4).map(|i| at_most(start + i)).sum::<usize>()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use core::cell::Cell;
    use pageferry_testkit::Random;

    /// A key that is seen only after some looks.
    struct Coming {
        key: u64,
        unseen: Cell<u32>,
    }

    impl Key for Coming {
        fn value(&self) -> u64 {
            let unseen = self.unseen.get();
            self.unseen.set(unseen.saturating_sub(1));
            if unseen == 0 { self.key } else { u64::MAX }
        }
    }

    #[test]
    fn upper_bound_counts_keys_that_are_coming_or_not() {
        let mut random = Random::new(1);
        let mut below = |end: u64| random.below(end);
        for round in 0..if cfg!(miri) { 60 } else { 40_000 } {
            let room = [4, 8, 16, 32, 64, 128][round % 6];
            let before = below(room + 1);
            let after = before + below(room + 1 - before);
            let keys: Vec<Coming> = (0..room)
                .map(|place| Coming {
                    key: if place < after { 10 * place } else { u64::MAX },
                    unseen: Cell::new(if place < before { 0 } else { below(3) as u32 }),
                })
                .collect();
            let key = below(10 * room + 10);
            let up_to = |len: u64| len.min(key / 10 + 1) as usize;
            let counted = upper_bound(&keys, key);
            assert!(
                (up_to(before)..=up_to(after)).contains(&counted),
                "room {room}, from {before} to {after} keys, {key}: {counted}"
            );
            // Once seen, always seen: looking again gives no less.
            assert!(upper_bound(&keys, key) >= counted);
        }
    }

    #[test]
    fn upper_bound_counts() {
        for room in [4, 8, 16, 32, 64, 128_u64] {
            for len in (0..=room).step_by(if cfg!(miri) { 31 } else { 1 }) {
                let key = |i| if i < len { 10 * i } else { u64::MAX };
                let keys: Vec<u64> = (0..room).map(key).collect();
                for key in (0..10 * len + 20).step_by(if cfg!(miri) { 155 } else { 5 }) {
                    let plain = keys.iter().filter(|&&k| k <= key).count();
                    assert_eq!(upper_bound(&keys, key), plain, "{room} {len} {key}");
                }
            }
        }
    }
}
