//! The HTTP API of a VMM's process, on its Unix socket.
//!
//! **Guarantee.** An answer has bounded length, and each wait for it ends.

use super::VmmError;
use pageferry_hostfs::{Folder, Owner};
use rustix::process::Pid;
use serde_json::Value;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The longest answer: `vm.info` names all devices.
const MAX_ANSWER: usize = 4 << 20;
/// The most headers of an answer.
const MAX_HEADERS: usize = 32;
/// The longest body that an error quotes.
const MAX_QUOTE: usize = 800;
/// The interval of looks at a limit.
const WATCH: Duration = Duration::from_millis(20);

/// The API of one process.
#[derive(Clone, Debug)]
pub(crate) struct Api(PathBuf);

/// A call that is under way. Dropping it closes its connection.
pub(crate) struct Call {
    stream: UnixStream,
    endpoint: &'static str,
    bytes: Vec<u8>,
    /// The answer was read.
    over: bool,
}

impl Call {
    /// The process that listens, if it is visible here.
    pub(crate) fn process(&self) -> Option<Pid> {
        let peer = rustix::net::sockopt::socket_peercred(&self.stream);
        // The kernel has no number for a process of another namespace.
        peer.ok().map(|peer| peer.pid)
    }

    /// The body of the answer, if it comes within `wait`. Later calls only wait.
    pub(crate) fn poll(&mut self, wait: Duration) -> Result<Option<Vec<u8>>, VmmError> {
        const CLOSED: VmmError = VmmError::Closed("answer its API");
        let endpoint = self.endpoint;
        if self.over {
            std::thread::sleep(wait);
            return Ok(None);
        }
        let _ = self.stream.set_read_timeout(Some(wait));
        let mut part = [0; 16 << 10];
        match self.stream.read(&mut part) {
            Ok(0) => return Err(CLOSED),
            Ok(got) => self.bytes.extend_from_slice(&part[..got]),
            Err(e) => match e.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {
                    return Ok(None);
                }
                _ => return Err(CLOSED),
            },
        }
        let parsed = parse_answer(&self.bytes).map_err(|why| VmmError::Http { endpoint, why })?;
        let Some((status, body)) = parsed else {
            return Ok(None);
        };
        self.over = true;
        let body = self.bytes.split_off(body);
        match status {
            200..300 => Ok(Some(body)),
            _ => Err(VmmError::Api {
                endpoint,
                status,
                body: reason(&body).chars().take(MAX_QUOTE).collect(),
            }),
        }
    }

    /// The body of the answer.
    pub(crate) fn wait(&mut self, limit: Duration) -> Result<Vec<u8>, VmmError> {
        let began = Instant::now();
        while began.elapsed() < limit {
            if let Some(body) = self.poll(WATCH)? {
                return Ok(body);
            }
        }
        Err(VmmError::Timeout {
            what: self.endpoint,
            limit,
        })
    }

    /// Repeats `attempt` until it returns something, the call fails, or a limit ends it.
    pub(crate) fn until<T>(
        &mut self,
        what: &'static str,
        limit: Duration,
        stop: &dyn Fn() -> bool,
        mut attempt: impl FnMut() -> Result<Option<T>, VmmError>,
    ) -> Result<T, VmmError> {
        let began = Instant::now();
        loop {
            if let Some(done) = attempt()? {
                return Ok(done);
            }
            // Some versions answer when the migration has begun, others when it is over.
            self.poll(Duration::from_millis(2))?;
            if stop() {
                return Err(VmmError::Stopped);
            }
            if began.elapsed() > limit {
                return Err(VmmError::Timeout { what, limit });
            }
        }
    }
}

/// The reason in the body of a refusal, or all of the body.
fn reason(body: &[u8]) -> String {
    match serde_json::from_slice(body) {
        Ok(Value::Object(mut fault)) => match fault.remove("fault_message") {
            Some(Value::String(message)) => message,
            _ => String::from_utf8_lossy(body).into_owned(),
        },
        // Cloud Hypervisor says a chain of reasons, the first cause last.
        Ok(Value::Array(reasons)) => {
            let words = reasons.iter().filter_map(Value::as_str);
            words.collect::<Vec<_>>().join(": ")
        }
        _ => String::from_utf8_lossy(body).into_owned(),
    }
}

