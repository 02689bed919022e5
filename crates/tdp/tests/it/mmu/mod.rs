#![expect(unsafe_code, reason = "platforms of tables from the heap")]
//! The MMU from outside, one thread.
//!
//! `basic` says what each call does, by example. `agree` makes calls at random, on all formats, and
//! compares what they leave with a plain [`model`]; the [`machine`] below them has a TLB that
//! forgets only what it is told to flush, and sees whether entries that must be broken before they
//! are made are. `starve` takes table memory away; `huge` builds the tables of a 12 TiB VM.

mod agree;
mod basic;
mod heap;
mod huge;
mod machine;
mod model;
mod ops;
mod starve;
