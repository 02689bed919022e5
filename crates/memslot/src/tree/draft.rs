//! The children of an inner node that a change is building.

use super::kind::{INNER, MOST, Order, Reach};
use super::node::{Head, Inner};
use core::ptr;

/// The children of a new inner node, with room for one more than fits into a node.
pub(super) struct Draft {
    pub(super) keys: [u64; INNER + 1],
    pub(super) nodes: [*const Head; INNER + 1],
    pub(super) reach: [u64; INNER + 1],
    pub(super) len: usize,
}

impl Draft {
    pub(super) const fn new() -> Self {
        Self {
            keys: [MOST; INNER + 1],
            nodes: [ptr::null(); INNER + 1],
            reach: [0; INNER + 1],
            len: 0,
        }
    }

    pub(super) fn of<O: Order>(inner: &Inner<O>) -> Self {
        let mut draft = Self::new();
        for i in 0..inner.head.len() {
            draft.push(inner.keys[i], inner.cells[i].newest(), inner.reach.get(i));
        }
        draft
    }

    pub(super) fn push(&mut self, key: u64, node: *const Head, reach: u64) {
        self.keys[self.len] = key;
        self.nodes[self.len] = node;
        self.reach[self.len] = reach;
        self.len += 1;
    }

    pub(super) fn replace(&mut self, index: usize, node: *const Head, reach: u64) {
        self.nodes[index] = node;
        self.reach[index] = reach;
    }

    pub(super) fn insert(&mut self, index: usize, key: u64, node: *const Head, reach: u64) {
        self.keys.copy_within(index..self.len, index + 1);
        self.nodes.copy_within(index..self.len, index + 1);
        self.reach.copy_within(index..self.len, index + 1);
        self.keys[index] = key;
        self.replace(index, node, reach);
        self.len += 1;
    }

    pub(super) fn remove(&mut self, index: usize) {
        self.keys.copy_within(index + 1..self.len, index);
        self.nodes.copy_within(index + 1..self.len, index);
        self.reach.copy_within(index + 1..self.len, index);
        self.len -= 1;
    }
}
