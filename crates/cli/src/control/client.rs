//! The user's side of a VM's control socket.

use super::MAX_ANSWER_BYTES;
use super::line::{LineReader, NoLine};
use super::protocol::{Event, Line, Request};
use crate::exit::{Exit, Failure};
use crate::signals::Interrupts;
use serde_json::Value;
use std::cell::Cell;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The time limit for a VM to accept a request.
const WRITE_LIMIT: Duration = Duration::from_secs(5);

/// A connection to a VM.
#[derive(Debug)]
pub(crate) struct Client {
    path: PathBuf,
    stream: UnixStream,
    lines: LineReader<UnixStream>,
}

impl Client {
    /// Connects to the VM whose control socket is at `path`.
    ///
    /// # Errors
    /// [`Exit::NoVm`] when none listens there, [`Exit::Internal`] when this host does not let the
    /// user connect, [`Exit::Usage`] for a path that is too long.
    pub(crate) fn connect(path: &Path) -> Result<Self, Failure> {
        let open = || -> std::io::Result<(UnixStream, UnixStream)> {
            let stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(Interrupts::POLL))?;
            stream.set_write_timeout(Some(WRITE_LIMIT))?;
            let reader = stream.try_clone()?;
            Ok((stream, reader))
        };
        let (stream, reader) = open().map_err(|e| cannot_connect(path, &e))?;
        Ok(Self {
            path: path.to_owned(),
            stream,
            lines: LineReader::new(reader, MAX_ANSWER_BYTES),
        })
    }

    /// Sends a request and waits for its result, at most `limit`. `stop` ends the wait earlier.
    ///
    /// # Errors
    /// The VM's answer, [`Exit::NoVm`] when it went away, [`Exit::Cancelled`] when `stop` held.
    pub(crate) fn call(
        &mut self,
        request: &Request,
        limit: Duration,
        stop: &dyn Fn() -> bool,
        event: &mut dyn FnMut(Event),
    ) -> Result<Value, Failure> {
        let mut bytes = serde_json::to_vec(request).expect("requests always serialize");
        bytes.push(b'\n');
        self.stream
            .write_all(&bytes)
            .map_err(|e| self.gone(&e.to_string()))?;
        let deadline = Instant::now() + limit;
        loop {
            // `stop` may have a state, so only the call that ended the wait gives the reason.
            let stopped = Cell::new(false);
            let end = || {
                stopped.set(stop());
                stopped.get() || Instant::now() >= deadline
            };
            let line = match self.lines.next(&end) {
                Ok(line) => line,
                Err(NoLine::Stopped) if stopped.get() => {
                    return Err(Failure::new(Exit::Cancelled, "cancelled"));
                }
                Err(NoLine::Stopped) => {
                    let message = format!("it gave no answer within {} s", limit.as_secs());
                    return Err(self.gone(&message));
                }
                Err(NoLine::Closed | NoLine::CutOff) => {
                    return Err(self.gone("it closed the connection"));
                }
                Err(NoLine::TooLong) => return Err(self.gone("its answer is too long")),
                Err(NoLine::Io(e)) => return Err(self.gone(&e.to_string())),
            };
            match serde_json::from_slice(&line) {
                Ok(Line::Event(e)) => event(e),
                Ok(Line::Result(value)) => return Ok(value),
                Ok(Line::Error(error)) => return Err(error.into()),
                Err(e) => {
                    return Err(self.gone(&format!("what it answered is not Pageferry's: {e}")));
                }
            }
        }
    }

    /// Attaches to the console. Returns the connection, which carries text and keys from now on,
    /// and the text that came already.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub(crate) fn attach(
        mut self,
        limit: Duration,
        interrupts: &Interrupts,
    ) -> Result<(UnixStream, Vec<u8>), Failure> {
        let stop = || interrupts.any();
        self.call(&Request::Console {}, limit, &stop, &mut |_| {})?;
        Ok((self.stream, self.lines.into_rest()))
    }

    fn gone(&self, why: &str) -> Failure {
        Failure::new(
            Exit::NoVm,
            format!("the VM at {} did not answer: {why}", self.path.display()),
        )
    }
}

