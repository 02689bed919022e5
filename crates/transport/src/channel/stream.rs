//! A connection as a stream of bytes, whose waits have one end.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{ChannelError, Connection, Wait};

/// The time that a peer gets to read the last words.
const LINGER: Duration = Duration::from_secs(1);
/// The most bytes of it that are read meanwhile.
const LINGER_BYTES: u64 = 64 << 10;

/// A connection for code that reads and writes. All calls end by a common time. An error has a
/// [`TlsError`](super::TlsError) inside if TLS failed.
///
/// Writes are not buffered: each is sent before it returns.
#[derive(Debug)]
pub struct Stream {
    connection: Arc<Connection>,
    until: Instant,
    all: Duration,
}

impl Stream {
    /// A stream whose calls end within `limit` from now.
    #[must_use]
    pub fn new(connection: Arc<Connection>, limit: Duration) -> Self {
        Self {
            connection,
            until: Instant::now() + limit,
            all: limit,
        }
    }

    /// All later calls end within `limit` from now.
    pub fn limit(&mut self, limit: Duration) {
        (self.until, self.all) = (Instant::now() + limit, limit);
    }

    /// The connection.
    #[must_use]
    pub fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Lets the peer read the last words for a second: closing with unread bytes would take them
    /// from it.
    pub fn linger(&mut self) {
        self.connection.shutdown_write();
        self.limit(LINGER);
        let _ = io::copy(&mut self.take(LINGER_BYTES), &mut io::sink());
    }

    fn wait(&self, what: &'static str) -> Wait<'static> {
        Wait::block(what).until(self.until, self.all)
    }
}

fn error(error: ChannelError) -> io::Error {
    match error {
        ChannelError::TimedOut { .. } => io::ErrorKind::TimedOut.into(),
        ChannelError::Lost { source, .. } => source,
        ChannelError::Tls(why) => io::Error::other(why),
        other => io::Error::other(other),
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            match self.connection.recv_pending(buffer, "bytes") {
                Ok(Some(got)) => return Ok(got),
                Ok(None) => {
                    let wait = self.wait("bytes");
                    self.connection.wait_readable(&wait).map_err(error)?;
                }
                Err(ChannelError::Closed { .. }) => return Ok(0),
                Err(other) => return Err(error(other)),
            }
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let wait = self.wait("bytes");
        self.connection.write_all(bytes, &wait).map_err(error)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_ends_by_its_time_or_its_peer() {
        let (ours, theirs) = Connection::pair().unwrap();
        let limit = Duration::from_millis(50);
        let mut stream = Stream::new(Arc::new(ours), limit);
        let began = Instant::now();
        let why = stream.read(&mut [0; 8]).unwrap_err();
        assert_eq!(why.kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() >= limit);
        // More than the socket holds: bytes that move do not postpone the end.
        stream.limit(limit);
        let why = stream.write_all(&vec![0; 16 << 20]).unwrap_err();
        assert_eq!(why.kind(), io::ErrorKind::TimedOut);
        stream.limit(Duration::from_secs(60));
        theirs.write_all(b"end", &Wait::block("end")).unwrap();
        drop(theirs);
        let mut rest = Vec::new();
        // The bytes that it did not read make the kernel reset the connection.
        let _ = stream.read_to_end(&mut rest);
        assert_eq!(rest, b"end");
    }
}
