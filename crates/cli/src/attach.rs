//! `pageferry console`: the console of a VM that runs in another process.

use crate::args::VmArgs;
use crate::control::client::Client;
use crate::exit::Failure;
use crate::keys::{Keys, Passed};
use crate::output;
use crate::signals::Interrupts;
use crate::sink::Sink;
use crate::terminal::Terminal;
use rustix::net::{SendFlags, send};
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The longest wait for the VM's process to attach this one.
const LIMIT: Duration = Duration::from_secs(15);
/// The time that the reader of stdout has for the last text.
const LAST_TEXT: Duration = Duration::from_secs(1);

/// Shows the console and sends keys, until Ctrl-], a signal, or the end of the VM.
///
/// # Errors
/// When there is no VM at the socket, or it has no console.
pub(crate) fn attach(args: &VmArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let path = args.path()?;
    let (stream, text) = Client::connect(&path)?.attach(LIMIT, interrupts)?;
    let cannot = |e| Failure::os("cannot attach to the console", e);
    let to = stream.try_clone().map_err(cannot)?;
    let out = output::stdout().ok_or_else(|| cannot(ErrorKind::NotConnected.into()))?;
    let terminal = Terminal::take();
    if terminal.is_some() {
        output::note("attached: all keys go to the guest, except Ctrl-], which detaches");
    }
    let leave = interrupts.clone();
    // Nobody waits for it, since a read may last for ever.
    std::thread::Builder::new()
        .name("keys".into())
        .spawn(move || type_in(&to, &leave))
        .map_err(cannot)?;
    let ended = show(stream, &text, &out, interrupts);
    let deadline = Instant::now() + LAST_TEXT;
    out.drain(&|| Instant::now() >= deadline);
    drop(terminal);
    match ended {
        Ok(true) => output::note("the VM has left, or has ended"),
        Ok(false) => {}
        Err(e) if interrupts.any() => drop(e),
        Err(e) => return Err(Failure::os("cannot show the console", e)),
    }
    Ok(())
}

/// Shows text until there is no more, or nobody reads it. Returns whether the VM ended it. An
/// interrupt also ends the wait for a reader that takes nothing.
fn show(
    mut stream: UnixStream,
    text: &[u8],
    out: &Sink,
    interrupts: &Interrupts,
) -> std::io::Result<bool> {
    let write = |text: &[u8]| {
        out.force(text);
        out.drain(&|| interrupts.any());
    };
    write(text);
    let mut bytes = [0; 8192];
    // The end of the command tells why nobody reads.
    while !interrupts.any() && !output::is_lost() {
        // A read waits for a short time, as it did for the answer.
        match stream.read(&mut bytes) {
            Ok(0) => return Ok(true),
            Ok(read) => write(&bytes[..read]),
            Err(e) if e.kind() == ErrorKind::ConnectionReset => return Ok(true),
            Err(e)
                if matches!(
                    e.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(false)
}

/// Sends what the user types. Ctrl-] counts as a signal. So does a terminal that closes.
fn type_in(to: &UnixStream, leave: &Interrupts) {
    let mut keys = Keys::new();
    let now = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        match keys.pass_on(&mut |bytes| send(to, bytes, now).unwrap_or(0)) {
            Passed::On => {}
            Passed::Left(_) => return leave.add(),
            Passed::Ended if keys.is_terminal() => return leave.add(),
            Passed::Ended => return,
        }
    }
}
