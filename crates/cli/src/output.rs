//! Output of the commands: results on stdout, everything else on stderr.
//!
//! **Guarantee.** No line on stderr holds up the work or fails it: it is dropped and counted if
//! nobody takes it. The same holds for results of a process that owns a VM, as long as the VM is
//! there. Any other command waits for the reader of its results, until the user ends it. Lines and
//! the refreshed line of the progress leave each other whole on a terminal.
//!
//! A reader or a terminal that has gone away is no failure of a command whose work is done. Any
//! other failed write of a result is a failure, and the command ends with it ([`check`]).
//!
//! **Mechanism.** Each stream has a [`Sink`]. A panic is counted and told on stderr ([`defects`]).

use crate::exit::{Exit, Failure};
use crate::signals::Interrupts;
use crate::sink::{Sink, To};
use rustix::io::Errno;
use serde_json::Value;
use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The most bytes that wait for the reader of stderr.
const DIAGNOSTICS: usize = 256 << 10;
/// The most bytes that wait for the reader of stdout, while a VM is there.
const RESULTS: usize = 1 << 20;
/// The time that the readers of an ending process have for its last lines on stderr, and, if it
/// owned a VM, for its results.
const LAST_LINES: Duration = Duration::from_secs(1);
const LAST_RESULTS: Duration = Duration::from_secs(5);
/// Empties the row of the cursor (ECMA-48, 8.3.41), and returns to its start.
const EMPTY_ROW: &str = "\r\x1b[2K";

static STDERR: OnceLock<Sink> = OnceLock::new();
static STDOUT: OnceLock<Sink> = OnceLock::new();
/// What ends a wait for the reader of results, and whether this process owns a VM.
static READER: OnceLock<(Interrupts, bool)> = OnceLock::new();
/// The panics of this process.
static DEFECTS: AtomicU64 = AtomicU64::new(0);
/// Whether the terminal on stderr may show the line of the progress. Held while a line is put into
/// the sink: it then comes before the first picture, or empties the row, or comes behind the last.
static PROGRESS: Mutex<bool> = Mutex::new(false);

/// Begins output, and the reports of panics. Lines before it are written directly.
///
/// # Errors
/// When the host has no room for a thread.
pub(crate) fn start() -> Result<(), Failure> {
    let cannot = |e| Failure::os("cannot start the threads for output", e);
    let notice = |lost| {
        let start = row_start(*progress());
        format!("{start}pageferry: {lost} lines of diagnostics were lost\n")
    };
    let stderr = Sink::start("stderr", To::Stderr, DIAGNOSTICS, notice).map_err(cannot)?;
    let silent = |_| String::new();
    let stdout = Sink::start("stdout", To::Stdout, RESULTS, silent).map_err(cannot)?;
    let _ = (STDERR.set(stderr), STDOUT.set(stdout));
    std::panic::set_hook(Box::new(|panic| {
        // A plain count: nothing else is read because of it.
        DEFECTS.fetch_add(1, Ordering::Relaxed);
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("unnamed").to_owned();
        note(&format!("a defect of Pageferry: the thread {name} {panic}"));
    }));
    Ok(())
}

/// Says how the process waits for the reader of its results. With `owns_vm` it does not, until
/// [`check`].
pub(crate) fn wait_by(interrupts: &Interrupts, owns_vm: bool) {
    let _ = READER.set((interrupts.clone(), owns_vm));
}

/// Announces the line of the progress, before its first picture. Its thread waits a moment for
/// results that are on their way to the same terminal.
pub(crate) fn begin_progress() {
    *progress() = true;
    if std::io::stdout().is_terminal() {
        drain_for(&STDOUT, LAST_LINES);
    }
}

/// Ends the progress, behind its last picture. Its thread waits a moment for the terminal: results
/// go there by another way, and must not come before.
pub(crate) fn end_progress() {
    drain_for(&STDERR, LAST_LINES);
    *progress() = false;
}

fn progress() -> MutexGuard<'static, bool> {
    PROGRESS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The bytes before a line. The next picture of the progress comes below the line.
fn row_start(may_show_progress: bool) -> &'static str {
    if may_show_progress { EMPTY_ROW } else { "" }
}

fn drain_for(sink: &OnceLock<Sink>, limit: Duration) {
    if let Some(sink) = sink.get() {
        let deadline = Instant::now() + limit;
        sink.drain(&|| Instant::now() >= deadline);
    }
}

