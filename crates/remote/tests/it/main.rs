//! Files of a peer over loopback, tested from outside.

mod bounds;
mod contents;
mod frames;
mod liar;
mod loss;
mod restore;
mod scene;
mod trust;

/// A process of its own for each double.
#[test]
fn firecracker_double() {
    pageferry_testkit::firecracker::entry();
}
