//! The pager, tested from outside.

mod balloon;
mod hostile;
mod kills;
mod loss;
mod model;
mod mount;
mod process;
mod record;
mod restore;
mod scene;
#[cfg(all(feature = "object-store", feature = "peers"))]
mod stores;

/// A process of its own for each double.
#[test]
fn firecracker_double() {
    pageferry_testkit::firecracker::entry();
}

/// A process of its own for each pager that is killed.
#[test]
fn pager_process() {
    process::entry();
}
