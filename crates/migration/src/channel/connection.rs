#![expect(
    unsafe_code,
    reason = "passes on the contracts of sending from and receiving into memory given by address"
)]
//! One connection to the peer.

use rustix::event::PollFlags;
use rustix::net::{Shutdown, sockopt};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::raw::{Cursor, RawSlice, of_io_slices};
use super::wait::Waiter;
use super::{ChannelError, Wait};
use crate::wire::WireError;

/// A connected stream socket, TCP or unix.
///
/// All methods take `&self`: one thread may read while another writes. Two readers, or two writers
/// of anything but [`send_small`](Self::send_small), would mix their bytes: that is their callers'
/// affair.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    peer: String,
}

impl Connection {
    /// Takes over a connected stream socket; `tcp` sets TCP_NODELAY on it.
    pub(super) fn adopt(socket: OwnedFd, peer: String, tcp: bool) -> io::Result<Self> {
        if tcp {
            sockopt::set_tcp_nodelay(&socket, true)?;
        }
        Ok(Self { socket, peer })
    }

    /// Two connected unix sockets of this process.
    ///
    /// # Errors
    /// What the kernel says if it has no descriptors left.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = std::os::unix::net::UnixStream::pair()?;
        let name = || "this process".to_owned();
        Ok((
            Self::adopt(a.into(), name(), false)?,
            Self::adopt(b.into(), name(), false)?,
        ))
    }

    /// Who is at the other end, for people.
    #[must_use]
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Asks for socket buffers of these sizes in bytes; the kernel doubles them and has its own
    /// limits (`net.core.wmem_max`, `rmem_max`), above which it silently grants less.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn set_buffers(&self, send: Option<usize>, receive: Option<usize>) -> io::Result<()> {
        if let Some(bytes) = send {
            sockopt::set_socket_send_buffer_size(&self.socket, bytes)?;
        }
        if let Some(bytes) = receive {
            sockopt::set_socket_recv_buffer_size(&self.socket, bytes)?;
        }
        Ok(())
    }

    /// Ends the connection in both directions. Whoever waits in another method, in any thread,
    /// returns with an error. Has no effect on a connection that has ended.
    pub fn shutdown(&self) {
        // ENOTCONN is the only answer that can come, and means that there is nothing to end.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }

    /// Says that nothing more will be sent; what was sent is still delivered, and reading goes on.
    pub fn shutdown_write(&self) {
        // As above.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
    }

    /// Fills `buf`.
    ///
    /// # Errors
    /// [`ChannelError::Closed`] if the peer ended before the first byte, [`WireError::Truncated`]
    /// if after it; `TimedOut`, `Interrupted`, `Lost`.
    pub fn read_exact(&self, buf: &mut [u8], wait: &Wait<'_>) -> Result<(), ChannelError> {
        // SAFETY: `buf` is borrowed exclusively for the whole call.
        unsafe { self.read_exact_raw(&[RawSlice::of_mut(buf)], wait) }
    }

    /// Fills all pieces, in order.
    ///
    /// # Errors
    /// As [`read_exact`](Self::read_exact). Some pieces may have been filled by then.
    ///
    /// # Safety
    /// Each piece is mapped, writable memory, and from the call to its return nobody else reads or
    /// writes it, no reference to it exists, and it stays mapped. A guest's vCPUs count as readers.
    pub unsafe fn read_exact_raw(
        &self,
        pieces: &[RawSlice],
        wait: &Wait<'_>,
    ) -> Result<(), ChannelError> {
        let mut cursor = Cursor::new(pieces);
        let needed = cursor.left();
        let mut waiter = Waiter::new(wait);
        while cursor.left() > 0 {
            // SAFETY: the caller's contract is that of `receive`.
            let moved = unsafe { cursor.receive(self.socket.as_fd()) };
            if self.settle(moved, &mut waiter, wait, PollFlags::IN)? == Some(0) {
                let got = needed - cursor.left();
                return Err(match got {
                    0 if !wait.mid_message => ChannelError::Closed { what: wait.what },
                    _ => ChannelError::Wire(WireError::Truncated {
                        what: wait.what,
                        needed: needed as u64,
                        got: got as u64,
                    }),
                });
            }
        }
        Ok(())
    }

    /// Receives what has come already, at most `buf`'s length, without waiting; `None` if nothing
    /// has.
    ///
    /// # Errors
    /// [`ChannelError::Closed`] if the peer ended, [`ChannelError::Lost`].
    ///
    /// # Panics
    /// If `buf` is empty: nothing received would look like the peer's end.
    pub fn recv_pending(
        &self,
        buf: &mut [u8],
        what: &'static str,
    ) -> Result<Option<usize>, ChannelError> {
        assert!(!buf.is_empty(), "there is room for at least one byte");
        let pieces = [RawSlice::of_mut(buf)];
        let mut cursor = Cursor::new(&pieces);
        loop {
            // SAFETY: `buf` is borrowed exclusively for the whole call.
            match unsafe { cursor.receive(self.socket.as_fd()) } {
                Ok(0) => return Err(ChannelError::Closed { what }),
                Ok(bytes) => return Ok(Some(bytes)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(ChannelError::Lost { what, source }),
            }
        }
    }

    /// Waits until [`recv_pending`](Self::recv_pending) has something to say: bytes, an end, or an
    /// error. May return early.
    ///
    /// # Errors
    /// `TimedOut`, `Interrupted`, `Lost`.
    pub fn wait_readable(&self, wait: &Wait<'_>) -> Result<(), ChannelError> {
        let mut waiter = Waiter::new(wait);
        let mut byte = [0];
        loop {
            let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
            let peeked = rustix::net::recv(&self.socket, &mut byte, flags);
            match peeked.map_err(io::Error::from) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    waiter.wait(self.socket.as_fd(), PollFlags::IN)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => return Ok(()),
            }
        }
    }

    /// Sends all of `bytes`.
    ///
    /// # Errors
    /// `TimedOut`, `Interrupted` (some bytes may be sent by then), `Lost`.
    pub fn write_all(&self, bytes: &[u8], wait: &Wait<'_>) -> Result<(), ChannelError> {
        // SAFETY: `bytes` is borrowed for the whole call.
        unsafe { self.write_all_raw(&[RawSlice::of(bytes)], wait) }
    }

    /// Sends all slices, in order.
    ///
    /// # Errors
    /// As [`write_all`](Self::write_all).
    pub fn write_all_vectored(
        &self,
        slices: &[IoSlice<'_>],
        wait: &Wait<'_>,
    ) -> Result<(), ChannelError> {
        // SAFETY: the slices are borrowed for the whole call.
        unsafe { self.write_all_raw(of_io_slices(slices), wait) }
    }

    /// Sends all pieces, in order, from where they lie.
    ///
    /// # Errors
    /// As [`write_all`](Self::write_all).
    ///
    /// # Safety
    /// Each piece is mapped, readable memory and stays mapped until the call returns. Others may
    /// write it meanwhile: then the peer receives some mixture of old and new bytes, which no
    /// checksum computed before or after will fit.
    pub unsafe fn write_all_raw(
        &self,
        pieces: &[RawSlice],
        wait: &Wait<'_>,
    ) -> Result<(), ChannelError> {
        let mut cursor = Cursor::new(pieces);
        let mut waiter = Waiter::new(wait);
        while cursor.left() > 0 {
            // SAFETY: the caller's contract is that of `send`.
            let moved = unsafe { cursor.send(self.socket.as_fd()) };
            self.settle(moved, &mut waiter, wait, PollFlags::OUT)?;
        }
        Ok(())
    }

    /// Sends a small message in one call, so that several threads may do so at once without a lock:
    /// the kernel takes it whole, or (its buffer full) not at all, and then this waits and
    /// tries again.
    ///
    /// On TCP the kernel promises that for no length; a message of some bytes is cut only if the
    /// buffer fills up within it. Then the connection is shut down, so that nothing misplaced
    /// is ever understood.
    ///
    /// # Errors
    /// [`ChannelError::Torn`] in that case; `TimedOut`, `Interrupted`, `Lost`.
    pub fn send_small(&self, bytes: &[u8], wait: &Wait<'_>) -> Result<(), ChannelError> {
        let pieces = [RawSlice::of(bytes)];
        let mut waiter = Waiter::new(wait);
        loop {
            let mut cursor = Cursor::new(&pieces);
            // SAFETY: `bytes` is borrowed for the whole call.
            let moved = unsafe { cursor.send(self.socket.as_fd()) };
            match self.settle(moved, &mut waiter, wait, PollFlags::OUT)? {
                None => {}
                Some(sent) if sent == bytes.len() => return Ok(()),
                Some(sent) => {
                    self.shutdown();
                    return Err(ChannelError::Torn {
                        what: wait.what,
                        sent,
                        len: bytes.len(),
                    });
                }
            }
        }
    }

    /// What a call's result means: bytes moved (0 is the peer's end), or `None` after a wait.
    fn settle(
        &self,
        moved: io::Result<usize>,
        waiter: &mut Waiter<'_>,
        wait: &Wait<'_>,
        events: PollFlags,
    ) -> Result<Option<usize>, ChannelError> {
        match moved {
            Ok(bytes) => {
                waiter.progressed();
                Ok(Some(bytes))
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                waiter.wait(self.socket.as_fd(), events)?;
                Ok(None)
            }
            Err(source) => Err(ChannelError::Lost {
                what: wait.what,
                source,
            }),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
