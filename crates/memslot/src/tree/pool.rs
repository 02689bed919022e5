//! The memory of nodes.
//!
//! Nodes that come back are kept for the next changes, in numbers that follow those of the tree.

use super::kind::Order;
use super::leaf::{LEAST_ROOM, ROOMS, drop_leaf, kind_of, layout_of};
use super::new_leaf::NewLeaf;
use super::node::{Head, Inner};
use super::tombstone::Tombstone;
use alloc::alloc::{alloc, dealloc, handle_alloc_error};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::marker::PhantomData;
use core::mem::{self, MaybeUninit};
use core::ptr;

/// A node that readers may still see and nobody who comes now.
pub(crate) struct Replaced(pub(super) *const Head);

/// What a change has taken out of a tree.
pub(crate) enum Out<D> {
    Node(Replaced),
    /// It is in no other tree either.
    Tombstone(*const Tombstone<D>),
}

/// Where nodes come from and go to; counts them.
pub(crate) struct Pool<O: Order, D> {
    /// Leaves kept, of each kind of room: each begins with a pointer to the next.
    leaves: [*mut Head; ROOMS],
    kept: [u8; ROOMS],
    live_leaves: u32,
    inners: Vec<*mut Inner<O>>,
    bytes: usize,
    data: PhantomData<fn() -> D>,
}

pub(crate) fn alloc_head(head: Head) -> *const Head {
    Box::into_raw(Box::new(head))
}

impl<O: Order, D> Pool<O, D> {
    pub(crate) const fn new() -> Self {
        Self {
            leaves: [ptr::null_mut(); ROOMS],
            kept: [0; ROOMS],
            live_leaves: 0,
            inners: Vec::new(),
            bytes: 0,
            data: PhantomData,
        }
    }

    /// What the nodes that were made here occupy, those that wait for reuse included.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// A leaf with `room`, without slots.
    #[inline]
    pub(super) fn leaf(&mut self, room: usize) -> NewLeaf<O, D> {
        self.live_leaves += 1;
        let kind = kind_of(room);
        let mut node = self.leaves[kind];
        if node.is_null() {
            node = self.grow(room);
        } else {
            self.kept[kind] -= 1;
            // SAFETY: a leaf that is kept begins with this pointer.
            self.leaves[kind] = unsafe { node.cast::<*mut Head>().read() };
        }
        // SAFETY: memory for a leaf with this room that nobody uses.
        unsafe { NewLeaf::new(node, room) }
    }

    #[cold]
    fn grow(&mut self, room: usize) -> *mut Head {
        // A tree has leaves of one room at a time: what is kept of others was left behind.
        for kind in (0..ROOMS).filter(|&kind| kind != kind_of(room)) {
            self.release(kind);
        }
        let layout = layout_of::<O, D>(room);
        self.bytes += layout.size();
        // SAFETY: the layout's size is not 0.
        let node = unsafe { alloc(layout) };
        if node.is_null() {
            handle_alloc_error(layout);
        }
        node.cast()
    }

    /// Gives the leaves back that are kept of this kind of room.
    fn release(&mut self, kind: usize) {
        let layout = layout_of::<O, D>(LEAST_ROOM << kind);
        let mut node = mem::replace(&mut self.leaves[kind], ptr::null_mut());
        self.bytes -= usize::from(mem::take(&mut self.kept[kind])) * layout.size();
        while !node.is_null() {
            // SAFETY: a leaf that is kept begins with a pointer to the next; made for this room, and freed once.
            unsafe {
                let next = node.cast::<*mut Head>().read();
                dealloc(node.cast(), layout);
                node = next;
            }
        }
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
            let room = head.room();
            let kind = kind_of(room);
            // SAFETY: as the caller says; the memory was made by `leaf` for this room.
            unsafe {
                drop_leaf::<O, D>(node);
                let few = if room <= O::LEAF { 4 } else { 2 };
                if u32::from(self.kept[kind]) < (self.live_leaves / 8).clamp(few, 64) {
                    self.kept[kind] += 1;
                    node.cast::<*mut Head>().write(self.leaves[kind]);
                    self.leaves[kind] = node;
                } else {
                    let layout = layout_of::<O, D>(room);
                    self.bytes -= layout.size();
                    dealloc(node.cast(), layout);
                }
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
        (0..ROOMS).for_each(|kind| self.release(kind));
        for &inner in &self.inners {
            // SAFETY: made by `inner` out of a box of this layout; its content was dropped.
            drop(unsafe { Box::from_raw(inner.cast::<MaybeUninit<Inner<O>>>()) });
        }
    }
}
