//! Output of the commands: results on stdout, everything else on stderr.
//!
//! All of it passes [`beside_progress`]: a line on a terminal would else land in the refreshed line of
//! the progress.
//!
//! A reader that has gone away is no failure of a command whose work is done. Any other failed
//! write of a result is a failure, and the command ends with it ([`check`]).

use crate::exit::Failure;
use indicatif::MultiProgress;
use serde_json::Value;
use std::io::{ErrorKind, Write};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The first write of a result that failed.
static FAILED: OnceLock<String> = OnceLock::new();

/// The progress on the terminal, while there is one.
static PROGRESS: Mutex<Option<MultiProgress>> = Mutex::new(None);

/// Announces the progress on the terminal, or its end.
pub(crate) fn set_progress(progress: Option<MultiProgress>) {
    *PROGRESS.lock().unwrap_or_else(PoisonError::into_inner) = progress;
}

/// Calls `write`, which writes whole lines. The progress on the terminal makes room for them.
fn beside_progress<T>(write: impl FnOnce() -> T) -> T {
    // Held meanwhile: the progress does not end between two halves of this.
    match &*PROGRESS.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(progress) => progress.suspend(write),
        None => write(),
    }
}

/// Writes text of whole lines to stderr. Every line on stderr passes here.
pub(crate) fn stderr(text: &[u8]) {
    beside_progress(|| {
        let _ = std::io::stderr().lock().write_all(text);
    });
}

/// Writes `text` to stdout unchanged.
pub(crate) fn result(text: &str) {
    let written = beside_progress(|| {
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes()).and_then(|()| out.flush())
    });
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
    stderr(format!("pageferry: {text}\n").as_bytes());
}

/// Writes a failure to stderr.
pub(crate) fn error(failure: &Failure) {
    stderr(format!("pageferry: error: {failure}\n").as_bytes());
}
