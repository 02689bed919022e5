//! A double of a service manager that keeps descriptors.

use super::Dir;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

/// The socket of a service manager that keeps descriptors.
pub(crate) struct Manager {
    socket: UnixDatagram,
    pub(crate) path: PathBuf,
}

impl Manager {
    pub(crate) fn new(dir: &Dir) -> Self {
        let path = dir.path("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket
            .set_read_timeout(Some(pageferry_testkit::LIMIT))
            .unwrap();
        Self { socket, path }
    }

    /// The next message, and its descriptors.
    fn hear(&self) -> (String, Vec<OwnedFd>) {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let got = recvmsg(
            self.socket.as_fd(),
            &mut parts,
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        );
        let len = got.unwrap().bytes;
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(all) = message {
                fds.extend(all);
            }
        }
        (String::from_utf8_lossy(&bytes[..len]).into_owned(), fds)
    }

    #[track_caller]
    pub(crate) fn wait_for(&self, part: &str) -> Vec<OwnedFd> {
        loop {
            let (text, fds) = self.hear();
            if text.contains(part) {
                return fds;
            }
        }
    }
}
