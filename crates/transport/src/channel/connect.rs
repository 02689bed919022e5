//! Opens connections, with a limit and an interruption.

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use super::connection::{is_loopback, peer_address};
use super::names::{name_of, resolve};
use super::{ChannelError, Connection, OpenError, Wait, race, raw};
use crate::address::Address;

/// The pause between two attempts to connect to a unix listener whose queue is full.
const QUEUE_FULL_PAUSE: Duration = Duration::from_millis(5);
/// The most data of one packet: what a jumbo frame of Ethernet (9000 bytes) has at most. Without a
/// bound, a path of a larger MTU would carry some packets that no handshake has tried: a connection
/// begins with smaller ones than it has later.
pub(crate) const MAX_SEGMENT: u16 = 9000 - 40;
/// A handshake sends at least one packet as large as any later one.
const _: () = assert!(MAX_SEGMENT as usize <= crate::wire::PATH_CHECK_BYTES);

impl Connection {
    /// Connects to `address`. A host may have several addresses: attempts at them begin 250 ms
    /// apart, and the first that succeeds counts. Each has the whole limit.
    ///
    /// The name resolver has its own limits (resolv.conf(5)), which `wait` does not shorten.
    ///
    /// # Errors
    /// [`ChannelError::Open`] (a refusal, if an address refused), `Interrupted`. For a unix socket
    /// `TimedOut` too.
    pub fn connect(address: &Address, wait: &Wait<'_>) -> Result<Self, ChannelError> {
        Self::connect_preferring(address, None, wait)
    }

    /// As [`connect`](Self::connect), with `worked` before all other addresses of the host.
    ///
    /// # Errors
    /// As for [`connect`](Self::connect).
    pub fn connect_preferring(
        address: &Address,
        worked: Option<SocketAddr>,
        wait: &Wait<'_>,
    ) -> Result<Self, ChannelError> {
        match address {
            Address::Unix(path) => connect_unix(address, path, wait),
            Address::Tcp { host, port } => {
                if *port == 0 {
                    let address = address.clone();
                    return Err(OpenError::PortZero { address }.into());
                }
                let (socket, found) = race::connect(address, (host, *port), worked, wait)?;
                Ok(Self::adopt(socket, name_of(found), true)
                    .map_err(|source| OpenError::from_os(address, source))?)
            }
        }
    }

    /// The address of a TCP peer.
    #[must_use]
    pub fn tcp_peer(&self) -> Option<SocketAddr> {
        peer_address(&self.socket)
    }
}

/// Whether `address` is on this host: a unix socket, or a host whose addresses are all loopback.
///
/// # Errors
/// [`OpenError::Unresolved`].
pub fn is_local(address: &Address) -> Result<bool, OpenError> {
    match address {
        Address::Unix(_) => Ok(true),
        Address::Tcp { host, port } => {
            let found = resolve(host, *port)?;
            Ok(found.iter().all(|found| is_loopback(found.ip())))
        }
    }
}

/// Opens a non-blocking stream socket that no child inherits. The packets of a TCP socket are
/// bounded.
pub(super) fn stream_socket(family: AddressFamily) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    if family != AddressFamily::UNIX {
        bound_packets(&socket);
    }
    Ok(socket)
}

/// Bounds the packets of a connection to [`MAX_SEGMENT`], in both directions.
pub(super) fn bound_packets(socket: &OwnedFd) {
    // A kernel, or a stream protocol of this family, without the option sends what it likes.
    let _ = raw::limit_segments(socket.as_fd(), MAX_SEGMENT);
}

fn connect_unix(
    address: &Address,
    path: &Path,
    wait: &Wait<'_>,
) -> Result<Connection, ChannelError> {
    let failed = |errno: Errno| OpenError::from_os(address, errno.into());
    let name = SocketAddrUnix::new(path).map_err(failed)?;
    let socket = stream_socket(AddressFamily::UNIX).map_err(failed)?;
    let started = Instant::now();
    loop {
        match rustix::net::connect(&socket, &name) {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            // The listener's queue is full. The kernel has no event for free room in it (unix(7)).
            Err(Errno::AGAIN) => std::thread::sleep(QUEUE_FULL_PAUSE),
            Err(errno) => return Err(failed(errno).into()),
        }
        if wait.stop.is_some_and(|stop| stop()) {
            return Err(ChannelError::Interrupted { what: wait.what });
        }
        if let Some(after) = wait.limit.filter(|limit| started.elapsed() >= *limit) {
            let what = wait.what;
            return Err(ChannelError::TimedOut { what, after });
        }
    }
    Ok(Connection::adopt(socket, address.to_string(), false)
        .map_err(|source| OpenError::from_os(address, source))?)
}
