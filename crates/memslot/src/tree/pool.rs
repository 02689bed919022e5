//! The memory of nodes.
//!
//! **Guarantee.** A change that reserved its [`Need`] allocates nothing, so it cannot fail
//! half-way.
//!
//! **Mechanism.** The pool keeps freed nodes for the next changes. [`NodePool::reserve`] allocates
//! the nodes that are missing. [`NodePool::trim`] gives back nodes that a large change left over.

use super::kind::Order;
use super::leaf::{LEAST_ROOM, ROOMS, drop_leaf, kind_of, layout_of};
use super::need::Need;
use super::new_leaf::NewLeaf;
use super::node::{Head, Inner};
use alloc::alloc::{Layout, alloc, dealloc};
use core::marker::PhantomData;
use core::mem;
use core::ptr;
use pageferry_epoch::OutOfMemory;

/// A node that is no longer in the tree. Earlier readers may still use it.
pub(crate) struct Replaced(pub(super) *const Head);

/// The number of inner nodes that are kept for reuse.
const KEPT_INNERS: u8 = 4;

/// The memory of one tree's nodes while they are not in the tree.
pub(crate) struct NodePool<O: Order, D> {
    /// Kept leaves, by room. Each begins with a pointer to the next, as kept inner nodes do.
    leaves: [*mut Head; ROOMS],
    kept: [u8; ROOMS],
    live_leaves: u32,
    inners: *mut Head,
    kept_inners: u8,
    /// The kept head of an empty tree, or null.
    empty: *mut Head,
    /// Whether the last change reserved more than most changes need.
    reserved_many: bool,
    bytes: usize,
    data: PhantomData<fn() -> (O, D)>,
}

const HEAD: Layout = Layout::new::<Head>();

/// Allocates memory of this layout, whose size is not 0.
fn allocate(layout: Layout) -> Result<*mut Head, OutOfMemory> {
    // SAFETY: nodes are not empty.
    let node = unsafe { alloc(layout) };
    if node.is_null() {
        let bytes = layout.size();
        return Err(OutOfMemory { bytes });
    }
    Ok(node.cast())
}

/// Puts `node` in front of a list.
///
/// # Safety
/// `node` is memory for a node that nobody uses.
unsafe fn push(list: &mut *mut Head, node: *mut Head) {
    // SAFETY: as the caller says. All nodes are larger than a pointer, and aligned for one.
    unsafe { node.cast::<*mut Head>().write(*list) };
    *list = node;
}

/// Takes the first node of a list.
///
/// # Safety
/// All nodes in the list came there by `push`.
unsafe fn pop(list: &mut *mut Head) -> Option<*mut Head> {
    let node = *list;
    if node.is_null() {
        return None;
    }
    // SAFETY: the node begins with this pointer, as the caller says.
    *list = unsafe { node.cast::<*mut Head>().read() };
    Some(node)
}

impl<O: Order, D> NodePool<O, D> {
    const INNER: Layout = Layout::new::<Inner<O>>();

    pub(crate) const fn new() -> Self {
        Self {
            leaves: [ptr::null_mut(); ROOMS],
            kept: [0; ROOMS],
            live_leaves: 0,
            inners: ptr::null_mut(),
            kept_inners: 0,
            empty: ptr::null_mut(),
            reserved_many: false,
            bytes: 0,
            data: PhantomData,
        }
    }

    /// The bytes of all nodes of this pool, including those that wait for reuse.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Makes sure that a change can take the nodes that it needs.
    #[inline]
    pub(crate) fn reserve(&mut self, need: &Need) -> Result<(), OutOfMemory> {
        for kind in 0..ROOMS {
            while self.kept[kind] < need.leaves[kind] {
                self.add_leaf(kind)?;
            }
        }
        if need.is_many {
            return self.reserve_many(need);
        }
        Ok(())
    }

    #[cold]
    fn add_leaf(&mut self, kind: usize) -> Result<(), OutOfMemory> {
        let layout = layout_of::<O, D>(LEAST_ROOM << kind);
        let node = allocate(layout)?;
        self.bytes += layout.size();
        self.kept[kind] += 1;
        // SAFETY: just allocated.
        unsafe { push(&mut self.leaves[kind], node) };
        Ok(())
    }

    #[cold]
    fn reserve_many(&mut self, need: &Need) -> Result<(), OutOfMemory> {
        self.reserved_many = true;
        while self.kept_inners < need.inners {
            let node = allocate(Self::INNER)?;
            self.bytes += Self::INNER.size();
            self.kept_inners += 1;
            // SAFETY: just allocated.
            unsafe { push(&mut self.inners, node) };
        }
        if need.empty {
            self.reserve_empty()?;
        }
        Ok(())
    }

    /// Makes sure that there is a node for an empty tree.
    pub(crate) fn reserve_empty(&mut self) -> Result<(), OutOfMemory> {
        if self.empty.is_null() {
            self.empty = allocate(HEAD)?;
        }
        Ok(())
    }

