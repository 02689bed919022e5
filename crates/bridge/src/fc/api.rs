//! The HTTP API of a Firecracker process, on its Unix socket.
//!
//! **Guarantee.** An answer has bounded length, and each wait for it ends.

use super::error::FcError;
use crate::ch::{ChError, parse_answer};
use rustix::process::Pid;
use serde::Deserialize;
use serde_json::Value;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The longest body that an error quotes.
const MAX_QUOTE: usize = 300;
/// The interval of looks at a limit.
const WATCH: Duration = Duration::from_millis(20);

/// The API of one process.
#[derive(Clone, Debug)]
pub(super) struct Api(PathBuf);

/// A call that is under way. Dropping it closes its connection.
pub(super) struct Call {
    stream: UnixStream,
    endpoint: &'static str,
    bytes: Vec<u8>,
}

impl Call {
    /// The process that listens, if it is visible here.
    fn process(&self) -> Option<Pid> {
        let peer = rustix::net::sockopt::socket_peercred(&self.stream);
        // The kernel has no number for a process of another namespace.
        peer.ok().map(|peer| peer.pid)
    }

    /// The body of the answer, if it comes within `wait`.
    pub(super) fn poll(&mut self, wait: Duration) -> Result<Option<Vec<u8>>, FcError> {
        let endpoint = self.endpoint;
        let _ = self.stream.set_read_timeout(Some(wait));
        let mut part = [0; 16 << 10];
        match self.stream.read(&mut part) {
            Ok(0) => return Err(FcError::Closed("answer its API")),
            Ok(got) => self.bytes.extend_from_slice(&part[..got]),
            Err(e) => match e.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {
                    return Ok(None);
                }
                _ => return Err(FcError::Closed("answer its API")),
            },
        }
        let parsed = parse_answer(&self.bytes).map_err(|error| {
            let why = match error {
                ChError::Http(why) => why,
                other => other.to_string(),
            };
            FcError::Http { endpoint, why }
        })?;
        let Some((status, body)) = parsed else {
            return Ok(None);
        };
        let body = self.bytes.split_off(body);
        match status {
            200..300 => Ok(Some(body)),
            _ => Err(FcError::Api {
                endpoint,
                status,
                body: reason(&body).chars().take(MAX_QUOTE).collect(),
            }),
        }
    }

    pub(super) fn wait(&mut self, limit: Duration) -> Result<Vec<u8>, FcError> {
        let began = Instant::now();
        while began.elapsed() < limit {
            if let Some(body) = self.poll(WATCH)? {
                return Ok(body);
            }
        }
        Err(FcError::Timeout {
            what: self.endpoint,
            limit,
        })
    }
}

/// The reason in the body of a refusal, or all of the body.
fn reason(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Fault {
        fault_message: String,
    }
    match serde_json::from_slice::<Fault>(body) {
        Ok(fault) => fault.fault_message,
        Err(_) => String::from_utf8_lossy(body).into_owned(),
    }
}

/// The answer of `GET /`.
#[derive(Deserialize)]
pub(super) struct Instance {
    pub(super) state: String,
    pub(super) vmm_version: String,
    /// The process that has the API socket, if it is visible here.
    #[serde(skip)]
    pub(super) process: Option<Pid>,
}

/// The part of `GET /machine-config` that a move needs. Other fields are ignored.
#[derive(Deserialize)]
pub(super) struct MachineConfig {
    pub(super) mem_size_mib: u64,
    pub(super) vcpu_count: u32,
    huge_pages: Option<String>,
}

/// Huge pages of a pool, in Firecracker's words.
const POOL: &str = "2M";

/// The most MiB of a VM: what fits in a file.
const MAX_MIB: u64 = 1 << 40;

impl MachineConfig {
    /// Reads a configuration.
    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        let config: Self = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        if !(1..=MAX_MIB).contains(&config.mem_size_mib) {
            let mib = config.mem_size_mib;
            return Err(format!("it has {mib} MiB: expected 1 to {MAX_MIB}"));
        }
        match config.huge_pages.as_deref() {
            None | Some("None" | "Transparent" | POOL) => Ok(config),
            Some(other) => {
                let other = other.escape_debug();
                Err(format!(
                    "huge_pages is {other}: expected None, Transparent or {POOL}"
                ))
            }
        }
    }

    /// Whether the VM has huge pages of a pool.
    pub(super) fn has_pool(&self) -> bool {
        self.huge_pages.as_deref() == Some(POOL)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.mem_size_mib << 20
    }
}

impl Api {
    pub(super) fn new(path: &Path) -> Self {
        Self(path.to_owned())
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Begins a call of `METHOD /PATH`.
    pub(super) fn begin(
        &self,
        endpoint: &'static str,
        body: Option<&Value>,
    ) -> Result<Call, FcError> {
        let path = self.0.display();
        let failed = |e| FcError::io(format!("cannot reach the API socket {path}"), e);
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
        })
    }

    /// Calls, and returns the body of the answer.
    pub(super) fn call(
        &self,
        endpoint: &'static str,
        body: Option<&Value>,
        limit: Duration,
    ) -> Result<Vec<u8>, FcError> {
        self.begin(endpoint, body)?.wait(limit)
    }

    pub(super) fn instance(&self, limit: Duration) -> Result<Instance, FcError> {
        const ENDPOINT: &str = "GET /";
        let mut call = self.begin(ENDPOINT, None)?;
        let process = call.process();
        let body = call.wait(limit)?;
        let instance = serde_json::from_slice(&body).map_err(|e| FcError::Http {
            endpoint: ENDPOINT,
            why: e.to_string(),
        })?;
        Ok(Instance {
            process,
            ..instance
        })
    }

    /// Pauses the VM, or lets it run.
    pub(super) fn set_running(&self, on: bool, limit: Duration) -> Result<(), FcError> {
        let state = if on { "Resumed" } else { "Paused" };
        let body = serde_json::json!({ "state": state });
        self.call("PATCH /vm", Some(&body), limit).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_that_cannot_move_is_refused_with_a_reason() {
        let parse = |text: &str| MachineConfig::parse(text.as_bytes());
        let right = r#"{"mem_size_mib":128,"vcpu_count":2,"huge_pages":"None","smt":false}"#;
        let config = parse(right).unwrap();
        assert_eq!((config.bytes(), config.has_pool()), (128 << 20, false));
        let huge = parse(r#"{"mem_size_mib":128,"vcpu_count":2,"huge_pages":"2M"}"#);
        assert!(huge.unwrap().has_pool());
        for (text, why) in [
            ("", "EOF"),
            ("[]", "invalid length"),
            (r#"{"vcpu_count":2}"#, "missing field `mem_size_mib`"),
            (r#"{"mem_size_mib":-1,"vcpu_count":2}"#, "invalid value"),
            (r#"{"mem_size_mib":0,"vcpu_count":2}"#, "it has 0 MiB"),
            (
                r#"{"mem_size_mib":18446744073709551615,"vcpu_count":2}"#,
                "expected 1 to",
            ),
            (
                r#"{"mem_size_mib":128,"vcpu_count":2,"huge_pages":"1G"}"#,
                "huge_pages is 1G: expected None",
            ),
        ] {
            let error = parse(text).err().unwrap();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
