//! Models of the crate under loom: every interleaving with a bounded number of preemptions.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pageferry-epoch --profile stress --test loom`
#![cfg(loom)]
#![expect(
    unsafe_code,
    reason = "threads share cells that loom watches, and the maker of a barrier promises its effect"
)]

mod exclusion;
mod guards;
mod light;
