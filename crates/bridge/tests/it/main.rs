//! Tunnels between VMMs that are threads of the test, and moves between doubles of Cloud Hypervisor
//! and of Firecracker.

mod ch;
mod ch_bad_input;
mod ch_failures;
mod ch_figures;
mod ch_move;
mod ch_restore;
mod ch_snapshot;
mod ch_wire;
mod fc;
mod fc_failures;
mod fc_figures;
mod fc_jail;
mod fc_move;
mod scene;
mod tunnel;
mod tunnel_doubt;
mod tunnel_faults;
mod tunnel_hostile;

/// Becomes the double of Cloud Hypervisor in a process of its own.
#[test]
fn cloud_hypervisor_double() {
    pageferry_testkit::cloud_hypervisor::entry();
}

/// Becomes the double of Firecracker in a process of its own.
#[test]
fn firecracker_double() {
    pageferry_testkit::firecracker::entry();
}
