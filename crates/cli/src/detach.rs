//! `--detach`: a command that owns a VM goes on in the background once it is ready.
//!
//! **Guarantee.** The command returns 0 only when the VM runs, or listens for one. A failure before
//! that is its own, with its exit code. The process in the background has a session of its own, no
//! terminal, and holds no pipe of its caller.
//!
//! **Mechanism.** Threads do not survive a fork. So the command starts its own program again. Its
//! standard output there is a pipe. What comes out of it before the mark of
//! readiness is the output of this command.

use crate::args::{Cli, Command, ConsoleTarget};
use crate::exit::{Exit, Failure};
use crate::output;
use std::fs::OpenOptions;
use std::io::{Read, stderr};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;

/// The last byte of output before the process is on its own.
const READY: u8 = 0;
/// The most output before that, in bytes.
const MOST_OUTPUT: u64 = 1 << 20;

/// Whether this command goes to the background, and is not there yet.
///
/// # Errors
/// [`Exit::Usage`] if its console is this terminal.
pub(crate) fn is_asked_for(cli: &Cli) -> Result<bool, Failure> {
    let (detach, console) = match &cli.command {
        Command::Run(args) => (args.detach, args.kernel.console.as_ref()),
        Command::Restore(args) => (args.detach, args.console.as_ref()),
        Command::Receive(args) => (args.detach, args.console.as_ref()),
        _ => return Ok(false),
    };
    if detach && console == Some(&ConsoleTarget::Stdio) {
        return Err(Failure::new(
            Exit::Usage,
            "with --detach the console cannot be this terminal: name a file, or leave --console \
             out and attach by `pageferry console`",
        ));
    }
    Ok(detach && !cli.detached)
}

/// Starts this command again, in the background. Returns the exit code of this process: 0 once that
/// is ready, or its own if it failed before.
///
/// # Errors
/// When the program cannot be started, or a signal ended it.
pub(crate) fn start() -> Result<u8, Failure> {
    let cannot = |e| Failure::os("cannot start the process in the background", e);
    let program = std::env::current_exe().ok().filter(|path| path.exists());
    let mut command =
        std::process::Command::new(program.unwrap_or_else(|| "/proc/self/exe".into()));
    let mut args = std::env::args_os();
    if let Some(name) = args.next() {
        command.arg0(name);
    }
    command.arg("--detached").args(args);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(cannot)?;
    let mut text = Vec::new();
    if let Some(from) = child.stdout.take() {
        from.take(MOST_OUTPUT)
            .read_to_end(&mut text)
            .map_err(cannot)?;
    }
    let is_ready = text.pop_if(|last| *last == READY).is_some();
    output::result(&String::from_utf8_lossy(&text));
    if is_ready {
        return Ok(0);
    }
    let ended = child.wait().map_err(cannot)?;
    let code = ended.code().and_then(|code| u8::try_from(code).ok());
    code.ok_or_else(|| {
        Failure::new(
            Exit::Internal,
            format!("the process in the background ended before it was ready: {ended}"),
        )
    })
}

/// Leaves the session of the command that started this process.
///
/// # Errors
/// When the host refuses, since the process leads a group.
pub(crate) fn begin() -> Result<(), Failure> {
    rustix::process::setsid()
        .map(drop)
        .map_err(|e| Failure::os("cannot begin a session: leave out --detached", e))
}

/// Says the name of the VM whose control socket is at `control`, and leaves the caller. `is_named`
/// says whether it is in the user's directory, where the name is enough. Does nothing unless this
/// process is `detached`.
///
/// # Errors
/// [`Exit::Cancelled`] if the caller has gone, or `Exit::Internal` if it takes nothing.
pub(crate) fn ready(detached: bool, control: &Path, is_named: bool) -> Result<(), Failure> {
    if !detached {
        return Ok(());
    }
    let name = control.file_name().filter(|_| is_named);
    let name = name.map_or(control, Path::new).display();
    output::result(&format!("{name}\n{}", char::from(READY)));
    // Nothing may be on its way when the streams change.
    output::check()?;
    if output::is_lost() {
        return Err(Failure::new(
            Exit::Cancelled,
            "the command that started this process has ended",
        ));
    }
    output::finish();
    let cannot = |e| Failure::os("cannot leave the terminal", e);
    let nowhere = OpenOptions::new().read(true).write(true).open("/dev/null");
    let nowhere = nowhere.map_err(cannot)?;
    rustix::stdio::dup2_stdin(&nowhere).map_err(|e| cannot(e.into()))?;
    rustix::stdio::dup2_stdout(&nowhere).map_err(|e| cannot(e.into()))?;
    if !is_file() {
        rustix::stdio::dup2_stderr(&nowhere).map_err(|e| cannot(e.into()))?;
    }
    Ok(())
}

/// Whether standard error is a file, where messages and the log can go on.
fn is_file() -> bool {
    let kind = |error: rustix::fs::Stat| rustix::fs::FileType::from_raw_mode(error.st_mode);
    rustix::fs::fstat(stderr()).is_ok_and(|error| kind(error).is_file())
}
