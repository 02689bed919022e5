#![expect(unsafe_code, reason = "tells by its head what a node is")]
//! Nodes, how they are told apart, and the cells that point at them.
//!
//! A node begins with a [`Head`]; its `level` says what follows: nothing (an empty tree), a [`Leaf`] or an
//! [`Inner`]. After a node was published only cells change: one in each place of an inner node, and the root. (What changes of
//! leaves, they say themselves.)
//!
//! A cell holds the newest node of its place. Each node tells the version in which it came into its place,
//! `born`, and the node that was there before, `previous`. So a reader of an older version goes back until it finds
//! the node of its version (Wei, Ben-David, Blelloch, Fatourou, Ruppert, Sun: *Constant-time snapshots with
//! applications to concurrent data structures*, 2021).

use super::kind::{INNER, Order};
use super::leaf::Leaf;
use crate::sync::{Alive, AtomicPtr, AtomicU8, AtomicU64, Ordering};

/// A version that is newer than all.
pub(crate) const NEWEST: u64 = u64::MAX;

const EMPTY: u8 = u8::MAX;

pub(crate) struct Head {
    /// The version in which this node came into its place.
    pub(crate) born: u64,
    /// What was in its place before; used by readers of versions below `born` only, for whom it is not freed.
    pub(crate) previous: *const Head,
    /// How many children there are, or slots and tombstones; of a leaf in the tree it may grow.
    len: AtomicU8,
    /// 0 for leaves, 1 and up for inner nodes.
    level: u8,
    /// How many of them a leaf has room for.
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

    /// `Acquire`: what is said of them was written before.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire).into()
    }

    /// The writer's: there are `len` slots now.
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
    /// No key below child `i` is less than `keys[i]`, other than for child 0. Unused ones are `MOST`.
    pub(crate) keys: [u64; INNER],
    pub(crate) cells: [Cell; INNER],
    pub(crate) reach: O::Reach,
}

impl<O: Order> Inner<O> {
    /// A bound below which no key to the right of a child is, where none to the right of this node is below `next`.
    #[inline]
    pub(crate) fn next_key(&self, child: usize, next: u64) -> u64 {
        // Unused keys are `MOST`: then what was found further up is as good.
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
    /// `node` is a node of this order and data, by the pointer it was allocated with; during `'g` it is not freed, and nothing
    /// of it changes but its cells and reach, or what [`Leaf::extend`] changes.
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

    /// For readers: what is reached through it was written before.
    #[inline]
    pub(crate) fn newest(&self) -> *const Head {
        self.0.load(Ordering::Acquire)
    }

    /// The writer's: publishes the node and all that was written before.
    #[inline]
    pub(crate) fn publish(&self, node: *const Head) {
        self.0.store(node.cast_mut(), Ordering::Release);
    }
}

/// A key that is searched for others.
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

/// How many of `keys` are at most `key`. Unused keys are `MOST`, which no argument is. Their number is a power of two, 4 or
/// more.
///
/// Where keys come in behind the others meanwhile ([`Leaf::extend`]), of which some are seen and some not, it counts no more
/// than are there in the end, and no less than are seen whenever they are looked at. (Each step counts keys of ascending places: not to
/// see one of them counts less, but never less than there were.)
#[inline(always)]
pub(crate) fn upper_bound<K: Key>(keys: &[K], key: u64) -> usize {
    // Counts without branches: which 16, which 4 of them, which of these. Fewer comparisons than one count of all, and fewer
    // that wait for each other than a binary search has. Up to 32 keys have no first step, so that
    // their cache lines are not waited for one after the other.
    let room = keys.len();
    debug_assert!(room.is_power_of_two() && room >= 4);
    // SAFETY: whatever the keys, `sixteens` is less than the number of sixteens, `fours` less than that of fours in what is
    // left, and the last index at most 3 above: less than `room`.
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

    /// A key that is seen when it was looked at some times.
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
        let mut random = 1_u64;
        let mut below = |end: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005) + 1;
            (random >> 33) % end
        };
        for round in 0..40_000 {
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
            for len in 0..=room {
                let key = |i| if i < len { 10 * i } else { u64::MAX };
                let keys: Vec<u64> = (0..room).map(key).collect();
                for key in (0..10 * len + 20).step_by(5) {
                    let plain = keys.iter().filter(|&&k| k <= key).count();
                    assert_eq!(upper_bound(&keys, key), plain, "{room} {len} {key}");
                }
            }
        }
    }
}