/// Writes `text`, which begins a line, to stdout.
pub(crate) fn result(text: &str) {
    let Some(stdout) = STDOUT.get() else { return };
    let shown = progress();
    let start = row_start(*shown && std::io::stdout().is_terminal());
    let text = [start, text].concat();
    match READER.get() {
        Some((_, true)) => stdout.offer(text.as_bytes()),
        _ => stdout.force(text.as_bytes()),
    }
    drop(shown);
    if let Some((interrupts, false)) = READER.get() {
        let count = interrupts.count();
        stdout.drain(&|| interrupts.count() != count);
    }
}

/// Whether results go nowhere: the reader of stdout has gone, or writing fails.
pub(crate) fn is_lost() -> bool {
    STDOUT.get().is_some_and(|out| out.first_error().is_some())
}

/// The sink of stdout, for a guest's console.
pub(crate) fn stdout() -> Option<Sink> {
    STDOUT.get().cloned()
}

/// Waits until all results are written, and checks it.
///
/// # Errors
/// `Exit::Internal` with the reason of the first failed write, or if a VM's process has a reader
/// that takes nothing. [`Exit::Cancelled`] if the user stopped the wait.
pub(crate) fn check() -> Result<(), Failure> {
    let Some(stdout) = STDOUT.get() else {
        return Ok(());
    };
    let (interrupts, owns_vm) = READER.get().cloned().unwrap_or_default();
    let deadline = Instant::now() + LAST_RESULTS;
    let all = stdout.drain(&|| match owns_vm {
        true => Instant::now() >= deadline,
        false => interrupts.any(),
    });
    match stdout.first_error() {
        // The command's work is done. A terminal that has closed fails with EIO.
        Some(Errno::PIPE) => Ok(()),
        Some(Errno::IO) if is_terminal() => Ok(()),
        Some(why) => Err(Failure::os("cannot write the result to stdout", why)),
        None if !all && !owns_vm => Err(Failure::new(
            Exit::Cancelled,
            "cancelled while the reader of stdout took nothing",
        )),
        None if !all || stdout.lost() > 0 => Err(Failure::os(
            "cannot write the result to stdout",
            "its reader takes nothing",
        )),
        None => Ok(()),
    }
}

/// Whether stdout is a terminal, even one that has closed: isatty(3) denies that.
fn is_terminal() -> bool {
    let kind = |out: rustix::fs::Stat| rustix::fs::FileType::from_raw_mode(out.st_mode);
    rustix::fs::fstat(std::io::stdout()).is_ok_and(|out| kind(out).is_char_device())
}

/// Gives the reader of stderr a moment for the last lines. The process then ends.
pub(crate) fn finish() {
    drain_for(&STDERR, LAST_LINES);
}

/// Writes one JSON object to stdout, in lines.
pub(crate) fn json(value: &Value) {
    result(&format!("{value:#}\n"));
}

/// Writes one JSON object to stdout, as one line.
pub(crate) fn json_line(value: &Value) {
    result(&format!("{value}\n"));
}

/// Writes whole lines to stderr, and drops them rather than wait.
pub(crate) fn diagnostics(lines: &[u8]) {
    let shown = progress();
    offer(&[row_start(*shown).as_bytes(), lines].concat());
}

/// Writes a picture of the progress to stderr, and drops it rather than wait.
pub(crate) fn picture(bytes: &[u8]) {
    offer(bytes);
}

fn offer(bytes: &[u8]) {
    match STDERR.get() {
        Some(stderr) => stderr.offer(bytes),
        // The process could not start its threads, and ends.
        None => drop(rustix::io::write(std::io::stderr(), bytes)),
    }
}

/// Writes a line to stderr, or more.
pub(crate) fn note(text: &str) {
    diagnostics(format!("pageferry: {}\n", plain(text)).as_bytes());
}

/// Text that may be of others, for a terminal, which obeys control characters: all of them are
/// escaped but tabs and the ends of lines.
pub(crate) fn plain(text: &str) -> String {
    let mut plain = String::new();
    for c in text.chars() {
        match c.is_control() && !matches!(c, '\n' | '\t') {
            true => plain.extend(c.escape_default()),
            false => plain.push(c),
        }
    }
    plain
}

/// Writes a failure to stderr.
pub(crate) fn error(failure: &Failure) {
    note(&format!("error: {failure}"));
}

/// The lines that were lost because nobody took them from stderr.
pub(crate) fn lost_lines() -> u64 {
    STDERR.get().map_or(0, Sink::lost)
}

/// The panics of this process, each a defect of Pageferry.
pub(crate) fn defects() -> u64 {
    DEFECTS.load(Ordering::Relaxed)
}
