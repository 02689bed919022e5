//! Calls of `ip` and `tc`, and what their failures mean.
//!
//! **Guarantee.** A failure is [`Error::Unusable`] if this machine lacks a program, a privilege or
//! a part of the kernel. Everything else is [`Error::Failed`].
//!
//! **Mechanism.** The messages of iproute2 tell the two apart.

use crate::netns;
use std::fmt;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Output, Stdio};

/// Why two hosts could not be made or changed.
#[derive(Debug)]
pub enum Error {
    /// This machine lacks something. The text is one sentence.
    Unusable(String),
    /// A call failed that should not.
    Failed(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unusable(why) | Self::Failed(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for Error {}

/// Fails if this process cannot make network namespaces.
pub(super) fn check_privilege() -> Result<(), Error> {
    // The numbers of CAP_NET_ADMIN and CAP_SYS_ADMIN in linux/capability.h.
    let needed = (1_u64 << 12) | (1 << 21);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    match effective {
        Some(has) if has & needed == needed => Ok(()),
        _ => Err(Error::Unusable(
            "making network namespaces needs root, or CAP_NET_ADMIN and CAP_SYS_ADMIN".to_owned(),
        )),
    }
}

/// Runs a program of iproute2. Returns what it printed.
pub(super) fn run(name: &str, args: &[&str]) -> Result<String, Error> {
    call(name, args, "")
}

/// As [`run`], with `input` as the commands of a batch.
pub(super) fn batch(name: &str, host: &str, input: &str) -> Result<(), Error> {
    call(name, &["-netns", host, "-batch", "-"], input).map(drop)
}

fn call(name: &str, args: &[&str], input: &str) -> Result<String, Error> {
    let path = netns::tool(name).ok_or_else(|| {
        Error::Unusable(format!(
            "there is no '{name}': install Debian's package iproute2"
        ))
    })?;
    let shown = format!("{name} {}", args.join(" "));
    let failed = |why: std::io::Error| Error::Failed(format!("cannot run '{shown}': {why}"));
    let mut child = Command::new(path)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // Ctrl-C in a terminal must not end a removal.
        .process_group(0)
        .spawn()
        .map_err(failed)?;
    // The programs print little before they have read all. One that fails reads no further, and
    // its message says more than the failed write.
    if let Some(mut stdin) = child.stdin.take() {
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().map_err(failed)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(meaning(&shown, &output))
}

fn meaning(shown: &str, output: &Output) -> Error {
    let text = String::from_utf8_lossy(&output.stderr);
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
    let why = match text.as_str() {
        "" => format!("'{shown}' ended with {}", output.status),
        text => format!("'{shown}' says: {text}"),
    };
    if has(&[
        "not permitted",
        "Permission denied",
        "Read-only file system",
    ]) {
        return Error::Unusable(format!("making network namespaces is not allowed: {why}"));
    }
    if has(&[
        "kind is unknown",
        "classifier not found",
        "Unknown device type",
        "not supported",
    ]) {
        return Error::Unusable(format!("the kernel lacks a part of shaping: {why}"));
    }
    Error::Failed(why)
}
