//! Bitmaps compared with their models, and userfaultfd on the real kernel (`uffd_*`). Tests that
//! may not use userfaultfd are skipped. With `PAGEFERRY_REQUIRE=uffd` they fail instead.
#![cfg(not(loom))]

mod bitmap_model;
mod bitmap_sparse;
mod claimed_runs;
#[cfg(not(miri))]
mod support;
#[cfg(not(miri))]
mod uffd_adopt;
#[cfg(not(miri))]
mod uffd_events;
#[cfg(not(miri))]
mod uffd_move;
#[cfg(not(miri))]
mod uffd_open;
#[cfg(not(miri))]
mod uffd_poison;
#[cfg(not(miri))]
mod uffd_protect;
#[cfg(not(miri))]
mod uffd_range_errors;
#[cfg(not(miri))]
mod uffd_read;
#[cfg(not(miri))]
mod uffd_resolve;
