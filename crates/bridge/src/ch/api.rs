//! The HTTP API of a Cloud Hypervisor process, on its Unix socket.
//!
//! **Guarantee.** An answer has bounded length, and a wait for it ends: by its limit, or when the
//! call is dropped.

use super::error::ChError;
use pageferry_hostfs::{Folder, Owner};
use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The longest answer: `vm.info` names all devices.
const MAX_ANSWER: usize = 4 << 20;
/// The most headers of an answer.
const MAX_HEADERS: usize = 32;
/// The longest body that an error quotes.
const MAX_QUOTE: usize = 300;

/// The API of one process.
#[derive(Clone, Debug)]
pub(super) struct Api(PathBuf);

/// A call that is under way. Dropping it ends the wait.
pub(super) struct Call {
    stream: UnixStream,
    answer: Mutex<Receiver<Result<Vec<u8>, ChError>>>,
    endpoint: &'static str,
}

impl Drop for Call {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

impl Call {
    /// The answer, if there is one by now.
    pub(super) fn poll(&self) -> Option<Result<Vec<u8>, ChError>> {
        let answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner);
        answer.try_recv().ok()
    }

    fn wait(&self, limit: Duration) -> Result<Vec<u8>, ChError> {
        let answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner);
        match answer.recv_timeout(limit) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => Err(ChError::Timeout {
                what: self.endpoint,
                limit,
            }),
            Err(RecvTimeoutError::Disconnected) => Err(ChError::Closed("answer its API")),
        }
    }
}

impl Api {
    pub(super) fn new(path: &Path) -> Self {
        Self(path.to_owned())
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Begins a call: `PUT` with a body, or `GET` without.
    pub(super) fn begin(
        &self,
        endpoint: &'static str,
        body: Option<&str>,
    ) -> Result<Call, ChError> {
        let path = self.0.display();
        let failed = |e| ChError::io(format!("cannot reach the API socket {path}"), e);
        let stream = UnixStream::connect(&self.0).map_err(failed)?;
        let mut ours = stream.try_clone().map_err(failed)?;
        let _ = ours.set_write_timeout(Some(Duration::from_secs(5)));
        let (method, body) = body.map_or(("GET", ""), |body| ("PUT", body));
        let request = format!(
            "{method} /api/v1/{endpoint} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        ours.write_all(request.as_bytes()).map_err(failed)?;
        let (sender, answer) = channel();
        std::thread::Builder::new()
            .name("ch-api".into())
            .spawn(move || {
                let _ = sender.send(read_answer(&mut ours, endpoint));
            })
            .map_err(failed)?;
        Ok(Call {
            stream,
            answer: Mutex::new(answer),
            endpoint,
        })
    }

    /// Calls, and returns the body of the answer.
    pub(super) fn call(
        &self,
        endpoint: &'static str,
        body: Option<&str>,
        limit: Duration,
    ) -> Result<Vec<u8>, ChError> {
        self.begin(endpoint, body)?.wait(limit)
    }

    /// Whether the VM runs. Otherwise it is paused.
    pub(super) fn vm_runs(&self, limit: Duration) -> Result<bool, ChError> {
        #[derive(serde::Deserialize)]
        struct Info {
            state: String,
        }
        let body = self.call("vm.info", None, limit)?;
        let info: Info = serde_json::from_slice(&body)
            .map_err(|e| ChError::Http(format!("the body of vm.info has no state: {e}")))?;
        match info.state.as_str() {
            "Running" => Ok(true),
            "Paused" => Ok(false),
            other => Err(ChError::VmState(other.escape_debug().to_string())),
        }
    }
}

fn read_answer(stream: &mut UnixStream, endpoint: &str) -> Result<Vec<u8>, ChError> {
    let (mut bytes, mut part) = (Vec::new(), [0; 16 << 10]);
    loop {
        let got = match stream.read(&mut part) {
            Ok(0) | Err(_) => return Err(ChError::Closed("answer its API")),
            Ok(got) => got,
        };
        bytes.extend_from_slice(&part[..got]);
        if let Some((status, body)) = parse_answer(&bytes)? {
            let body = bytes.split_off(body);
            return match status {
                200..300 => Ok(body),
                _ => Err(ChError::Api {
                    endpoint: endpoint.into(),
                    status,
                    body: String::from_utf8_lossy(&body)
                        .chars()
                        .take(MAX_QUOTE)
                        .collect(),
                }),
            };
        }
    }
}

/// Reads the bytes of an answer so far. Returns its status and where its body begins, or `None` if
/// more has to come.
///
/// # Errors
/// When the bytes are no HTTP response, or it is too long.
pub fn parse_answer(mut bytes: &[u8]) -> Result<Option<(u16, usize)>, ChError> {
    let all = bytes.len();
    if all > MAX_ANSWER {
        return Err(ChError::Http(format!(
            "it has more than {MAX_ANSWER} bytes"
        )));
    }
    loop {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut head = httparse::Response::new(&mut headers);
        let parsed = head.parse(bytes);
        let httparse::Status::Complete(end) = parsed.map_err(|e| ChError::Http(e.to_string()))?
        else {
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
                .ok_or_else(|| ChError::Http("its Content-Length is not usable".into()))?,
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
    pub(crate) fn beside(api: &Path) -> Result<Self, ChError> {
        let failed = |e: std::io::Error| {
            let what = match e.kind() {
                std::io::ErrorKind::NotFound => "no API socket",
                _ => "cannot make a directory beside",
            };
            ChError::io(format!("{what} {}", api.display()), e)
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

/// Repeats `attempt` until it returns something, `call` fails, or a limit ends it.
pub(super) fn until<T>(
    what: &'static str,
    limit: Duration,
    call: &Call,
    stop: &dyn Fn() -> bool,
    mut attempt: impl FnMut() -> Result<Option<T>, ChError>,
) -> Result<T, ChError> {
    let began = Instant::now();
    loop {
        if let Some(done) = attempt()? {
            return Ok(done);
        }
        // Some versions answer when the migration has begun, others when it is over.
        if let Some(Err(error)) = call.poll() {
            return Err(error);
        }
        if stop() {
            return Err(ChError::Stopped);
        }
        if began.elapsed() > limit {
            return Err(ChError::Timeout { what, limit });
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
