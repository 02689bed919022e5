//! A terminal for progress bars, which never waits for its reader.
//!
//! Each frame is one piece of diagnostics: a frame that the terminal does not take is dropped, and
//! a later one replaces it.

use crate::output;
use indicatif::TermLike;
use rustix::termios::tcgetwinsize;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The size of a terminal that does not say its own: columns and rows.
const DEFAULT_SIZE: (u16, u16) = (80, 24);

/// The terminal on stderr. What it is told waits for [`TermLike::flush`].
#[derive(Debug, Default)]
pub(super) struct Terminal {
    frame: Mutex<String>,
}

impl Terminal {
    fn frame(&self) -> MutexGuard<'_, String> {
        self.frame.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, text: &str) -> io::Result<()> {
        self.frame().push_str(text);
        Ok(())
    }

    /// A control sequence that moves the cursor by `by`, if that is not zero (ECMA-48, 8.3).
    fn move_cursor(&self, by: usize, direction: char) -> io::Result<()> {
        if by == 0 {
            return Ok(());
        }
        self.add(&format!("\x1b[{by}{direction}"))
    }

    fn size() -> (u16, u16) {
        match tcgetwinsize(io::stderr()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col, size.ws_row),
            _ => DEFAULT_SIZE,
        }
    }
}

impl TermLike for Terminal {
    fn width(&self) -> u16 {
        Self::size().0
    }

    fn height(&self) -> u16 {
        Self::size().1
    }

    fn move_cursor_up(&self, by: usize) -> io::Result<()> {
        self.move_cursor(by, 'A')
    }

    fn move_cursor_down(&self, by: usize) -> io::Result<()> {
        self.move_cursor(by, 'B')
    }

    fn move_cursor_right(&self, by: usize) -> io::Result<()> {
        self.move_cursor(by, 'C')
    }

    fn move_cursor_left(&self, by: usize) -> io::Result<()> {
        self.move_cursor(by, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.add(text)?;
        self.add("\n")
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.add(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.add("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        let frame = std::mem::take(&mut *self.frame());
        if !frame.is_empty() {
            output::diagnostics(frame.as_bytes());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_made_of_its_lines_and_moves() {
        let terminal = Terminal::default();
        terminal.move_cursor_up(0).unwrap();
        terminal.move_cursor_up(2).unwrap();
        terminal.clear_line().unwrap();
        terminal.write_line("bar").unwrap();
        terminal.write_str("rest").unwrap();
        assert_eq!(*terminal.frame(), "\x1b[2A\r\x1b[2Kbar\nrest");
        assert!(terminal.width() > 0 && terminal.height() > 0);
    }
}
