//! Interleavings that loom explores: of the MMU's kernel ([`mmu`]), and of a dirty ring ([`ring`]).
//!
//! ```sh
//! RUSTFLAGS="--cfg loom" cargo test -p pageferry-tdp --profile stress --test loom
//! ```
#![cfg(loom)]

mod mmu;
mod ring;
