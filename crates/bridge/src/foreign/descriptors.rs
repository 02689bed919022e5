//! Messages with descriptors, over Unix sockets.

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Receives some bytes, and adds the descriptors that came with them, as far as `space` has room.
pub(crate) fn receive(
    from: &UnixStream,
    into: &mut [u8],
    space: &mut [MaybeUninit<u8>],
    fds: &mut Vec<OwnedFd>,
) -> Result<usize, Errno> {
    let mut control = RecvAncillaryBuffer::new(space);
    let parts = &mut [IoSliceMut::new(into)];
    let got = rustix::net::recvmsg(from, parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            fds.extend(some);
        }
    }
    Ok(got.bytes)
}

/// Sends bytes with descriptors, for which `space` has room. Returns the number of bytes.
pub(crate) fn send(
    to: &UnixStream,
    bytes: &[u8],
    space: &mut [MaybeUninit<u8>],
    fds: &[BorrowedFd<'_>],
) -> Result<usize, Errno> {
    let mut control = SendAncillaryBuffer::new(space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOMANYREFS);
    }
    let parts = [IoSlice::new(bytes)];
    rustix::net::sendmsg(to, &parts, &mut control, SendFlags::NOSIGNAL)
}
