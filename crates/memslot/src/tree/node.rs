#![expect(unsafe_code, reason = "reads the kind of a node from its head")]
//! Nodes, their kinds, and the cells that point at them.
//!
//! A node begins with a [`Head`]. Its `level` determines the kind: an empty tree, a [`Leaf`] or an
//! [`Inner`]. After a node was published only cells change. Each child of an inner node has a cell,
//! and so has the root. Each slot of a leaf has one too.
//!
//! A cell holds the newest node of its place. Each node has the version in which it came into its
//! place, `born`, and a pointer to the node before it, `previous`. A reader of an older version
//! goes back until it finds the node of its version (Wei, Ben-David, Blelloch, Fatourou, Ruppert,
//! Sun: *Constant-time snapshots with applications to concurrent data structures*, 2021).

use super::kind::{INNER, Order};
use super::leaf::Leaf;
use crate::sync::{Alive, AtomicPtr, Ordering};

/// A version newer than all others.
pub(crate) const NEWEST: u64 = u64::MAX;

const EMPTY: u8 = u8::MAX;

pub(crate) struct Head {
    /// The version in which this node came into its place.
    pub(crate) born: u64,
    /// The node that was in its place before. Only readers of versions below `born` use it, and it
    /// is kept for them.
    pub(crate) previous: *const Head,
    /// The number of children or slots.
    len: u8,
    /// 0 for leaves, 1 and up for inner nodes.
    level: u8,
    /// The number of slots for which a leaf has room.
    room: u8,
    pub(crate) alive: Alive,
}

impl Head {
    pub(crate) fn new(born: u64, previous: *const Self, level: u8, len: usize) -> Self {
        debug_assert!(len <= INNER);
        Self {
            born,
            previous,
            len: len as u8,
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
            len: len as u8,
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

    /// The number of children or slots.
    #[inline]
    pub(crate) const fn len(&self) -> usize {
        self.len as usize
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
    /// A lower bound of the keys to the right of a child. `next` is such a bound for this node.
    #[inline]
    pub(crate) fn next_key(&self, child: usize, next: u64) -> u64 {
        // An unused key is `MOST`, and then `next` is the lower bound.
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
    /// `node` is a node of this order and data, and is the pointer with which it was allocated.
    /// During `'g` it is not freed. Only its cells and reach change.
    #[inline(always)]
    pub(crate) unsafe fn at(node: *const Head) -> Self {
        // SAFETY: the node is alive, as the caller says. All nodes begin with their head
        // (`repr(C)`).
        let head = unsafe { &*node };
        if head.level() == 0 {
            // SAFETY: level 0 means a leaf.
            Self::Leaf(unsafe { Leaf::at(node) })
        } else if head.is_empty_tree() {
            Self::Empty
        } else {
            // SAFETY: all other levels mean inner nodes.
            Self::Inner(unsafe { &*node.cast::<Inner<O>>() })
        }
    }
}

/// A place of a node.
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

    /// Publishes the node and everything that was written before. Writer only.
    #[inline]
    pub(crate) fn publish(&self, node: *const Head) {
        self.0.store(node.cast_mut(), Ordering::Release);
    }
}

/// The number of `keys` that are at most `key`. Unused keys are `MOST`, and `key` is less than
/// that. The length of `keys` is a power of two, 4 or more.
#[inline(always)]
pub(crate) fn upper_bound(keys: &[u64], key: u64) -> usize {
    // Counts without branches in three steps: which 16 keys, which 4 of them, which one of these.
    // That needs fewer comparisons than counting all keys, and fewer dependent ones than a binary
    // search. Up to 32 keys need no first step, so that their cache lines load at the same time.
    let room = keys.len();
    debug_assert!(room.is_power_of_two() && room >= 4);
    // SAFETY: for any keys, `sixteens` is less than the number of sixteens, and `fours` is less
    // than the number of fours left. The last index is at most 3 above. So all indices are less
    // than `room`.
    let at_most = |index: usize| usize::from(unsafe { *keys.get_unchecked(index) } <= key);
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
