//! The tests with Cloud Hypervisor. `PAGEFERRY_CLOUD_HYPERVISOR` names it, and
//! `PAGEFERRY_CLOUD_HYPERVISOR_OTHER` one of another version.

use super::vmm::{Devices, Kind, Vmm};
use crate::support::{Dir, Process};

const KIND: Kind = Kind::CloudHypervisor;

#[test]
fn a_vm_moves() {
    super::moves(KIND);
}

#[test]
fn a_destination_without_the_disk_refuses_the_vm() {
    super::missing_disk(KIND);
}

#[test]
fn a_destination_whose_tap_is_busy_refuses_the_vm() {
    super::busy_tap(KIND);
}

#[test]
fn a_destination_whose_vsock_path_is_in_use_refuses_the_vm() {
    super::vsock_in_use(KIND, |dir| {
        std::fs::remove_file(dir.path("vsock")).unwrap();
        Vec::new()
    });
}

#[test]
fn another_version_takes_the_vm_whole_or_refuses_it() {
    super::other_version(KIND);
}

#[test]
fn kills_cost_no_vm() {
    super::kills(KIND, &["--preserve-source"]);
}

/// The VM of a snapshot starts at once, and its memory follows.
#[test]
fn a_snapshot_is_restored() {
    let Some(program) = KIND.program("") else {
        return;
    };
    let (_turn, dir) = (super::turn(), Dir::new());
    let source = Vmm::start(KIND, &program, &dir, "source", None);
    source.boot(&Devices::default());
    source.pause();
    let web = dir.path("web");
    source.snapshot(&web);
    let target = Vmm::start(KIND, &program, &dir, "target", None);
    let vm = target.address();
    let restore = ["restore", "--for", &vm, web.to_str().unwrap(), "--resume"];
    let restored = super::ended(Process::start(&restore, &dir));
    assert_eq!(restored.code, Some(0), "{restored:?}\n{}", target.report());
    target.assert_whole();
}
