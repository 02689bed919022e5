//! Page states against their model, and userfaultfd on the real kernel (`uffd_*`). Tests that need
//! userfaultfd and may not use it are skipped; `PAGEFERRY_REQUIRE=uffd` makes them fail instead.
#![cfg(not(loom))]

mod bitmap_model;
#[cfg(not(miri))]
mod support;
#[cfg(not(miri))]
mod uffd_events;
#[cfg(not(miri))]
mod uffd_open;
#[cfg(not(miri))]
mod uffd_poison;
#[cfg(not(miri))]
mod uffd_range_errors;
#[cfg(not(miri))]
mod uffd_resolve;
