//! Tunnels between VMMs that are threads of the test, and moves between doubles of Cloud Hypervisor.

mod ch;
mod ch_bad_input;
mod ch_failures;
mod ch_figures;
mod ch_move;
mod ch_wire;
mod scene;
mod tunnel;
mod tunnel_faults;
mod tunnel_hostile;

/// Becomes the double of Cloud Hypervisor in a process of its own.
#[test]
fn cloud_hypervisor_double() {
    pageferry_testkit::cloud_hypervisor::entry();
}
