//! The crate's behaviour. Models of its concurrency are in `tests/loom.rs`.
#![cfg(not(loom))]

mod allocator;
mod kernel_cases;
mod memory;
mod model;
mod no_memory;
mod refusals;
mod stress;
