//! userfaultfd on the real kernel. Without permission the tests are skipped, aloud; with
//! `PAGEFERRY_REQUIRE=uffd` in the environment they fail instead.
#![cfg(not(loom))]

mod events;
mod memory;
mod open;
mod poison;
mod range_errors;
mod resolve;
