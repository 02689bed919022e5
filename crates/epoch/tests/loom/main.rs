//! Models of the crate under loom: every interleaving, up to a number of preemptions.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pageferry-epoch --profile stress --test loom`
#![cfg(loom)]
#![expect(
    unsafe_code,
    reason = "loom watches cells that threads share, and a barrier's maker promises that it is one"
)]

mod exclusion;
mod explore;
mod guards;
mod light;
mod watched;
