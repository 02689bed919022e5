//! Opening: interfaces, features, and errors.

use crate::support::{Memory, PAGE, assert_no_event, open};
use pageferry_testkit::skip;
use pageferry_userfault::uffd::{
    Features, OpenError, OpenedBy, RegisterMode, UffdSupport, Userfaultfd,
};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::{Errno, FdFlags, fcntl_getfd};
use rustix::process::{Uid, getuid};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities, set_thread_res_uid};
use std::thread;

/// Runs `call` in a new thread, whose credentials it may change without harm to others.
fn apart<R: Send>(call: impl FnOnce() -> R + Send) -> R {
    thread::scope(|scope| scope.spawn(call).join().unwrap())
}

#[test]
fn the_descriptor_is_close_on_exec_and_non_blocking() {
    let Some(uffd) = open(Features::empty()) else {
        return;
    };
    assert!(fcntl_getfd(&uffd).unwrap().contains(FdFlags::CLOEXEC));
    assert!(fcntl_getfl(&uffd).unwrap().contains(OFlags::NONBLOCK));
}

#[test]
fn the_probe_agrees_with_opening() {
    let support = UffdSupport::probe();
    match Userfaultfd::open(Features::empty()) {
        Ok(uffd) => {
            assert_eq!(support.usable, Ok(()));
            assert_eq!(uffd.features(), Features::empty());
            assert!(support.opened_by.is_some() && !support.features.is_empty());
            assert!(support.user_mode && support.serves(Features::empty()));
            assert!(!support.serves(Features::from_bits(1 << 50)));
        }
        Err(error) => {
            assert_eq!(support.usable, Err(error));
            assert!(!support.serves(Features::empty()));
            skip("uffd", error);
        }
    }
}

#[test]
fn what_the_kernel_lacks_is_named() {
    if open(Features::empty()).is_none() {
        return;
    }
    let unknown = Features::from_bits(1 << 50);
    let error = Userfaultfd::open(unknown | Features::MISSING_SHMEM).unwrap_err();
    let available = UffdSupport::probe().features;
    assert_eq!(
        error,
        OpenError::MissingFeatures {
            missing: unknown,
            available
        }
    );
    assert!(error.to_string().contains("0x4000000000000"), "{error}");
}

#[test]
fn without_any_privilege_the_error_says_what_to_do() {
    if !getuid().is_root() {
        skip("root", "dropping privileges needs root");
        return;
    }
    let nobody = Uid::from_raw(65534);
    let (opened, support) = apart(|| {
        // This changes only this thread. The C library's call would change all of them.
        set_thread_res_uid(nobody, nobody, nobody).unwrap();
        (
            Userfaultfd::open(Features::empty()).map(drop),
            UffdSupport::probe(),
        )
    });
    if support.unprivileged_sysctl == Some(true) {
        skip(
            "restricted-uffd",
            "vm.unprivileged_userfaultfd=1 lets everybody",
        );
        return;
    }
    match opened {
        Err(OpenError::NotPermitted { syscall, device }) => {
            assert_eq!(syscall, Errno::PERM);
            assert!(matches!(device, Errno::ACCESS | Errno::NOENT), "{device}");
        }
        Ok(()) => {
            skip("restricted-uffd", "/dev/userfaultfd is open to everybody");
            return;
        }
        Err(other) => panic!("{other}"),
    }
    assert_eq!(support.usable, opened);
    assert_eq!(support.opened_by, None);
    assert!(support.user_mode, "a user-mode-only one needs no privilege");
    assert!(
        !support.features.is_empty(),
        "and can be asked for features"
    );
}

#[test]
fn without_the_capability_the_device_serves() {
    if !getuid().is_root() || rustix::fs::stat("/dev/userfaultfd").is_err() {
        skip("root", "this needs root and /dev/userfaultfd");
        return;
    }
    let opened = apart(|| {
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::SYS_PTRACE);
        set_capabilities(None, sets).unwrap();
        (
            UffdSupport::probe(),
            Userfaultfd::open(Features::EVENT_FORK).map(drop),
        )
    });
    if opened.0.unprivileged_sysctl == Some(true) {
        skip(
            "restricted-uffd",
            "vm.unprivileged_userfaultfd=1 lets everybody",
        );
        return;
    }
    assert_eq!(opened.0.opened_by, Some(OpenedBy::Device));
    assert!(opened.0.serves(Features::MISSING_SHMEM));
    assert_eq!(opened.1, Err(OpenError::ForkEventsNotPermitted));
}

#[test]
fn a_user_mode_only_one_does_not_serve_system_calls() {
    let uffd = match Userfaultfd::open_user_mode_only(Features::MISSING_SHMEM) {
        Ok(uffd) => uffd,
        Err(error) => {
            skip("uffd", error);
            return;
        }
    };
    let memory = Memory::shared(2);
    memory.register(&uffd, RegisterMode::MISSING);
    assert_eq!(memory.get_by_syscall(0), Err(Errno::FAULT));
    assert_no_event(&uffd);
    uffd.zeropage(memory.at(0), PAGE, pageferry_userfault::uffd::Wake::Now)
        .unwrap();
    assert_eq!(memory.get_by_syscall(0), Ok(0));
}
