//! A guest's text console, at the user's terminal or in a file.
//!
//! A thread writes what the guest writes. If the console is the terminal, another thread sends what
//! the user types. The terminal then neither echoes nor waits for whole lines, since the guest does
//! that. Ctrl-C still ends the command.

use crate::args::ConsoleTarget;
use crate::exit::{Exit, Failure};
use crate::output;
use pageferry_machine::Console;
use rustix::termios::{LocalModes, OptionalActions, Termios, isatty, tcgetattr, tcsetattr};
use std::fs::File;
use std::io::{Read, Write, stdin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// The longest wait for text before the thread looks whether it should end.
const INTERVAL: Duration = Duration::from_millis(50);

/// Shows a console, until it is dropped. All that the guest wrote until then is shown.
pub(crate) struct Shown {
    stop: Arc<AtomicBool>,
    writer: Option<JoinHandle<()>>,
    /// The terminal's settings from before.
    terminal: Option<Termios>,
}

impl Shown {
    /// Shows `console` at `target`.
    ///
    /// # Errors
    /// [`Exit::Usage`] when the file cannot be created.
    pub(crate) fn start(console: &Arc<Console>, target: &ConsoleTarget) -> Result<Self, Failure> {
        let mut to: Box<dyn Write + Send> = match target {
            ConsoleTarget::Stdio => Box::new(std::io::stdout()),
            ConsoleTarget::File(path) => Box::new(File::create(path).map_err(|e| {
                let path = path.display();
                Failure::new(
                    Exit::Usage,
                    format!("cannot create the console {path}: {e}"),
                )
            })?),
        };
        let stop = Arc::new(AtomicBool::new(false));
        let (ours, from) = (Arc::clone(&stop), Arc::clone(console));
        let writer = std::thread::Builder::new()
            .name("console".into())
            .spawn(move || show(&from, &mut to, &ours))
            .map_err(|e| Failure::os("cannot start the console's thread", e))?;
        let mut shown = Self {
            stop,
            writer: Some(writer),
            terminal: None,
        };
        if *target == ConsoleTarget::Stdio {
            shown.terminal = take_terminal();
            let to = Arc::clone(console);
            // It ends with standard input, or with the process.
            std::thread::Builder::new()
                .name("keys".into())
                .spawn(move || type_in(&to))
                .map_err(|e| Failure::os("cannot start the console's thread", e))?;
        }
        Ok(shown)
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
        if let Some(before) = &self.terminal {
            let _ = tcsetattr(stdin(), OptionalActions::Now, before);
        }
    }
}

/// Writes what the guest writes, until `stop` holds and there is no more.
fn show(console: &Console, to: &mut dyn Write, stop: &AtomicBool) {
    let mut failed = false;
    loop {
        let last = stop.load(Ordering::Acquire);
        let text = console.read(INTERVAL);
        if text.is_empty() && last {
            return;
        }
        if failed {
            continue;
        }
        if let Err(error) = to.write_all(&text).and_then(|()| to.flush()) {
            // The guest runs on. Its text is dropped, so that it does not wait.
            output::note(&format!("the console cannot be written any more: {error}"));
            failed = true;
        }
    }
}

/// Lets the guest see each key. Returns the settings from before, if standard input is a terminal.
fn take_terminal() -> Option<Termios> {
    if !isatty(stdin()) {
        return None;
    }
    let before = tcgetattr(stdin()).ok()?;
    let mut keys = before.clone();
    keys.local_modes
        .remove(LocalModes::ECHO | LocalModes::ICANON);
    tcsetattr(stdin(), OptionalActions::Now, &keys).ok()?;
    Some(before)
}

/// Sends what the user types.
fn type_in(console: &Console) {
    let mut bytes = [0; 1024];
    while let Ok(read @ 1..) = stdin().lock().read(&mut bytes) {
        let mut rest = &bytes[..read];
        while !rest.is_empty() {
            rest = &rest[console.send(rest)..];
            if !rest.is_empty() {
                std::thread::sleep(INTERVAL);
            }
        }
    }
}
