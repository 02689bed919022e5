//! The integration tests of the room: one file for each class of behaviour.

mod ch;
mod ch_bad_input;
mod ch_failures;
mod ch_move;
mod ch_wire;

/// Becomes the double of Cloud Hypervisor in a process of its own.
#[test]
fn cloud_hypervisor_double() {
    pageferry_testkit::cloud_hypervisor::entry();
}
