//! The tests with Firecracker. `PAGEFERRY_FIRECRACKER` names it, and `PAGEFERRY_FIRECRACKER_OTHER`
//! one of another version.

use super::Scene;
use super::vmm::{Devices, Kind, Vmm};
use crate::support::{Dir, Process};
use serde_json::json;

const KIND: Kind = Kind::Firecracker;

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
        let path = dir.path("vsock-there").into_os_string().into_string();
        vec!["--vsock-path".into(), path.unwrap()]
    });
}

#[test]
fn a_vm_moves_to_another_tap() {
    let (Some(program), Some(hosts)) = (KIND.program(""), super::taps()) else {
        return;
    };
    let flags = ["--network-override", "eth0=tap1"];
    let programs = [program.as_path(); 2];
    Scene::start(KIND, programs, &flags, super::on_tap0, Some(hosts)).assert_moves(&[]);
}

#[test]
fn another_version_takes_the_vm_whole_or_refuses_it() {
    super::other_version(KIND);
}

#[test]
fn kills_cost_no_vm() {
    super::kills(KIND, &[]);
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
    let [socket, memory] = [dir.path("pager"), web.join("memory")];
    let [socket_, memory_] = [&socket, &memory].map(|path| path.to_str().unwrap());
    let run = ["pager", "run", "--socket", socket_, "--memory", memory_];
    let mut pager = Process::start(&run, &dir);
    super::within(
        "pager",
        || socket.exists().then_some(()),
        || pager.said_on_stderr(),
    );
    let target = Vmm::start(KIND, &program, &dir, "target", None);
    let load = json!({
        "snapshot_path": web.join("state"),
        "resume_vm": true,
        "mem_backend": {"backend_type": "Uffd", "backend_path": socket},
    });
    target.put("snapshot/load", &load).unwrap();
    target.assert_whole();
    assert!(pager.is_running(), "{}", pager.said_on_stderr());
}
