//! The memory of nodes.
//!
//! Nodes that come back are kept for the next changes, in numbers that follow those of the tree.

use super::kind::Order;
use super::node::{Head, Inner, Leaf};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::mem::MaybeUninit;
use core::ptr;

/// A node that readers may still see and nobody who comes now.
pub(crate) struct Replaced(pub(super) *const Head);

/// Where nodes come from and go to; counts them.
pub(crate) struct Pool<O: Order, D> {
    leaves: Vec<*mut Leaf<O, D>>,
    inners: Vec<*mut Inner<O>>,
    bytes: usize,
    live_leaves: usize,
}

pub(crate) fn alloc_head(head: Head) -> *const Head {
    Box::into_raw(Box::new(head))
}

impl<O: Order, D> Pool<O, D> {
    pub(crate) const fn new() -> Self {
        Self {
            leaves: Vec::new(),
            inners: Vec::new(),
            bytes: 0,
            live_leaves: 0,
        }
    }

    /// What the nodes that were made here occupy, those that wait for reuse included.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Memory for a leaf, not initialised.
    pub(super) fn leaf(&mut self) -> *mut Leaf<O, D> {
        self.live_leaves += 1;
        self.leaves.pop().unwrap_or_else(|| {
            self.bytes += size_of::<Leaf<O, D>>();
            Box::into_raw(Box::<MaybeUninit<Leaf<O, D>>>::new(MaybeUninit::uninit())).cast()
        })
    }

    /// Memory for an inner node, not initialised.
    pub(super) fn inner(&mut self) -> *mut Inner<O> {
        self.inners.pop().unwrap_or_else(|| {
            self.bytes += size_of::<Inner<O>>();
            Box::into_raw(Box::<MaybeUninit<Inner<O>>>::new(MaybeUninit::uninit())).cast()
        })
    }

    /// Takes a node back, keeping some for the next changes.
    ///
    /// # Safety
    /// Nobody can reach the node any more, and it is freed once.
    pub(crate) unsafe fn free(&mut self, node: Replaced) {
        let node = node.0.cast_mut();
        // SAFETY: nodes are alive until they are freed.
        let head = unsafe { &*node };
        head.alive.freed();
        if head.is_empty_tree() {
            // SAFETY: made by `alloc_head`.
            drop(unsafe { Box::from_raw(node) });
        } else if head.level() == 0 {
            self.live_leaves -= 1;
            let leaf = node.cast::<Leaf<O, D>>();
            if self.leaves.len() < (self.live_leaves / 8).clamp(4, 64) {
                // SAFETY: a head has nothing to drop but what a model tracks.
                unsafe { ptr::drop_in_place(leaf) };
                self.leaves.push(leaf);
            } else {
                self.bytes -= size_of::<Leaf<O, D>>();
                // SAFETY: made by `leaf` out of a box of this layout, and written whole since.
                drop(unsafe { Box::from_raw(leaf) });
            }
        } else {
            let inner = node.cast::<Inner<O>>();
            if self.inners.len() < 4 {
                // SAFETY: as above; dropping atomics does nothing but what a model tracks.
                unsafe { ptr::drop_in_place(inner) };
                self.inners.push(inner);
            } else {
                self.bytes -= size_of::<Inner<O>>();
                // SAFETY: made by `inner`, likewise.
                drop(unsafe { Box::from_raw(inner) });
            }
        }
    }
}

impl<O: Order, D> Drop for Pool<O, D> {
    fn drop(&mut self) {
        for &leaf in &self.leaves {
            // SAFETY: made by `leaf` out of a box of this layout; its content was dropped.
            drop(unsafe { Box::from_raw(leaf.cast::<MaybeUninit<Leaf<O, D>>>()) });
        }
        for &inner in &self.inners {
            // SAFETY: made by `inner`, likewise.
            drop(unsafe { Box::from_raw(inner.cast::<MaybeUninit<Inner<O>>>()) });
        }
    }
}
