#![expect(unsafe_code, reason = "platforms of tables from the heap")]
//! The MMU from outside, on one thread.
//!
//! - `basic` shows the effect of each call, by example.
//! - `agree` makes calls at random, on all formats, and compares the results with a plain
//!   [`model`]. The [`machine`] below has a TLB that forgets only flushed entries, and it checks
//!   break-before-make.
//! - `starve` takes table memory away.
//! - `huge` builds the tables of a 12 TiB VM.

mod agree;
mod basic;
mod heap;
mod huge;
mod machine;
mod model;
mod ops;
mod starve;
