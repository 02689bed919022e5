//! A guest's text console, at the user's terminal or in a file.
//!
//! A thread writes what the guest writes. If the console is the terminal, another thread sends what
//! the user types. The terminal then passes on each key ([`terminal`](crate::terminal)), since the
//! guest does the rest. Ctrl-] does what Ctrl-C does without a guest.

use crate::args::ConsoleTarget;
use crate::exit::{Exit, Failure};
use crate::keys::{Keys, Passed};
use crate::output;
use crate::signals::Interrupts;
use crate::terminal::Terminal;
use pageferry_machine::Console;
use std::fs::File;
use std::io::Write;
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
    /// The terminal, if standard input is one.
    terminal: Option<Terminal>,
}

impl Shown {
    /// Shows `console` at `target`. On a terminal, Ctrl-] counts as one of `interrupts`.
    ///
    /// # Errors
    /// [`Exit::Usage`] when the file cannot be created.
    pub(crate) fn start(
        console: &Arc<Console>,
        target: &ConsoleTarget,
        interrupts: &Interrupts,
    ) -> Result<Self, Failure> {
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
            shown.terminal = Terminal::take();
            if shown.terminal.is_some() {
                output::note(
                    "all keys go to the guest, except Ctrl-], which does what Ctrl-C does elsewhere",
                );
            }
            let (to, interrupts) = (Arc::clone(console), interrupts.clone());
            let stop = Arc::clone(&shown.stop);
            // Nobody waits for it, since a read may last for ever.
            std::thread::Builder::new()
                .name("keys".into())
                .spawn(move || type_in(&to, &interrupts, &stop))
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
        // The text of the guest is out.
        self.terminal = None;
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

/// Sends what the user types, until `stop` holds or standard input ends.
fn type_in(console: &Console, interrupts: &Interrupts, stop: &AtomicBool) {
    let mut keys = Keys::new();
    while !stop.load(Ordering::Acquire) {
        match keys.pass_on(&mut |bytes| console.send(bytes)) {
            Passed::On => {}
            Passed::Left => interrupts.add(),
            Passed::Ended => return,
        }
    }
}
