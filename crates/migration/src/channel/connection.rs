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
/// All methods take `&self`: one thread may read while another writes. Callers must not let two
/// threads read at once, nor write at once. Only [`send_small`](Self::send_small) may run in
/// several threads.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    peer: String,
}

impl Connection {
    /// Wraps a connected stream socket. `tcp` sets TCP_NODELAY on it.
    pub(super) fn adopt(socket: OwnedFd, peer: String, tcp: bool) -> io::Result<Self> {
        if tcp {
            sockopt::set_tcp_nodelay(&socket, true)?;
        }
        Ok(Self { socket, peer })
    }

    /// Returns two connected unix sockets of this process.
    ///
    /// # Errors
    /// The kernel's error if no descriptors are left.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = std::os::unix::net::UnixStream::pair()?;
        let name = || "this process".to_owned();
        Ok((
            Self::adopt(a.into(), name(), false)?,
            Self::adopt(b.into(), name(), false)?,
        ))
    }

    /// The address of the peer, for people.
    #[must_use]
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Requests socket buffers of these sizes in bytes. The kernel doubles them. Above its limits
    /// (`net.core.wmem_max`, `rmem_max`) it silently grants less.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_buffers(&self, send: Option<usize>, receive: Option<usize>) -> io::Result<()> {
        if let Some(bytes) = send {
            sockopt::set_socket_send_buffer_size(&self.socket, bytes)?;
        }
        if let Some(bytes) = receive {
            sockopt::set_socket_recv_buffer_size(&self.socket, bytes)?;
        }
        Ok(())
    }

    /// Ends the connection in both directions. A thread that waits in another method returns with
    /// an error. Has no effect on a connection that has ended.
    pub fn shutdown(&self) {
        // ENOTCONN is the only possible error: the connection has ended already.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }

    /// Ends the sending direction. The kernel still delivers earlier bytes, and reading continues.
    pub fn shutdown_write(&self) {
        // As in `shutdown`.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
    }

    /// Fills `buf`.
    ///
    /// # Errors
    /// [`ChannelError::Closed`] if the peer closed before the first byte, [`WireError::Truncated`]
    /// if after it. Also `TimedOut`, `Interrupted`, `Lost`.
    pub fn read_exact(&self, buf: &mut [u8], wait: &Wait<'_>) -> Result<(), ChannelError> {
        // SAFETY: `buf` is borrowed exclusively for the whole call.
        unsafe { self.read_exact_raw(&[RawSlice::of_mut(buf)], wait) }
    }

    /// Fills all pieces, in order.
    ///
    /// # Errors
    /// Those of [`read_exact`](Self::read_exact). Some pieces may be filled then.
    ///
    /// # Safety
    /// From the call to its return:
    /// 1. Each piece is mapped, writable memory, and stays mapped.
    /// 2. Nothing else reads or writes it. A guest's vCPUs count as readers.
    /// 3. No reference to it exists.
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
            if self.handle_result(moved, &mut waiter, wait, PollFlags::IN)? == Some(0) {
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

    /// Receives the bytes that have arrived, at most `buf`'s length, without waiting. Returns
    /// `None` if there are none.
    ///
    /// # Errors
    /// [`ChannelError::Closed`] if the peer closed, [`ChannelError::Lost`].
    ///
    /// # Panics
    /// If `buf` is empty: a receive of no bytes means that the peer closed.
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

    /// Waits until [`recv_pending`](Self::recv_pending) returns bytes or an error. May return
    /// early.
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
    /// `TimedOut`, `Interrupted` (some bytes may have been sent), `Lost`.
    pub fn write_all(&self, bytes: &[u8], wait: &Wait<'_>) -> Result<(), ChannelError> {
        // SAFETY: `bytes` is borrowed for the whole call.
        unsafe { self.write_all_raw(&[RawSlice::of(bytes)], wait) }
    }

    /// Sends all slices, in order.
    ///
    /// # Errors
    /// Those of [`write_all`](Self::write_all).
    pub fn write_all_vectored(
        &self,
        slices: &[IoSlice<'_>],
        wait: &Wait<'_>,
    ) -> Result<(), ChannelError> {
        // SAFETY: the slices are borrowed for the whole call.
        unsafe { self.write_all_raw(of_io_slices(slices), wait) }
    }

    /// Sends all pieces in order, without copying them first.
    ///
    /// # Errors
    /// Those of [`write_all`](Self::write_all).
    ///
    /// # Safety
    /// Each piece is mapped, readable memory and stays mapped until the call returns. Other threads
    /// may write it meanwhile. The peer then receives a mixture of old and new bytes, which fits no
    /// checksum.
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
            self.handle_result(moved, &mut waiter, wait, PollFlags::OUT)?;
        }
        Ok(())
    }

    /// Sends a small message in one system call. Several threads may send at once without a lock.
    /// The kernel takes the whole message, or nothing of it if its buffer is full. Then this waits
    /// and retries.
    ///
    /// TCP does not guarantee this for any length. It cuts a small message only if the buffer fills
    /// up within it. Then this shuts the connection down, so that the peer never misreads the rest.
    ///
    /// # Errors
    /// [`ChannelError::Torn`] in that case, `TimedOut`, `Interrupted`, `Lost`.
    pub fn send_small(&self, bytes: &[u8], wait: &Wait<'_>) -> Result<(), ChannelError> {
        let pieces = [RawSlice::of(bytes)];
        let mut waiter = Waiter::new(wait);
        loop {
            let mut cursor = Cursor::new(&pieces);
            // SAFETY: `bytes` is borrowed for the whole call.
            let moved = unsafe { cursor.send(self.socket.as_fd()) };
            match self.handle_result(moved, &mut waiter, wait, PollFlags::OUT)? {
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

    /// Handles a call's result. Returns the bytes moved (0 if the peer closed), or `None` after a
    /// wait.
    fn handle_result(
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