/// The reason why a connection to a control socket did not open, with a hint that fits it.
fn cannot_connect(path: &Path, error: &std::io::Error) -> Failure {
    let at = path.display();
    let none = |why: &str| {
        let message =
            format!("no VM listens on {at}: {why}; start one with `pageferry run --control {at}`");
        Failure::new(Exit::NoVm, message)
    };
    let host = |why: &str| Failure::new(Exit::Internal, format!("cannot connect to {at}: {why}"));
    let is_socket = std::fs::symlink_metadata(path)
        .map(|found| found.file_type().is_socket() || found.file_type().is_symlink());
    match error.kind() {
        ErrorKind::NotFound => none("there is no such file"),
        ErrorKind::NotADirectory => none("a part of the path is not a directory"),
        ErrorKind::ConnectionRefused if matches!(is_socket, Ok(false)) => {
            none("the file is not a socket")
        }
        ErrorKind::ConnectionRefused => none("the process that made the socket has ended"),
        ErrorKind::PermissionDenied => host(
            "permission denied: a VM may be there, and its socket is for its owner only; \
             use the user that started the VM, or root",
        ),
        ErrorKind::WouldBlock => host(
            "too many other connections wait there: try again, and look whether its process stands still",
        ),
        ErrorKind::InvalidInput => Failure::new(
            Exit::Usage,
            format!("cannot connect to {at}: {error}; the path of a socket has at most 107 bytes"),
        ),
        // EPROTOTYPE has no kind of its own.
        _ if error.raw_os_error() == Some(rustix::io::Errno::PROTOTYPE.raw_os_error()) => {
            none("the socket is of another kind, so that of another program")
        }
        _ => host(&format!("{error}; no VM was asked")),
    }
}

/// Sends one request on a new connection, and ignores its events.
///
/// # Errors
/// As [`Client::call`].
pub(crate) fn ask(
    path: &Path,
    request: &Request,
    limit: Duration,
    interrupts: &Interrupts,
) -> Result<Value, Failure> {
    Client::connect(path)?.call(request, limit, &|| interrupts.any(), &mut |_| {})
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    /// Whether a VM may be there decides what the user should do.
    #[test]
    fn only_a_socket_without_a_vm_is_met_with_the_advice_to_start_one() {
        let path = Path::new("/no/such/vm");
        let starts = "start one with `pageferry run --control /no/such/vm`";
        for (errno, exit, says) in [
            (Errno::NOENT, Exit::NoVm, "there is no such file"),
            (Errno::NOTDIR, Exit::NoVm, "is not a directory"),
            (Errno::CONNREFUSED, Exit::NoVm, "has ended"),
            (Errno::PROTOTYPE, Exit::NoVm, "of another kind"),
            (Errno::ACCESS, Exit::Internal, "for its owner only"),
            (Errno::PERM, Exit::Internal, "for its owner only"),
            (Errno::AGAIN, Exit::Internal, "try again"),
            (Errno::MFILE, Exit::Internal, "no VM was asked"),
            (Errno::NOMEM, Exit::Internal, "no VM was asked"),
            (Errno::LOOP, Exit::Internal, "no VM was asked"),
        ] {
            let failure = cannot_connect(path, &errno.into());
            assert_eq!(failure.exit, exit, "{failure}");
            assert!(failure.message.contains(says), "{failure}");
            let advises = failure.message.contains(starts);
            assert_eq!(advises, exit == Exit::NoVm, "{failure}");
        }
        let long = std::io::Error::from(ErrorKind::InvalidInput);
        let failure = cannot_connect(path, &long);
        assert_eq!(failure.exit, Exit::Usage, "{failure}");
        assert!(failure.message.contains("at most 107 bytes"), "{failure}");
    }
}
