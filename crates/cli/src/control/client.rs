//! The user's side of a VM's control socket.

use super::MAX_ANSWER_BYTES;
use super::line::{LineReader, NoLine};
use super::protocol::{Event, Line, Request};
use crate::exit::{Exit, Failure};
use crate::signals::Interrupts;
use serde_json::Value;
use std::cell::Cell;
use std::io::Write;
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
    lines: LineReader,
}

impl Client {
    /// Connects to the VM whose control socket is at `path`.
    ///
    /// # Errors
    /// [`Exit::NoVm`] when none listens there.
    pub(crate) fn connect(path: &Path) -> Result<Self, Failure> {
        let open = || -> std::io::Result<(UnixStream, UnixStream)> {
            let stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(Interrupts::POLL))?;
            stream.set_write_timeout(Some(WRITE_LIMIT))?;
            let reader = stream.try_clone()?;
            Ok((stream, reader))
        };
        let (stream, reader) = open().map_err(|e| {
            let message = format!(
                "no VM listens on {}: {e}; start one with `pageferry run --control {}`",
                path.display(),
                path.display()
            );
            Failure::new(Exit::NoVm, message)
        })?;
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

    /// Attaches to the console. Returns the connection, which carries text and keys from now on, and
    /// the text that came already.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub(crate) fn attach(
        mut self,
        limit: Duration,
        interrupts: &Interrupts,
    ) -> Result<(UnixStream, Vec<u8>), Failure> {
        let stop = || interrupts.any();
        self.call(&Request::Console, limit, &stop, &mut |_| {})?;
        Ok((self.stream, self.lines.into_rest()))
    }

    fn gone(&self, why: &str) -> Failure {
        Failure::new(
            Exit::NoVm,
            format!("the VM at {} did not answer: {why}", self.path.display()),
        )
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
