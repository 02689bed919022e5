//! Output of the commands: results on stdout, everything else on stderr.
//!
//! A reader that has gone away is no failure of a command whose work is done. Any other failed
//! write of a result is a failure, and the command ends with it ([`check`]).

use crate::exit::Failure;
use serde_json::Value;
use std::io::{ErrorKind, Write};
use std::sync::OnceLock;

/// The first write of a result that failed.
static FAILED: OnceLock<String> = OnceLock::new();

/// Writes `text` to stdout unchanged.
pub(crate) fn result(text: &str) {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    if let Err(error) = written
        && error.kind() != ErrorKind::BrokenPipe
    {
        let _ = FAILED.set(error.to_string());
    }
}

/// Checks that all results were written.
///
/// # Errors
/// `Exit::Internal` with the reason of the first failed write.
pub(crate) fn check() -> Result<(), Failure> {
    match FAILED.get() {
        None => Ok(()),
        Some(why) => Err(Failure::os("cannot write the result to stdout", why)),
    }
}

/// Writes one JSON object to stdout, in lines.
pub(crate) fn json(value: &Value) {
    result(&format!("{value:#}\n"));
}

/// Writes one JSON object to stdout, as one line.
pub(crate) fn json_line(value: &Value) {
    result(&format!("{value}\n"));
}

/// Writes one line to stderr.
pub(crate) fn note(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "pageferry: {text}");
}

/// Writes a failure to stderr.
pub(crate) fn error(failure: &Failure) {
    let _ = writeln!(std::io::stderr().lock(), "pageferry: error: {failure}");
}