impl Api {
    /// The API at a socket. The path is made absolute: the VMM hears paths beside it.
    pub(crate) fn new(path: &Path) -> Result<Self, VmmError> {
        let absolute = std::path::absolute(path);
        let failed = |e| VmmError::io(format!("cannot use the path {}", path.display()), e);
        Ok(Self(absolute.map_err(failed)?))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Begins a call of `METHOD /PATH`.
    pub(crate) fn begin(
        &self,
        endpoint: &'static str,
        body: Option<&Value>,
    ) -> Result<Call, VmmError> {
        let path = self.0.display();
        let failed = |e| VmmError::io(format!("cannot reach the API socket {path}"), e);
        let mut stream = UnixStream::connect(&self.0).map_err(failed)?;
        let _ = stream.set_write_timeout(Some(Duration::from_secs(5)));
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = format!(
            "{endpoint} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).map_err(failed)?;
        Ok(Call {
            stream,
            endpoint,
            bytes: Vec::new(),
            over: false,
        })
    }

    /// Calls, and returns the body of the answer.
    pub(crate) fn call(
        &self,
        endpoint: &'static str,
        body: Option<&Value>,
        limit: Duration,
    ) -> Result<Vec<u8>, VmmError> {
        self.begin(endpoint, body)?.wait(limit)
    }

    /// Calls, and reads the answer as JSON. Returns the process that answered, too, if it is
    /// visible here.
    pub(crate) fn get<T: serde::de::DeserializeOwned>(
        &self,
        endpoint: &'static str,
        limit: Duration,
    ) -> Result<(T, Option<Pid>), VmmError> {
        let mut call = self.begin(endpoint, None)?;
        let process = call.process();
        let body = call.wait(limit)?;
        let why = |e: serde_json::Error| VmmError::Http {
            endpoint,
            why: e.to_string(),
        };
        Ok((serde_json::from_slice(&body).map_err(why)?, process))
    }
}

/// Reads the bytes of an answer so far. Returns its status and where its body begins, or `None` if
/// more has to come.
///
/// # Errors
/// When the bytes are no HTTP response, or it is too long.
pub fn parse_answer(mut bytes: &[u8]) -> Result<Option<(u16, usize)>, String> {
    let all = bytes.len();
    if all > MAX_ANSWER {
        return Err(format!("it has more than {MAX_ANSWER} bytes"));
    }
    loop {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut head = httparse::Response::new(&mut headers);
        let parsed = head.parse(bytes);
        let httparse::Status::Complete(end) = parsed.map_err(|e| e.to_string())? else {
            return Ok(None);
        };
        let status = head.code.unwrap_or_default();
        // Such as 100 Continue: the answer follows.
        if status < 200 {
            bytes = &bytes[end..];
            continue;
        }
        let mut length = head
            .headers
            .iter()
            .filter(|header| header.name.eq_ignore_ascii_case("content-length"));
        let length = match length.next() {
            None => 0,
            Some(header) => std::str::from_utf8(header.value)
                .ok()
                .and_then(|text| text.trim().parse::<usize>().ok())
                .filter(|length| *length <= MAX_ANSWER)
                .ok_or("its Content-Length is not usable")?,
        };
        let body = all - bytes.len() + end;
        return Ok((bytes.len() - end >= length).then_some((status, body)));
    }
}

/// A directory that only the VMM's user and we can enter, with the path of a socket in it.
/// It is removed on drop.
pub(crate) struct Meeting {
    pub(crate) folder: Folder,
    pub(crate) socket: PathBuf,
    /// The VMM's user.
    pub(crate) owner: Owner,
}

impl Meeting {
    const SOCKET: &str = "m";

    /// Makes the directory beside the API socket.
    pub(crate) fn beside(api: &Path) -> Result<Self, VmmError> {
        let failed = |e: std::io::Error| {
            let what = match e.kind() {
                ErrorKind::NotFound => "no API socket",
                _ => "cannot make a directory beside",
            };
            VmmError::io(format!("{what} {}", api.display()), e)
        };
        let (folder, owner) = Folder::beside(api).map_err(failed)?;
        Ok(Self {
            socket: folder.path().join(Self::SOCKET),
            folder,
            owner,
        })
    }

    /// Listens at the socket. The listener does not block.
    pub(crate) fn listen(&self) -> std::io::Result<UnixListener> {
        let (listener, file) = self.folder.listen(Self::SOCKET, &self.owner)?;
        // It goes with the directory.
        file.keep();
        Ok(listener)
    }

    /// The socket, as the API wants it.
    pub(crate) fn url(&self) -> String {
        format!("unix:{}", self.socket.display())
    }
}
