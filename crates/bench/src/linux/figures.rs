//! What one start of Linux has told.

use super::lines::{Line, Splitter, Task, parse};
use crate::BenchError;
use std::collections::BTreeMap;
use std::time::Instant;

/// The figures of one start, complete when it is done.
pub(super) struct Figures {
    pub(super) up_ns: u64,
    /// From the start of the machine until this process has read the first line.
    pub(super) wall_ns: u64,
    pub(super) tasks_ns: BTreeMap<Task, u64>,
    pub(super) loop_ns: u64,
    pub(super) loop_result: u64,
}

/// Collects the lines of a start.
pub(super) struct Listener {
    began: Instant,
    splitter: Splitter,
    up: Option<(u64, u64)>,
    tasks_ns: BTreeMap<Task, u64>,
    looped: Option<(u64, u64)>,
    done: bool,
}

impl Listener {
    /// The machine is about to be started.
    pub(super) fn new() -> Self {
        Self {
            began: Instant::now(),
            splitter: Splitter::default(),
            up: None,
            tasks_ns: BTreeMap::new(),
            looped: None,
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
                Some(Line::Up(ns)) => {
                    self.up = Some((ns, self.began.elapsed().as_nanos() as u64));
                }
                Some(Line::Time(task, ns)) => drop(self.tasks_ns.insert(task, ns)),
                Some(Line::Loop { ns, result }) => self.looped = Some((ns, result)),
                Some(Line::Done) => self.done = true,
                Some(Line::Busy { .. } | Line::Exit(_) | Line::Reads { .. } | Line::Other)
                | None => {}
            }
        }
        Ok(self.done)
    }

    /// Whether the first process has run.
    pub(super) fn is_up(&self) -> bool {
        self.up.is_some()
    }

    /// The figures.
    ///
    /// # Errors
    /// [`BenchError::Stopped`] if one is missing.
    pub(super) fn figures(self) -> Result<Figures, BenchError> {
        let lacks = |what| BenchError::Stopped(format!("Linux has not told '{what}'"));
        let (up_ns, wall_ns) = self.up.ok_or_else(|| lacks("PF up"))?;
        let (loop_ns, loop_result) = self.looped.ok_or_else(|| lacks("PF loop"))?;
        if let Some(task) = Task::ALL
            .into_iter()
            .find(|task| !self.tasks_ns.contains_key(task))
        {
            return Err(lacks(task.case()));
        }
        Ok(Figures {
            up_ns,
            wall_ns,
            tasks_ns: self.tasks_ns,
            loop_ns,
            loop_result,
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
        assert_eq!((figures.up_ns, figures.loop_result), (1, 0xff));
        assert_eq!(figures.tasks_ns[&Task::Touch], 5);
        for lacking in ["PF up 1\n", "PF pipe 4\n", "PF loop 6 ff\n"] {
            let mut listener = Listener::new();
            let text = told.replace(lacking, "");
            listener.take(text.as_bytes()).expect("good lines");
            assert!(listener.figures().is_err(), "{lacking}");
        }
    }
}
