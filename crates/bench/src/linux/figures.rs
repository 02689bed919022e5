//! What one start of Linux has told.

use super::CASES;
use super::lines::{Line, Splitter, UP, parse};
use crate::BenchError;
use std::collections::BTreeMap;
use std::time::Instant;

/// The figures of one start, complete when it is done.
pub(super) struct Figures {
    /// Nanoseconds by case.
    pub(super) ns: BTreeMap<&'static str, u64>,
    pub(super) loop_result: u64,
}

/// Collects the lines of a start.
pub(super) struct Listener {
    began: Instant,
    splitter: Splitter,
    ns: BTreeMap<&'static str, u64>,
    loop_result: u64,
    done: bool,
}

impl Listener {
    /// The machine is about to be started.
    pub(super) fn new() -> Self {
        Self {
            began: Instant::now(),
            splitter: Splitter::default(),
            ns: BTreeMap::new(),
            loop_result: 0,
            done: false,
        }
    }

    /// Takes text of the console. Returns whether the guest is done.
    ///
    /// # Errors
    /// As [`parse`].
    pub(super) fn take(&mut self, text: &[u8]) -> Result<bool, BenchError> {
        for line in self.splitter.take(text) {
            match parse(&line)? {
                Some(Line::Time(case, ns)) => {
                    self.ns.insert(case, ns);
                    if case == UP {
                        let wall = self.began.elapsed().as_nanos() as u64;
                        self.ns.insert("linux.up_wall", wall);
                    }
                }
                Some(Line::Loop(ns, result)) => {
                    self.ns.insert("linux.loop_time", ns);
                    self.loop_result = result;
                }
                Some(Line::Done) => self.done = true,
                Some(Line::Busy(_) | Line::Exit(_) | Line::Reads(..) | Line::Other) | None => {}
            }
        }
        Ok(self.done)
    }

    /// The figures.
    ///
    /// # Errors
    /// [`BenchError::Stopped`] if one is missing.
    pub(super) fn figures(self) -> Result<Figures, BenchError> {
        if let Some(case) = CASES.iter().find(|case| !self.ns.contains_key(*case)) {
            let why = format!("Linux has not told its '{case}'");
            return Err(BenchError::Stopped(why));
        }
        Ok(Figures {
            ns: self.ns,
            loop_result: self.loop_result,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_complete_or_the_missing_one_is_named() {
        let told = "noise\nPF up 1\nPF fork 2\nPF exec 3\nPF pipe 4\nPF touch 5\nPF loop 6 ff\n";
        let mut listener = Listener::new();
        assert!(!listener.take(told.as_bytes()).expect("good lines"));
        assert!(listener.take(b"PF done\n").expect("a good line"));
        let figures = listener.figures().expect("all are there");
        assert_eq!((figures.ns[UP], figures.loop_result), (1, 0xff));
        assert_eq!(figures.ns["linux.touch"], 5);
        for lacking in ["PF up 1\n", "PF pipe 4\n", "PF loop 6 ff\n"] {
            let mut listener = Listener::new();
            let text = told.replace(lacking, "");
            listener.take(text.as_bytes()).expect("good lines");
            assert!(listener.figures().is_err(), "{lacking}");
        }
    }
}
