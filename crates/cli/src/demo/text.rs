//! The text of a guest's console, as lines with the times at which they were read.
//!
//! **Guarantee.** The text is the guest's, so it is never trusted: lines are bounded, and so is
//! their number. A guest that writes more than anybody takes waits at its console.
//!
//! **Mechanism.** A thread reads the console of a VM, or the standard output of a child that shows
//! its console there. It splits the bytes into lines and queues them.

use crate::exit::Failure;
use crate::report::ns;
use pageferry_machine::Console;
use pageferry_migration::monotonic;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// The most bytes of a line. The rest of a longer one is dropped.
pub(super) const LINE_MAX: usize = 256;
/// The most lines that wait for the demo.
const QUEUE: usize = 16 * 1024;
/// The longest wait for text before the thread looks whether it should end.
const INTERVAL: Duration = Duration::from_millis(20);

/// A line without its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    /// `CLOCK_MONOTONIC` when the end of the line was read, nanoseconds.
    pub(super) at_ns: u64,
    pub(super) text: Vec<u8>,
}

/// The bytes of a line whose end has not come.
#[derive(Debug, Default)]
struct Splitter {
    line: Vec<u8>,
}

impl Splitter {
    /// Adds bytes. Gives each line that they complete.
    fn add(&mut self, bytes: &[u8], mut give: impl FnMut(Vec<u8>)) {
        for &byte in bytes {
            match byte {
                b'\n' => give(std::mem::take(&mut self.line)),
                b'\r' => {}
                _ if self.line.len() < LINE_MAX => self.line.push(byte),
                _ => {}
            }
        }
    }
}

/// A thread that reads lines.
pub(super) struct Listener {
    lines: Receiver<Line>,
    heard: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<u8>>,
}

impl Listener {
    /// Reads the console of a VM until [`Listener::end`].
    ///
    /// # Errors
    /// When the host has no room for a thread.
    pub(super) fn of_console(console: &Arc<Console>) -> Result<Self, Failure> {
        let console = Arc::clone(console);
        Self::start(move |lines, stop| {
            loop {
                let last = stop.load(Ordering::Acquire);
                let text = console.read(INTERVAL);
                if (text.is_empty() && last) || !lines.add(&text) {
                    return;
                }
            }
        })
    }

    /// Reads a pipe until the other side closes it.
    ///
    /// # Errors
    /// When the host has no room for a thread.
    pub(super) fn of_pipe(mut pipe: impl Read + Send + 'static) -> Result<Self, Failure> {
        Self::start(move |lines, _| {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = pipe.read(&mut bytes) {
                if !lines.add(&bytes[..read]) {
                    return;
                }
            }
        })
    }

    fn start(
        read: impl FnOnce(&mut Sorter, &AtomicBool) + Send + 'static,
    ) -> Result<Self, Failure> {
        let (sender, lines) = sync_channel(QUEUE);
        let (heard, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let mut sorter = Sorter {
            splitter: Splitter::default(),
            sender,
            heard: Arc::clone(&heard),
        };
        let ours = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("console".into())
            .spawn(move || {
                read(&mut sorter, &ours);
                sorter.splitter.line
            })
            .map_err(|e| Failure::os("cannot start the console's thread", e))?;
        Ok(Self {
            lines,
            heard,
            stop,
            thread,
        })
    }

    /// The number of lines read so far.
    pub(super) fn heard(&self) -> u64 {
        self.heard.load(Ordering::Acquire)
    }

    /// The next line that has been read. `Err` if there will be no more.
    pub(super) fn take(&self) -> Result<Option<Line>, Closed> {
        match self.lines.try_recv() {
            Ok(line) => Ok(Some(line)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(Closed),
        }
    }

    /// Ends the thread when all that the guest has written is read. Returns the lines that nobody
    /// took, and the beginning of the next one.
    pub(super) fn end(self) -> (Vec<Line>, Vec<u8>) {
        self.stop.store(true, Ordering::Release);
        let mut rest = Vec::new();
        loop {
            match self.lines.recv_timeout(INTERVAL) {
                Ok(line) => rest.push(line),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return (rest, self.thread.join().unwrap_or_default());
                }
            }
        }
    }
}

/// There will be no more text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Closed;

/// Makes lines of bytes, and queues them.
struct Sorter {
    splitter: Splitter,
    sender: SyncSender<Line>,
    heard: Arc<AtomicU64>,
}

impl Sorter {
    /// Returns whether anybody still wants lines.
    fn add(&mut self, bytes: &[u8]) -> bool {
        let at_ns = ns(monotonic());
        let mut wanted = true;
        self.splitter.add(bytes, |text| {
            self.heard.fetch_add(1, Ordering::Release);
            wanted &= self.sender.send(Line { at_ns, text }).is_ok();
        });
        wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn split(pieces: &[&[u8]]) -> Vec<String> {
        let (mut splitter, mut lines) = (Splitter::default(), Vec::new());
        for piece in pieces {
            splitter.add(piece, |line| lines.push(String::from_utf8(line).unwrap()));
        }
        lines
    }

    #[test]
    fn lines_are_joined_from_pieces_and_cut_when_they_are_long() {
        assert_eq!(split(&[b"PF ti", b"ck 1 2\r", b"\nnext"]), ["PF tick 1 2"]);
        assert_eq!(split(&[b"\n\n"]), ["", ""]);
        let long = [vec![b'x'; 10_000], b"\nshort\n".to_vec()].concat();
        assert_eq!(split(&[&long]), ["x".repeat(LINE_MAX), "short".into()]);
    }

    #[test]
    fn a_console_is_read_to_its_end() {
        let console = Arc::<Console>::default();
        let listener = Listener::of_console(&console).unwrap();
        console.write(b"one\ntwo\nthr");
        let (lines, rest) = listener.end();
        let texts: Vec<&[u8]> = lines.iter().map(|line| &*line.text).collect();
        assert_eq!(texts, [b"one", b"two"]);
        assert_eq!(rest, b"thr");
    }

    #[test]
    fn a_pipe_that_is_closed_gives_its_lines_first() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let listener = Listener::of_pipe(reader).unwrap();
        writer.write_all(b"one\ntw").unwrap();
        drop(writer);
        let line = loop {
            match listener.take() {
                Ok(Some(line)) => break line,
                Ok(None) => std::thread::yield_now(),
                Err(Closed) => panic!("a line is missing"),
            }
        };
        assert_eq!(line.text, b"one");
        while listener.take() != Err(Closed) {
            std::thread::yield_now();
        }
        assert_eq!(listener.heard(), 1);
    }
}
