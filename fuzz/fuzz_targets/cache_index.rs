//! The index of a cache on disk: any bytes decode, and it stays whole when it is used.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| pageferry_remote::cache::fuzz_index(bytes));
