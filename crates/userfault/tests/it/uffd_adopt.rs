//! Userfaultfds that come from elsewhere: from another process over a socket, and from a fork.
#![expect(
    unsafe_code,
    reason = "registers in a child process, moves pages, and opens a userfaultfd without handshake"
)]

use crate::support::{
    Memory, PAGE, exit_code, fork, in_thread, lock_forks, next_event, next_fault, open,
};
use pageferry_userfault::uffd::{
    AdoptError, Event, EventReader, Features, RegisterMode, SourceHoles, UffdSupport, Userfaultfd,
    Wake,
};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, FdFlags, dup, fcntl_getfd};
use rustix::mm::UserfaultfdFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

fn send(socket: &OwnedFd, fd: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(
        socket,
        &[IoSlice::new(b"u")],
        &mut ancillary,
        SendFlags::empty(),
    )
    .map(drop)
}

fn receive(socket: &OwnedFd) -> OwnedFd {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut bytes = [IoSliceMut::new(&mut byte)];
    recvmsg(socket, &mut bytes, &mut ancillary, RecvFlags::empty()).unwrap();
    let fd = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    fd.expect("the child failed before it sent its userfaultfd")
}

#[test]
fn a_page_server_serves_another_process() {
    let features = Features::THREAD_ID;
    if open(features).is_none() {
        return;
    }
    let _turn = lock_forks();
    let memory = Memory::anonymous(2);
    let flags = SocketFlags::CLOEXEC;
    let (here, there) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    let child = fork(|| {
        let uffd = Userfaultfd::open(features).unwrap();
        memory.register(&uffd, RegisterMode::MISSING);
        send(&there, uffd.as_fd()).unwrap();
        memory.get(0) // sleeps until the parent brings the page
    });
    // If the child fails, receiving ends.
    drop(there);
    let uffd = Userfaultfd::adopt(receive(&here), features).unwrap();
    assert_eq!(uffd.features(), features);
    let fault = next_fault(&uffd);
    assert_eq!(fault.address, memory.at(0));
    assert_eq!(fault.thread, child.cast_unsigned());
    if UffdSupport::probe().features.contains(Features::MOVE) {
        let page = Memory::anonymous(1);
        let (to, from) = (memory.at(0), page.at(0));
        // SAFETY: the page is ours, and nobody has a reference to it.
        let moved = unsafe { uffd.move_pages(to, from, PAGE, SourceHoles::Skip, Wake::Now) };
        let errno = moved.unwrap_err().errno;
        assert_eq!(errno, Errno::INVAL, "pages do not move between processes");
    }
    uffd.copy(memory.at(0), &[42; PAGE as usize], Wake::Now)
        .unwrap();
    assert_eq!(exit_code(child), 42);

    // The child is gone.
    let at = memory.at(1);
    for error in [
        uffd.copy(at, &[1; PAGE as usize], Wake::Now),
        uffd.zeropage(at, PAGE, Wake::Now),
        uffd.write_protect(at, PAGE),
    ] {
        let error = error.unwrap_err();
        assert!(error.is_process_gone(), "{error}");
    }
    // SAFETY: the kernel refuses the call, so nothing is registered.
    let error = unsafe { uffd.register(at, PAGE, RegisterMode::MISSING) }.unwrap_err();
    assert_eq!(error.errno, Errno::NOMEM);
    assert!(error.to_string().contains("has exited"), "{error}");
    assert_eq!(uffd.unregister(at, PAGE).unwrap_err().errno, Errno::NOMEM);
    assert!(EventReader::new(1).try_next(&uffd).unwrap().is_none());
}

#[test]
fn a_fork_brings_a_userfaultfd_that_serves_the_child_alone() {
    let Some(uffd) = open(Features::EVENT_FORK) else {
        return;
    };
    let _turn = lock_forks();
    let memory = Memory::anonymous(2);
    memory.register(&uffd, RegisterMode::MISSING);
    // The fork sleeps until its event is read. The child sleeps until its page comes.
    let call = in_thread(&memory, |memory| fork(|| memory.get(0)));
    let Event::Fork { child: forked } = next_event(&uffd) else {
        panic!("no fork event")
    };
    assert_eq!(forked.features(), Features::EVENT_FORK);
    assert!(fcntl_getfd(&forked).unwrap().contains(FdFlags::CLOEXEC));
    assert!(fcntl_getfl(&forked).unwrap().contains(OFlags::NONBLOCK));
    let child = call.join().unwrap();
    assert_eq!(next_fault(&forked).address, memory.at(0));
    forked
        .copy(memory.at(0), &[7; PAGE as usize], Wake::Now)
        .unwrap();
    assert_eq!(exit_code(child), 7);
    let error = forked.zeropage(memory.at(1), PAGE, Wake::Now).unwrap_err();
    assert!(error.is_process_gone(), "{error}");
    // The page of this process is still missing.
    uffd.zeropage(memory.at(0), PAGE, Wake::Now).unwrap();
    assert_eq!(memory.get(0), 0);
}

#[test]
fn an_adopted_descriptor_is_non_blocking_and_close_on_exec() {
    let Some(uffd) = open(Features::MISSING_SHMEM) else {
        return;
    };
    let copy = dup(&uffd).unwrap();
    let flags = fcntl_getfl(&copy).unwrap();
    fcntl_setfl(&copy, flags.difference(OFlags::NONBLOCK)).unwrap();
    assert!(!fcntl_getfd(&copy).unwrap().contains(FdFlags::CLOEXEC));
    let adopted = Userfaultfd::adopt(copy, Features::MISSING_SHMEM).unwrap();
    assert!(fcntl_getfl(&adopted).unwrap().contains(OFlags::NONBLOCK));
    assert!(fcntl_getfd(&adopted).unwrap().contains(FdFlags::CLOEXEC));
}

#[test]
fn features_that_were_not_requested_are_refused_by_name() {
    let Some(uffd) = open(Features::MISSING_SHMEM) else {
        return;
    };
    let needed = Features::MISSING_SHMEM | Features::EVENT_REMOVE;
    let error = Userfaultfd::adopt(dup(&uffd).unwrap(), needed).unwrap_err();
    assert_eq!(
        error,
        AdoptError::MissingFeatures {
            missing: Features::EVENT_REMOVE,
            enabled: Features::MISSING_SHMEM,
        }
    );
    assert!(
        error.to_string().contains("without EVENT_REMOVE"),
        "{error}"
    );
}

#[test]
fn descriptors_that_are_not_ready_or_no_userfaultfd_are_refused() {
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    for other in [reader, file.into()] {
        let error = Userfaultfd::adopt(other, Features::empty()).unwrap_err();
        assert_eq!(error, AdoptError::NotUserfaultfd);
    }
    if open(Features::empty()).is_none() {
        return;
    }
    // SAFETY: no range is registered with it.
    let raw = unsafe { rustix::mm::userfaultfd(UserfaultfdFlags::empty()) };
    match raw {
        Ok(raw) => {
            let error = Userfaultfd::adopt(raw, Features::empty()).unwrap_err();
            assert_eq!(error, AdoptError::NoHandshake);
        }
        Err(errno) => assert_eq!(
            errno,
            Errno::PERM,
            "only the device is open to this process"
        ),
    }
}
