//! What people and programs read: results on stdout, words on stderr.
//!
//! A reader that went away is no failure of a command whose work is done, so writes that fail are
//! dropped here (and only here).

use crate::exit::Failure;
use serde_json::Value;
use std::io::Write;

/// Writes `text` to stdout as it is.
pub(crate) fn result(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Writes one JSON object to stdout, in lines.
pub(crate) fn json(value: &Value) {
    result(&format!("{value:#}\n"));
}

/// Writes one line to stderr.
pub(crate) fn note(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "pageferry: {text}");
}

/// Writes a failure to stderr.
pub(crate) fn error(failure: &Failure) {
    let _ = writeln!(std::io::stderr().lock(), "pageferry: error: {failure}");
}
