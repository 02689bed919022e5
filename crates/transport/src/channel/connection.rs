#![expect(
    unsafe_code,
    reason = "passes on the contracts of receiving into memory given by address"
)]
//! One connection to the peer: its socket, and reading.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, Shutdown, sockopt};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::raw::{Cursor, RawSlice};
use super::tls::Session;
use super::wait::Waiter;
use super::{ChannelError, Origin, Wait};
use crate::wire::WireError;

/// A connected stream socket, TCP or unix, with TLS or without.
///
/// All methods take `&self`: one thread may read while another writes. Callers must not let two
/// threads read at once, nor write at once.
#[derive(Debug)]
pub struct Connection {
    pub(super) socket: OwnedFd,
    peer: String,
    origin: Origin,
    local: bool,
    /// The protocol version that both sides speak. 0 before the handshake is over.
    pub(crate) version: u16,
    /// The name that TLS checks, if one was asked for.
    pub(super) checked_name: Option<String>,
    /// The lock is held for one step of [`Session`], which never waits.
    pub(super) tls: Option<Box<Mutex<Session>>>,
}

impl Connection {
    /// Wraps a connected stream socket. `tcp` sets TCP_NODELAY on it.
    pub(super) fn adopt(socket: OwnedFd, peer: String, tcp: bool) -> io::Result<Self> {
        if tcp {
            sockopt::set_tcp_nodelay(&socket, true)?;
        }
        let address = peer_address(&socket).filter(|_| tcp).map(|peer| peer.ip());
        let local = !tcp || address.is_some_and(is_loopback);
        Ok(Self {
            socket,
            peer,
            origin: Origin::new(address),
            local,
            version: 0,
            checked_name: None,
            tls: None,
        })
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

    /// The host of the peer, for shares of places.
    #[must_use]
    pub const fn origin(&self) -> Origin {
        self.origin
    }

    /// The protocol version that both sides speak. 0 before the handshake is over.
    #[must_use]
    pub const fn version(&self) -> u16 {
        self.version
    }

    /// Whether the peer is on this host: it has a unix socket or a loopback address.
    #[must_use]
    pub const fn is_local(&self) -> bool {
        self.local
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
        if let Some(mut session) = self.session() {
            session.close_write(self.socket.as_fd());
        }
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
            let moved = unsafe { self.receive(&mut cursor) };
            if self.handle_result(moved, &mut waiter, wait)? == Some(0) {
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
            match unsafe { self.receive(&mut cursor) } {
                Ok(0) => return Err(ChannelError::Closed { what }),
                Ok(bytes) => return Ok(Some(bytes)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(ChannelError::from_io(what, error)),
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
        loop {
            match self.peek() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    waiter.wait(self.socket.as_fd(), PollFlags::IN)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => return Ok(()),
            }
        }
    }

    /// Whether [`recv_pending`](Self::recv_pending) may return bytes that poll(2) does not see,
    /// since they have left the socket. A caller that polls the descriptor must ask this first.
    /// Always false without TLS.
    #[must_use]
    pub fn has_pending(&self) -> bool {
        self.session().is_some_and(|session| session.has_pending())
    }

    /// Whether bytes have arrived that no receive has taken, or the connection has ended.
    pub fn has_unread(&self) -> bool {
        let mut fds = [PollFd::new(self, PollFlags::IN)];
        self.has_pending() || poll(&mut fds, Some(&Timespec::default())).is_ok_and(|n| n > 0)
    }

    /// Whether the peer's kernel has not confirmed all bytes that the socket has taken.
    pub(crate) fn has_unacknowledged(&self) -> bool {
        super::raw::unacknowledged(self.socket.as_fd()) > 0
    }

    /// Returns an error of the kind `WouldBlock` if a read would return no bytes and no error.
    fn peek(&self) -> io::Result<()> {
        if let Some(mut session) = self.session() {
            return session.look(self.socket.as_fd());
        }
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        rustix::net::recv(&self.socket, &mut [0; 1], flags)?;
        Ok(())
    }

    /// Receives the bytes that have arrived into the pieces, without waiting. Returns 0 if the peer
    /// closed.
    ///
    /// # Safety
    /// As in [`read_exact_raw`](Self::read_exact_raw).
    unsafe fn receive(&self, cursor: &mut Cursor<'_>) -> io::Result<usize> {
        let fd = self.socket.as_fd();
        match self.session() {
            // SAFETY: the caller's contract is that of `Cursor::receive`.
            None => unsafe { cursor.receive(fd) },
            // SAFETY: the caller's contract is that of `Session::receive`.
            Some(mut session) => unsafe { session.receive(fd, cursor) },
        }
    }

    /// Locks the TLS state, if there is one.
    pub(super) fn session(&self) -> Option<MutexGuard<'_, Session>> {
        // No step leaves a half-changed state behind if it panics: the connection then only fails.
        let tls = self.tls.as_ref()?;
        Some(tls.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Handles a read's result. Returns the bytes moved (0 if the peer closed), or `None` after a
    /// wait.
    fn handle_result(
        &self,
        moved: io::Result<usize>,
        waiter: &mut Waiter<'_>,
        wait: &Wait<'_>,
    ) -> Result<Option<usize>, ChannelError> {
        match moved {
            Ok(bytes) => {
                waiter.progressed();
                Ok(Some(bytes))
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                waiter.wait(self.socket.as_fd(), PollFlags::IN)?;
                Ok(None)
            }
            Err(error) => Err(ChannelError::from_io(wait.what, error)),
        }
    }
}

/// Returns the address of a TCP socket's peer.
pub(super) fn peer_address(socket: &OwnedFd) -> Option<SocketAddr> {
    let peer = rustix::net::getpeername(socket).ok().flatten()?;
    SocketAddr::try_from(peer).ok()
}

/// Whether an address is of this host only. An IPv4 address may be written as an IPv6 one.
pub(super) const fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
