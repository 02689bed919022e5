//! A guest's text console, at the user's terminal or in a file.
//!
//! **Guarantee.** No reader of the console stops the guest. A reader that is slow loses nothing:
//! the guest waits for it. Once a reader has taken nothing for [`PATIENCE`], the newest text is
//! dropped until it takes some again. Dropped bytes are counted and told on stderr.
//!
//! **Mechanism.** A thread moves what the guest writes to a [`Sink`]. If the console is the
//! terminal, another thread sends what the user types. The terminal then passes on each key
//! ([`terminal`](crate::terminal)), since the guest does the rest. Ctrl-] does what Ctrl-C does
//! without a guest.

use crate::args::ConsoleTarget;
use crate::exit::{Exit, Failure};
use crate::keys::{Keys, Passed};
use crate::output;
use crate::signals::Interrupts;
use crate::sink::{Sink, To};
use crate::terminal::Terminal;
use pageferry_machine::Console;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest wait for text before the thread looks whether it should end.
const INTERVAL: Duration = Duration::from_millis(50);
/// How long the guest waits for a reader that takes nothing, before its text is dropped.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);
/// The most bytes that wait for the reader of a file.
const CAPACITY: usize = 256 << 10;

/// The bytes that the consoles of this process have dropped.
static LOST: AtomicU64 = AtomicU64::new(0);

/// The bytes of console text that were dropped so far.
pub(crate) fn lost_bytes() -> u64 {
    LOST.load(Ordering::Relaxed)
}

/// Shows a console, until it is dropped. All that the guest wrote until then is shown, unless the
/// reader takes nothing for [`PATIENCE`].
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
    /// [`Exit::Usage`] when the file cannot be created, or is a FIFO that nobody reads.
    pub(crate) fn start(
        console: &Arc<Console>,
        target: &ConsoleTarget,
        interrupts: &Interrupts,
    ) -> Result<Self, Failure> {
        let cannot = |e| Failure::os("cannot start the console's thread", e);
        let to = match target {
            ConsoleTarget::Stdio => output::stdout()
                .ok_or_else(|| Failure::os("cannot show the console", "there is no output"))?,
            ConsoleTarget::File(path) => {
                let file = To::File(create(path)?);
                Sink::start("console-file", file, CAPACITY, |_| String::new()).map_err(cannot)?
            }
        };
        let stop = Arc::new(AtomicBool::new(false));
        let (ours, from) = (Arc::clone(&stop), Arc::clone(console));
        let is_file = *target != ConsoleTarget::Stdio;
        let writer = std::thread::Builder::new()
            .name("console".into())
            .spawn(move || {
                show(&from, &to, &ours);
                if is_file {
                    to.close();
                }
            })
            .map_err(cannot)?;
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
                .map_err(cannot)?;
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

/// Creates the file of a console. Opening a FIFO does not wait for its reader.
fn create(path: &Path) -> Result<File, Failure> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true);
    let opened = options.custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    opened.open(path).map_err(|e| {
        let why = match e.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::NXIO) => "nobody reads this FIFO yet: start its reader first".to_owned(),
            _ => e.to_string(),
        };
        let path = path.display();
        Failure::new(
            Exit::Usage,
            format!("cannot create the console {path}: {why}"),
        )
    })
}

/// Writes what the guest writes, until `stop` holds. A guest may go on for ever after that.
fn show(console: &Console, to: &Sink, stop: &AtomicBool) {
    let mut losses = Losses::default();
    loop {
        let last = stop.load(Ordering::Acquire);
        let text = console.read(INTERVAL);
        if !text.is_empty() {
            to.push(&text, PATIENCE);
        }
        losses.look(to);
        if last {
            break;
        }
    }
    let deadline = Instant::now() + PATIENCE;
    to.drain(&|| Instant::now() >= deadline);
    losses.look(to);
}

/// The losses of a console that its user was told of.
#[derive(Debug, Default)]
struct Losses {
    /// The lost bytes at the last look, and those told as a number.
    seen: u64,
    told: u64,
    /// The progress of the reader when bytes were lost.
    progress: u64,
}

impl Losses {
    /// Tells that text is being dropped, and how much it was once the reader goes on.
    fn look(&mut self, to: &Sink) {
        let (lost, progress) = to.losses();
        if lost > self.seen {
            if self.seen == self.told {
                let why = match to.first_error() {
                    Some(why) => format!("it cannot be written: {why}"),
                    None => format!("its reader has taken nothing for {} s", PATIENCE.as_secs()),
                };
                output::note(&format!("text of the console is dropped: {why}"));
            }
            LOST.fetch_add(lost - self.seen, Ordering::Relaxed);
            (self.seen, self.progress) = (lost, progress);
        } else if self.seen > self.told && progress > self.progress {
            let bytes = self.seen - self.told;
            output::note(&format!(
                "{bytes} bytes of the console were dropped; it is shown again"
            ));
            self.told = self.seen;
        }
    }
}

/// Sends what the user types, until `stop` holds or standard input ends.
fn type_in(console: &Console, interrupts: &Interrupts, stop: &AtomicBool) {
    let mut keys = Keys::new();
    while !stop.load(Ordering::Acquire) {
        match keys.pass_on(&mut |bytes| console.send(bytes)) {
            Passed::On => {}
            Passed::Left(times) => (0..times).for_each(|_| interrupts.add()),
            Passed::Ended => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_hostfs::Folder;
    use pageferry_testkit::{LIMIT, wait_until};
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::io::Read;

    #[test]
    fn a_reader_that_stopped_reading_does_not_stop_the_guest() {
        let dir = Folder::within(&std::env::temp_dir()).unwrap();
        let path = dir.path().join("console");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let (console, target) = (Arc::default(), ConsoleTarget::File(path.clone()));
        let nobody = Interrupts::default();
        let none = Shown::start(&console, &target, &nobody)
            .err()
            .expect("no reader");
        assert_eq!(none.exit, Exit::Usage);
        assert!(none.message.contains("start its reader first"), "{none}");
        let mut reader = File::options()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open(&path)
            .unwrap();
        let shown = Shown::start(&console, &target, &nobody).unwrap();
        let mut piece = vec![0; 64 << 10];
        // Before it is read for the first time, a console keeps its newest text alone.
        console.write(b"first");
        wait_until("the first text", || {
            reader.read(&mut piece).is_ok_and(|taken| taken == 5)
        });
        let began = Instant::now();
        // The guest writes far more than all queues hold.
        let mut left = 2 << 20;
        while left > 0 {
            assert!(began.elapsed() < LIMIT, "the guest waits for ever");
            match console.write(&vec![b'x'; left.min(4096)]) {
                0 => std::thread::sleep(Duration::from_millis(1)),
                taken => left -= taken,
            }
        }
        wait_until("a count of the loss", || lost_bytes() > 0);
        // It is shown again once somebody reads.
        wait_until("new text", || {
            console.write(b"again\n");
            let taken = reader.read(&mut piece).unwrap_or(0);
            piece[..taken].ends_with(b"again\n")
        });
        drop(shown);
    }
}