    /// Gives back nodes that were reserved for a large change and not used. Leaves of other rooms
    /// than `room` go too: a tree has leaves of one room at a time.
    #[inline]
    pub(crate) fn trim(&mut self, room: impl FnOnce() -> usize) {
        if mem::take(&mut self.reserved_many) {
            self.release_all_but(Some(kind_of(room())), KEPT_INNERS);
        }
    }

    #[cold]
    fn release_all_but(&mut self, kind: Option<usize>, inners: u8) {
        for other in (0..ROOMS).filter(|&other| Some(other) != kind) {
            self.release(other);
        }
        while self.kept_inners > inners
            // SAFETY: kept inner nodes came into the list by `push`.
            && let Some(inner) = unsafe { pop(&mut self.inners) }
        {
            self.kept_inners -= 1;
            self.bytes -= Self::INNER.size();
            // SAFETY: the node was allocated with this layout, and is freed once.
            unsafe { dealloc(inner.cast(), Self::INNER) };
        }
        let empty = mem::replace(&mut self.empty, ptr::null_mut());
        if !empty.is_null() {
            // SAFETY: as above.
            unsafe { dealloc(empty.cast(), HEAD) };
        }
    }

    /// Gives back the kept leaves of this room.
    fn release(&mut self, kind: usize) {
        let layout = layout_of::<O, D>(LEAST_ROOM << kind);
        self.bytes -= usize::from(mem::take(&mut self.kept[kind])) * layout.size();
        // SAFETY: kept leaves came into the list by `push`, were allocated for this room, and are
        // freed once.
        unsafe {
            while let Some(leaf) = pop(&mut self.leaves[kind]) {
                dealloc(leaf.cast(), layout);
            }
        }
    }

    /// A leaf with `room` and without slots. It was reserved.
    #[inline]
    pub(super) fn leaf(&mut self, room: usize) -> NewLeaf<O, D> {
        let kind = kind_of(room);
        // SAFETY: kept leaves came into the list by `push`.
        let node = unsafe { pop(&mut self.leaves[kind]) }.expect("a leaf was reserved");
        self.kept[kind] -= 1;
        self.live_leaves += 1;
        // SAFETY: the memory is for a leaf with this room, and nobody uses it.
        unsafe { NewLeaf::new(node, room) }
    }

    /// Uninitialised memory for an inner node. It was reserved.
    pub(super) fn inner(&mut self) -> *mut Inner<O> {
        // SAFETY: kept inner nodes came into the list by `push`.
        let node = unsafe { pop(&mut self.inners) }.expect("an inner node was reserved");
        self.kept_inners -= 1;
        node.cast()
    }

    /// The node of an empty tree. It was reserved.
    pub(super) fn empty(&mut self, head: Head) -> *const Head {
        let node = mem::replace(&mut self.empty, ptr::null_mut());
        assert!(!node.is_null(), "an empty tree was reserved");
        // SAFETY: the memory is for a head, and nobody uses it.
        unsafe { node.write(head) };
        node
    }

    /// Takes a node back, and keeps some nodes for the next changes.
    ///
    /// # Safety
    /// Nobody can reach the node any more, and it is freed once.
    pub(crate) unsafe fn free(&mut self, node: Replaced) {
        let node = node.0.cast_mut();
        // SAFETY: nodes are alive until they are freed.
        let head = unsafe { &*node };
        head.alive.freed();
        if head.is_empty_tree() {
            // SAFETY: as the caller says. The node was allocated with this layout.
            unsafe {
                ptr::drop_in_place(node);
                dealloc(node.cast(), HEAD);
            }
        } else if head.level() == 0 {
            self.live_leaves -= 1;
            let room = head.room();
            let kind = kind_of(room);
            // SAFETY: as the caller says. The memory was allocated for this room.
            unsafe {
                drop_leaf::<O, D>(node);
                let few = if room <= O::LEAF { 4 } else { 2 };
                if u32::from(self.kept[kind]) < (self.live_leaves / 8).clamp(few, 64) {
                    self.kept[kind] += 1;
                    push(&mut self.leaves[kind], node);
                } else {
                    let layout = layout_of::<O, D>(room);
                    self.bytes -= layout.size();
                    dealloc(node.cast(), layout);
                }
            }
        } else {
            // SAFETY: likewise. The drop of atomics only concerns loom.
            unsafe {
                ptr::drop_in_place(node.cast::<Inner<O>>());
                if self.kept_inners < KEPT_INNERS {
                    self.kept_inners += 1;
                    push(&mut self.inners, node);
                } else {
                    self.bytes -= Self::INNER.size();
                    dealloc(node.cast(), Self::INNER);
                }
            }
        }
    }
}

impl<O: Order, D> Drop for NodePool<O, D> {
    fn drop(&mut self) {
        self.release_all_but(None, 0);
    }
}
