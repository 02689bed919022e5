//! The engine's SIGBUS handler takes only signals of poison markers.

use crate::support::{machine, no_kvm};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

const CHILD: &str = "PAGEFERRY_TEST_SIGBUS_CHILD";

#[test]
fn a_bus_error_that_is_not_the_guests_still_ends_the_process() {
    if no_kvm() {
        return;
    }
    let status = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "kvm_signals::child_that_dies_of_a_bus_error",
            "--ignored",
        ])
        .env(CHILD, "1")
        .output()
        .unwrap()
        .status;
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
}

#[test]
#[ignore = "the other test runs it in a process of its own"]
#[expect(unsafe_code, reason = "a mapping beyond the end of its file")]
fn child_that_dies_of_a_bus_error() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    // The handlers are installed with the first machine.
    let _machine = machine(1, 64);
    let fd = rustix::fs::memfd_create("empty", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    // SAFETY: (1) a plain system call. It ends a process whose handler swallows the bus error and
    // so repeats the read for ever. (2) A new mapping at an address that the kernel chooses. It is
    // read through a raw pointer, and this test is about the bus error of that read.
    unsafe {
        libc::alarm(10);
        let map = rustix::mm::mmap(
            std::ptr::null_mut(),
            4096,
            rustix::mm::ProtFlags::READ,
            rustix::mm::MapFlags::SHARED,
            &fd,
            0,
        )
        .unwrap();
        map.cast::<u8>().read_volatile();
    }
}
