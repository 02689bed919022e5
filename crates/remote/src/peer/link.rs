//! A connection whose waits have a limit, with TLS or without.

use super::error::PeerError;
use super::wire::MAGIC;
use pageferry_transport::tls::{FirstBytes, Tls, TlsConfig, TlsError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::io::{self, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The encrypted bytes that are read at once: rustls alone takes 4 KiB.
const INBOUND_BYTES: usize = 64 << 10;
/// The time that a peer gets to read why it was refused.
const LINGER: Duration = Duration::from_secs(1);
/// The most bytes of it that are read meanwhile.
const LINGER_BYTES: u64 = 64 << 10;

/// The protection of connections.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Protection {
    /// Mutual TLS. Files are read anew for connections, so renewed certificates are used.
    Tls(Tls),
    /// None, within this host.
    Loopback,
    /// None. Anyone on the path can read the memory of VMs, and change it.
    Insecure,
}

impl Protection {
    /// Refuses plain TCP to another host, unless it is allowed.
    pub(crate) fn check(&self, address: SocketAddr) -> Result<(), PeerError> {
        match self {
            Self::Loopback if !address.ip().to_canonical().is_loopback() => {
                Err(PeerError::Plain(address))
            }
            _ => Ok(()),
        }
    }

    /// Reads the certificates.
    pub(crate) fn load(&self) -> Result<Option<TlsConfig>, TlsError> {
        match self {
            Self::Tls(tls) => tls.load().map(Some),
            Self::Loopback | Self::Insecure => Ok(None),
        }
    }
}

/// A connection. Errors of its reads and writes have a [`TlsError`] inside if TLS failed.
pub(crate) struct Link {
    tls: Option<Box<rustls::Connection>>,
    socket: Buffered,
}

impl Link {
    /// The side that dialled `host`, behind the TLS handshake.
    pub(crate) fn client(
        socket: Arc<TcpStream>,
        tls: Option<&TlsConfig>,
        host: &str,
        until: Instant,
    ) -> Result<Self, PeerError> {
        let tls = tls.map(|tls| tls.client(Some(host))).transpose()?;
        Self::new(socket, tls, until)
    }

    /// The side that listens, behind the TLS handshake.
    pub(crate) fn server(
        socket: Arc<TcpStream>,
        tls: Option<&TlsConfig>,
        until: Instant,
    ) -> Result<Self, PeerError> {
        let tls = tls.map(TlsConfig::server).transpose()?;
        Self::new(socket, tls, until)
    }

    fn new(
        socket: Arc<TcpStream>,
        tls: Option<rustls::Connection>,
        until: Instant,
    ) -> Result<Self, PeerError> {
        socket.set_nodelay(true)?;
        let timed = Timed {
            socket,
            until,
            first: None,
        };
        let mut link = Self {
            tls: tls.map(Box::new),
            socket: Buffered(BufReader::with_capacity(INBOUND_BYTES, timed)),
        };
        while link.tls.as_ref().is_some_and(|tls| tls.is_handshaking()) {
            if let Err(why) = link.advance() {
                let why = match why.kind() {
                    io::ErrorKind::UnexpectedEof => TlsError::Ended.into(),
                    _ => PeerError::from(why),
                };
                link.linger();
                return Err(why);
            }
        }
        Ok(link)
    }

    /// Lets the peer read the last words, which a closed socket would take from it.
    pub(crate) fn linger(&mut self) {
        let _ = self.flush();
        let timed = self.socket.timed();
        timed.until = Instant::now() + LINGER;
        if timed.socket.shutdown(Shutdown::Write).is_ok() {
            let _ = io::copy(&mut timed.take(LINGER_BYTES), &mut io::sink());
        }
    }

    /// All reads and writes end by then.
    pub(crate) fn limit(&mut self, until: Instant) {
        self.socket.timed().until = until;
    }

    /// Lets TLS take and give encrypted bytes. Returns the bytes that came.
    fn advance(&mut self) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else {
            return Ok(0);
        };
        match tls.complete_io(&mut self.socket) {
            Ok((came, _)) => Ok(came),
            Err(error) => match error.downcast::<rustls::Error>() {
                Ok(error) => {
                    let first = self.socket.timed().first;
                    let first = first.unwrap_or_else(|| FirstBytes::new(&[]));
                    let why = TlsError::from_rustls(error, first);
                    Err(io::Error::other(match why {
                        TlsError::NotTls(first) if first.as_slice() == MAGIC => {
                            TlsError::PeerIsPlain
                        }
                        why => why,
                    }))
                }
                Err(error) => Err(error),
            },
        }
    }
}

impl Read for Link {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let Some(tls) = &mut self.tls else {
                return self.socket.read(buffer);
            };
            match tls.reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.advance()?;
                }
                result => return result,
            }
        }
    }
}

impl Write for Link {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else {
            return self.socket.write(bytes);
        };
        let taken = tls.writer().write(bytes)?;
        self.flush()?;
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        while let Some(tls) = &mut self.tls
            && tls.wants_write()
        {
            tls.write_tls(&mut self.socket)?;
        }
        Ok(())
    }
}

/// The socket, with a buffer for reads.
struct Buffered(BufReader<Timed>);

impl Buffered {
    fn timed(&mut self) -> &mut Timed {
        self.0.get_mut()
    }
}

impl Read for Buffered {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Buffered {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.timed().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A socket that waits until a time.
struct Timed {
    socket: Arc<TcpStream>,
    until: Instant,
    first: Option<FirstBytes>,
}

impl Timed {
    fn wait(&self, events: PollFlags) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
        match poll(&mut [PollFd::new(&*self.socket, events)], Some(&left)) {
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match recv(&*self.socket, &mut *buffer, RecvFlags::DONTWAIT) {
                Ok((_, len)) => {
                    self.first
                        .get_or_insert_with(|| FirstBytes::new(&buffer[..len]));
                    return Ok(len);
                }
                Err(Errno::AGAIN) => self.wait(PollFlags::IN)?,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match send(
                &*self.socket,
                bytes,
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            ) {
                Ok(len) => return Ok(len),
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link")
            .field("socket", &self.socket.0.get_ref().socket)
            .field("tls", &self.tls.is_some())
            .finish_non_exhaustive()
    }
}
