//! The crate's behaviour on this machine. Models are in `tests/loom` and `tests/tso.rs`.
#![cfg(not(any(loom, shuttle)))]
#![expect(
    unsafe_code,
    reason = "the maker of a barrier promises its effect, and tests under Miri share memory by pointer"
)]

mod exclusion;
mod guards;
#[cfg(not(miri))]
mod light;
mod try_arc;
#[cfg(miri)]
mod turns;
