//! A connection of the migration protocol: a Unix socket that may carry descriptors.
//!
//! **Guarantee.** Each wait has a limit, unless its caller waits for what may take any time, such
//! as the next page fault. Nothing beyond a message is read, and memory grows with the bytes that
//! have come.

use super::wire::{Command, HEADER_BYTES, Request, Status};
use crate::foreign::VmmError;
use crate::foreign::descriptors::{receive, send};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::io::Write as _;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The most descriptors that one read takes. Each message has one at most.
const MOST_DESCRIPTORS: usize = 4;
/// The bytes that are allocated before any of them has come.
const STEP: usize = 64 << 10;

/// The end of a wait, and its length for people.
#[derive(Clone, Copy)]
pub(super) struct Limit {
    limit: Duration,
    until: Instant,
}

impl Limit {
    pub(super) fn new(limit: Duration) -> Self {
        Self {
            limit,
            until: Instant::now() + limit,
        }
    }

    /// The time that is left.
    pub(super) fn left(self, what: &'static str) -> Result<Duration, VmmError> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let limit = self.limit;
            return Err(VmmError::Timeout { what, limit });
        }
        Ok(left)
    }
}

pub(super) struct Link(UnixStream);

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Link {
    pub(super) fn new(stream: UnixStream) -> Result<Self, VmmError> {
        stream
            .set_nonblocking(false)
            .map_err(|e| VmmError::io("cannot set up a connection", e))?;
        Ok(Self(stream))
    }

    pub(super) fn try_clone(&self) -> Result<Self, VmmError> {
        let stream = self.0.try_clone();
        stream
            .map(Self)
            .map_err(|e| VmmError::io("cannot clone a connection", e))
    }

    /// Ends the connection, and every wait on it.
    pub(super) fn shutdown(&self) {
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }

    /// Reads some bytes, and keeps the descriptors that came with them. Returns 0 at the end.
    fn read(
        &self,
        into: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        (what, limit): (&'static str, Option<Limit>),
    ) -> Result<usize, VmmError> {
        loop {
            let left = limit.map(|limit| limit.left(what)).transpose()?;
            let _ = self.0.set_read_timeout(left);
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
            match receive(&self.0, into, &mut space, fds) {
                Ok(got) => return Ok(got),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(0),
                Err(e) => return Err(VmmError::io("cannot read from Cloud Hypervisor", e)),
            }
        }
    }

    fn read_exact(
        &self,
        into: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        wait: (&'static str, Option<Limit>),
    ) -> Result<(), VmmError> {
        let mut got = 0;
        while got < into.len() {
            match self.read(&mut into[got..], fds, wait)? {
                0 => return Err(VmmError::Closed(wait.0)),
                more => got += more,
            }
        }
        Ok(())
    }

    /// Waits for a request of two headers' length at most. It stays in the socket. Returns its
    /// length, or `None` if the connection ended before it.
    pub(super) fn await_request(&self, what: &'static str) -> Result<Option<usize>, VmmError> {
        let mut bytes = [0; 2 * HEADER_BYTES];
        let mut due = HEADER_BYTES;
        loop {
            let got = self.peek(&mut bytes[..due])?;
            if got == due {
                let header = bytes.first_chunk().expect("two headers have one");
                let request = Request::decode(header)?;
                let whole = HEADER_BYTES + usize::try_from(request.length).unwrap_or(usize::MAX);
                if whole > bytes.len() {
                    return Err(VmmError::Order {
                        found: format!("{:?}", request.command),
                        expected: "PageFault",
                    });
                }
                if whole <= due {
                    return Ok(Some(whole));
                }
                due = whole;
            } else if self.has_ended()? {
                return if got == 0 {
                    Ok(None)
                } else {
                    Err(VmmError::Closed(what))
                };
            } else {
                // The rest is about to come: one write may be seen in parts.
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// Takes bytes that [`Self::await_request`] has seen, by one system call.
    pub(super) fn take(&self, into: &mut [u8]) -> Result<(), VmmError> {
        let length = into.len();
        match rustix::net::recv(&self.0, into, RecvFlags::DONTWAIT) {
            Ok((_, got)) if got == length => Ok(()),
            Ok(_) => Err(VmmError::Closed("name the page")),
            Err(e) => Err(VmmError::io("cannot read from Cloud Hypervisor", e)),
        }
    }

    /// Waits for some bytes, and leaves them in the socket. Returns 0 at the end.
    fn peek(&self, into: &mut [u8]) -> Result<usize, VmmError> {
        let _ = self.0.set_read_timeout(None);
        loop {
            match rustix::net::recv(&self.0, &mut *into, RecvFlags::PEEK) {
                Ok((_, got)) => return Ok(got),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(0),
                Err(e) => return Err(VmmError::io("cannot read from Cloud Hypervisor", e)),
            }
        }
    }

    /// Whether the other side has closed it.
    pub(super) fn has_ended(&self) -> Result<bool, VmmError> {
        let mut fds = [PollFd::new(&self.0, PollFlags::RDHUP)];
        let now = rustix::time::Timespec::default();
        match poll(&mut fds, Some(&now)) {
            Ok(_) => Ok(!fds[0].revents().is_empty()),
            Err(Errno::INTR) => Ok(false),
            Err(e) => Err(VmmError::io("cannot read from Cloud Hypervisor", e)),
        }
    }

    /// The next request, or `None` if the connection ended before it.
    pub(super) fn try_request(
        &self,
        what: &'static str,
        limit: Limit,
    ) -> Result<Option<Request>, VmmError> {
        let (mut bytes, mut fds) = ([0; HEADER_BYTES], Vec::new());
        let wait = (what, Some(limit));
        let got = self.read(&mut bytes, &mut fds, wait)?;
        if got == 0 {
            return Ok(None);
        }
        self.read_exact(&mut bytes[got..], &mut fds, wait)?;
        Ok(Some(Request::decode(&bytes)?))
    }

    pub(super) fn request(&self, what: &'static str, limit: Limit) -> Result<Request, VmmError> {
        let request = self.try_request(what, limit)?;
        request.ok_or(VmmError::Closed(what))
    }

    /// The payload of a request, whose length is bounded by its command.
    pub(super) fn payload(
        &self,
        request: Request,
        what: &'static str,
        limit: Limit,
    ) -> Result<Vec<u8>, VmmError> {
        let (mut bytes, mut fds) = (Vec::new(), Vec::new());
        while (bytes.len() as u64) < request.length {
            let start = bytes.len();
            let step = (request.length as usize - start).min(STEP.max(start));
            bytes.resize(start + step, 0);
            self.read_exact(&mut bytes[start..], &mut fds, (what, Some(limit)))?;
        }
        Ok(bytes)
    }

    /// The payload of MemoryFd: a slot and its memfd.
    pub(super) fn memory_fd(&self, limit: Limit) -> Result<(u32, OwnedFd), VmmError> {
        let (mut slot, mut fds) = ([0; 4], Vec::new());
        self.read_exact(&mut slot, &mut fds, ("send a memfd", Some(limit)))?;
        let slot = u32::from_le_bytes(slot);
        let found = fds.len();
        match (fds.pop(), found) {
            (Some(fd), 1) => Ok((slot, fd)),
            _ => Err(VmmError::Memfd {
                slot,
                why: format!("{found} descriptors came with it, expected 1"),
            }),
        }
    }

    pub(super) fn send(&self, bytes: &[u8], what: &'static str) -> Result<(), VmmError> {
        let sent = (&self.0).write_all(bytes);
        sent.map_err(|e| match e.kind() {
            std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset => {
                VmmError::Closed(what)
            }
            _ => VmmError::io(format!("cannot make Cloud Hypervisor {what}"), e),
        })
    }

    pub(super) fn answer(&self, status: Status) -> Result<(), VmmError> {
        self.send(&status.encode(), "take an answer")
    }

    /// Sends a request, without waiting for the response.
    pub(super) fn begin(
        &self,
        command: Command,
        payload: &[u8],
        what: &'static str,
        limit: Duration,
    ) -> Result<(), VmmError> {
        let _ = self.0.set_write_timeout(Some(limit));
        let mut bytes = Request::encode(command, payload.len() as u64).to_vec();
        bytes.extend_from_slice(payload);
        self.send(&bytes, what)
    }

    /// Sends a slot and its memfd, without waiting for the response.
    pub(super) fn begin_memory_fd(&self, slot: u32, fd: BorrowedFd<'_>) -> Result<(), VmmError> {
        const WHAT: &str = "take a memfd";
        // The receiver takes the descriptor with the slot.
        self.send(&Request::encode(Command::MemoryFd, 4), WHAT)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        match send(&self.0, &slot.to_le_bytes(), &mut space, &[fd]) {
            Ok(4) => Ok(()),
            Ok(_) => Err(VmmError::Closed(WHAT)),
            Err(e) => Err(VmmError::io("cannot send a memfd to Cloud Hypervisor", e)),
        }
    }

    /// Waits for the response that the request is carried out.
    pub(super) fn expect_ok(
        &self,
        what: &'static str,
        limit: impl Into<Option<Limit>>,
    ) -> Result<(), VmmError> {
        let mut bytes = [0; HEADER_BYTES];
        self.read_exact(&mut bytes, &mut Vec::new(), (what, limit.into()))?;
        Status::decode(&bytes)?.check(what)
    }

    /// As [`Self::expect_ok`] without a limit, but leaves the response in the socket.
    pub(super) fn await_ok(&self, what: &'static str) -> Result<(), VmmError> {
        let mut bytes = [0; HEADER_BYTES];
        while self.peek(&mut bytes)? < HEADER_BYTES {
            if self.has_ended()? {
                return Err(VmmError::Closed(what));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Status::decode(&bytes)?.check(what)
    }
}
