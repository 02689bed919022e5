#![expect(unsafe_code, reason = "a platform of tables from the heap")]
//! The MMU from outside, one thread.

mod basic;
mod heap;
