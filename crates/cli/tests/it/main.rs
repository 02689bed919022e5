//! All integration tests of the command line.

mod activation;
mod architecture;
mod backings;
mod check;
mod cloud_hypervisor;
mod cloud_hypervisor_restore;
mod console;
mod control;
mod cpu_model;
mod cpus;
mod demo;
mod detach;
mod devices;
mod docs_links;
mod firecracker;
mod interrupts;
mod json_document;
mod json_output;
mod limits;
mod linux;
mod linux_moves;
mod listeners;
mod metrics;
mod named_files;
mod names;
#[cfg(feature = "object-store")]
mod object_store;
mod output;
mod pager;
mod pager_mount;
mod paused;
mod peers;
mod progress;
#[cfg(target_arch = "x86_64")]
mod real;
mod recovery;
mod restore;
mod schedules;
#[cfg(target_arch = "x86_64")]
mod service_filter;
mod set;
#[cfg(feature = "peers")]
mod share;
mod sizes;
mod snapshot;
mod support;
mod terminal;
mod trust;
mod tunnel;
mod tunnel_libvirt;
mod tunnel_qemu;
mod two_hosts;
mod two_processes;
mod watch;

/// Becomes Cloud Hypervisor's double in a process that a test has started for that.
#[test]
fn cloud_hypervisor_double() {
    pageferry_testkit::cloud_hypervisor::entry();
}

/// Becomes Firecracker's double in a process that a test has started for that.
#[test]
fn firecracker_double() {
    pageferry_testkit::firecracker::entry();
}
