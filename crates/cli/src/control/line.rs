//! Lines of bounded length from a socket that may be slow, hostile or gone.

use std::io::{ErrorKind, Read};

/// The reason why there is no line.
#[derive(Debug)]
pub(crate) enum NoLine {
    /// The peer closed the connection between two lines.
    Closed,
    /// The peer closed the connection within a line.
    CutOff,
    /// The line is too long. The connection is of no further use.
    TooLong,
    /// The caller's `stop` held.
    Stopped,
    /// The connection failed.
    Io(std::io::Error),
}

/// Cuts a stream of bytes into lines.
#[derive(Debug)]
pub(crate) struct LineReader<S> {
    stream: S,
    buffer: Vec<u8>,
    /// The number of bytes of `buffer` already searched for a newline.
    searched: usize,
    limit: usize,
}

impl<S: Read> LineReader<S> {
    /// Reads lines of at most `limit` bytes from `stream`. The time after which its reads end sets
    /// how often a wait checks whether to stop.
    pub(crate) const fn new(stream: S, limit: usize) -> Self {
        Self {
            stream,
            buffer: Vec::new(),
            searched: 0,
            limit,
        }
    }

    /// The bytes that were read behind the last line.
    pub(crate) fn into_rest(self) -> Vec<u8> {
        self.buffer
    }

    /// The next line without its newline.
    pub(crate) fn next(&mut self, stop: &dyn Fn() -> bool) -> Result<Vec<u8>, NoLine> {
        loop {
            if let Some(at) = self.buffer[self.searched..]
                .iter()
                .position(|&b| b == b'\n')
            {
                let rest = self.buffer.split_off(self.searched + at + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                line.pop();
                self.searched = 0;
                return if line.len() > self.limit {
                    Err(NoLine::TooLong)
                } else {
                    Ok(line)
                };
            }
            self.searched = self.buffer.len();
            if self.buffer.len() > self.limit {
                return Err(NoLine::TooLong);
            }
            self.fill(stop)?;
        }
    }

    fn fill(&mut self, stop: &dyn Fn() -> bool) -> Result<(), NoLine> {
        let mut chunk = [0; 8192];
        loop {
            if stop() {
                return Err(NoLine::Stopped);
            }
            match self.stream.read(&mut chunk) {
                Ok(0) if self.buffer.is_empty() => return Err(NoLine::Closed),
                Ok(0) => return Err(NoLine::CutOff),
                Ok(n) => {
                    self.buffer.extend_from_slice(&chunk[..n]);
                    return Ok(());
                }
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                Err(e) => return Err(NoLine::Io(e)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    fn pair(limit: usize) -> (UnixStream, LineReader<UnixStream>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (theirs, LineReader::new(ours, limit))
    }

    #[test]
    fn lines_are_found_however_they_are_cut() {
        let (mut peer, mut lines) = pair(10);
        peer.write_all(b"one\ntw").unwrap();
        assert_eq!(lines.next(&|| false).unwrap(), b"one");
        peer.write_all(b"o\n\n0123456789\nrest").unwrap();
        drop(peer);
        assert_eq!(lines.next(&|| false).unwrap(), b"two");
        assert_eq!(lines.next(&|| false).unwrap(), b"");
        assert_eq!(lines.next(&|| false).unwrap(), b"0123456789");
        assert!(matches!(lines.next(&|| false), Err(NoLine::CutOff)));
    }

    #[test]
    fn a_line_without_end_is_refused_at_its_bound() {
        let (mut peer, mut lines) = pair(10);
        peer.write_all(&[b'x'; 11]).unwrap();
        assert!(matches!(lines.next(&|| false), Err(NoLine::TooLong)));
        let (mut peer, mut lines) = pair(10);
        peer.write_all(b"01234567890\n").unwrap();
        assert!(matches!(lines.next(&|| false), Err(NoLine::TooLong)));
    }

    #[test]
    fn a_wait_ends_when_it_should() {
        let (_peer, mut lines) = pair(10);
        assert!(matches!(lines.next(&|| true), Err(NoLine::Stopped)));
    }
}
