//! Shows a feed: one refreshed line on a terminal, lines elsewhere, both on stderr. Neither waits
//! for its reader.

use super::line::{Line, short};
use super::terminal::Terminal;
use super::{Feed, Rates, Update};
use crate::output;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pageferry_migration::Phase;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The interval at which the feed is polled.
const POLL: Duration = Duration::from_millis(50);
/// The interval between two pictures of the spinner.
const TICK: Duration = Duration::from_millis(120);
/// The interval between plain lines about the progress of a step.
const LINE_EVERY: Duration = Duration::from_secs(2);

/// Shows a feed until it is finished or dropped. By then every earlier update was shown.
#[derive(Debug)]
pub(crate) struct Display {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Display {
    /// Shows `feed`, if the host has room for a thread.
    pub(crate) fn start(feed: &Arc<Feed>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (feed, stopped) = (Arc::clone(feed), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("progress".into())
            .spawn(move || {
                let mut screen: Box<dyn Screen> = if std::io::stderr().is_terminal() {
                    Box::new(Bar::new())
                } else {
                    Box::new(Lines::new())
                };
                loop {
                    let last = stopped.load(Ordering::Acquire);
                    feed.take()
                        .into_iter()
                        .for_each(|update| screen.show(update));
                    screen.refresh(feed.rates());
                    if last {
                        break screen.end();
                    }
                    std::thread::park_timeout(POLL);
                }
            });
        Self {
            stop,
            thread: thread.ok(),
        }
    }

    /// Shows the remaining updates and ends.
    pub(crate) fn finish(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        self.end();
    }
}

trait Screen {
    fn show(&mut self, update: Update);
    /// Shows what has changed by itself.
    fn refresh(&mut self, _rates: Option<Rates>) {}
    fn end(&mut self);
}

/// The progress of the destination's memory allocation, in words; empty once it is complete.
fn allocated(done: u64, total: u64) -> String {
    if done >= total {
        return String::new();
    }
    let percent = done as f64 * 100.0 / total as f64;
    format!("the destination has allocated {percent:.0} % of the memory")
}

/// One line that is refreshed, on a terminal.
struct Bar {
    bar: ProgressBar,
    line: Line,
}

impl Bar {
    fn new() -> Self {
        output::begin_progress();
        let target = ProgressDrawTarget::term_like_with_hz(Box::<Terminal>::default(), 20);
        let bar = ProgressBar::with_draw_target(None, target);
        let style = ProgressStyle::with_template("{spinner} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        Self {
            bar,
            line: Line::default(),
        }
    }

    fn begin(&mut self, step: String) {
        self.line = Line::of(step);
        self.bar.enable_steady_tick(TICK);
    }
}

impl Screen for Bar {
    fn show(&mut self, update: Update) {
        match update {
            Update::Phase(Phase::Completed) => {
                self.bar.disable_steady_tick();
                self.line = Line::default();
            }
            Update::Phase(phase) => self.begin(short(phase)),
            Update::Step(name) => self.begin(name),
            Update::Progress { done, total } => self.line.progress = Some((done, total)),
            Update::Allocated { done, total } => self.line.note = allocated(done, total),
            Update::Note(text) => output::note(&text),
        }
    }

    fn refresh(&mut self, rates: Option<Rates>) {
        // The spinner and its space, and the last column, which stays free: some terminals wrap
        // there.
        let width = usize::from(Terminal::size().0).saturating_sub(3);
        self.bar.set_message(self.line.show(rates, width));
    }

    fn end(&mut self) {
        self.bar.finish_and_clear();
        output::end_progress();
    }
}

/// One line per step, plus some lines about its progress.
struct Lines {
    began: Instant,
    step: String,
    said: Instant,
}

impl Lines {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            began: now,
            step: String::new(),
            said: now,
        }
    }

    fn say(&mut self, text: &str) {
        self.said = Instant::now();
        let at = self.began.elapsed().as_secs_f64();
        output::note(&format!("[{at:7.2} s] {text}"));
    }
}

impl Screen for Lines {
    fn show(&mut self, update: Update) {
        match update {
            Update::Phase(phase) => {
                self.step = phase.to_string();
                self.say(&self.step.clone());
            }
            Update::Step(name) => {
                self.say(&name);
                self.step = name;
            }
            Update::Progress { done, total } => {
                if self.said.elapsed() >= LINE_EVERY && total > 0 {
                    let percent = done.min(total) as f64 * 100.0 / total as f64;
                    self.say(&format!("{}: {percent:.0} %", self.step));
                }
            }
            Update::Allocated { done, total } => {
                if self.said.elapsed() >= LINE_EVERY {
                    self.say(&format!("{}: {}", self.step, allocated(done, total)));
                }
            }
            Update::Note(text) => self.say(&text),
        }
    }

    fn end(&mut self) {}
}
