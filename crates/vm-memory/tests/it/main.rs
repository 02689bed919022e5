//! Slots as guest memory: what only slots have, and what they share with `vm-memory`'s own memory.
#![cfg(not(loom))]

mod measure;
mod rust_vmm;
mod slots;
