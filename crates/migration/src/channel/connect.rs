//! Opens connections, with a limit and an interruption.

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with, sockopt};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use super::connection::is_loopback;
use super::wait::Waiter;
use super::{ChannelError, Connection, OpenError, Wait};
use crate::address::Address;

/// The pause between two attempts to connect to a unix listener whose queue is full.
const QUEUE_FULL_PAUSE: Duration = Duration::from_millis(5);

impl Connection {
    /// Connects to `address`. Tries all addresses of a host in turn, each with the whole limit.
    ///
    /// The name resolver has its own limits (resolv.conf(5)), and `stop` does not interrupt it.
    ///
    /// # Errors
    /// [`ChannelError::Open`] (of the last address tried), `TimedOut`, `Interrupted`.
    pub fn connect(address: &Address, wait: &Wait<'_>) -> Result<Self, ChannelError> {
        match address {
            Address::Unix(path) => connect_unix(address, path, wait),
            Address::Tcp { host, port } => {
                if *port == 0 {
                    let address = address.clone();
                    return Err(OpenError::PortZero { address }.into());
                }
                let mut failure = None;
                for resolved in resolve(host, *port)? {
                    match connect_tcp(address, resolved, wait) {
                        Err(error @ ChannelError::Interrupted { .. }) => return Err(error),
                        Err(error) => failure = Some(error),
                        connected => return connected,
                    }
                }
                Err(failure.expect("a host that was found has an address"))
            }
        }
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

/// Returns the addresses of a host, at least one.
pub(super) fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, OpenError> {
    let unresolved = |source| OpenError::Unresolved {
        host: host.to_owned(),
        source,
    };
    let found: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(unresolved)?
        .collect();
    if found.is_empty() {
        return Err(unresolved(std::io::Error::other("the host has no address")));
    }
    Ok(found)
}

/// Opens a non-blocking stream socket that no child inherits.
pub(super) fn stream_socket(family: AddressFamily) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(family, SocketType::STREAM, flags, None)
}

fn connect_tcp(
    address: &Address,
    resolved: SocketAddr,
    wait: &Wait<'_>,
) -> Result<Connection, ChannelError> {
    let family = match resolved {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let failed = |errno: Errno| OpenError::from_os(address, errno.into());
    let socket = stream_socket(family).map_err(failed)?;
    match rustix::net::connect(&socket, &resolved) {
        Ok(()) => {}
        // The kernel completes an interrupted connect in the background (connect(2)).
        Err(Errno::INPROGRESS | Errno::INTR) => finish(&socket, wait, failed)?,
        Err(errno) => return Err(failed(errno).into()),
    }
    Ok(Connection::adopt(socket, resolved.to_string(), true)
        .map_err(|source| OpenError::from_os(address, source))?)
}

/// Waits for the end of a connect in progress.
fn finish(
    socket: &OwnedFd,
    wait: &Wait<'_>,
    failed: impl Fn(Errno) -> OpenError,
) -> Result<(), ChannelError> {
    let mut waiter = Waiter::new(wait);
    loop {
        waiter.wait(socket.as_fd(), PollFlags::OUT)?;
        match sockopt::socket_error(socket).map_err(&failed)? {
            Err(errno) => return Err(failed(errno).into()),
            Ok(()) if rustix::net::getpeername(socket).is_ok() => return Ok(()),
            Ok(()) => {}
        }
    }
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
