//! Slots as guest memory: the features of slots, and the behaviour that they share with
//! `vm-memory`'s own memory.
#![cfg(not(loom))]

mod measure;
mod rust_vmm;
mod slots;
