//! Log lines on stderr, for operators who look for the cause of something.
//!
//! Messages of the commands do not depend on this: see [`output`]. Lines go the same
//! way: they never block the thread that logs, nor fail it.

use crate::exit::{Exit, Failure};
use crate::output;
use crate::wall_clock;
use std::io;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;

/// The variable that chooses the level if no flag does.
const VARIABLE: &str = "PAGEFERRY_LOG";

/// Parses a level.
pub(crate) fn level(text: &str) -> Result<LevelFilter, String> {
    match text {
        "off" => Ok(LevelFilter::OFF),
        "error" => Ok(LevelFilter::ERROR),
        "warn" => Ok(LevelFilter::WARN),
        "info" => Ok(LevelFilter::INFO),
        "debug" => Ok(LevelFilter::DEBUG),
        _ => Err(format!(
            "unknown level '{text}': expected off, error, warn, info or debug"
        )),
    }
}

/// Times of the wall clock.
struct Wall;

impl FormatTime for Wall {
    fn format_time(&self, to: &mut Writer<'_>) -> std::fmt::Result {
        to.write_str(&wall_clock::now())
    }
}

/// A line on its way to stderr. A line is one write.
struct Line;

impl io::Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        output::diagnostics(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Begins to log: at the level of the flag, or of the variable `PAGEFERRY_LOG`, or warnings.
///
/// # Errors
/// [`Exit::Usage`] for a level in the variable that does not exist.
pub(crate) fn start(flag: Option<LevelFilter>) -> Result<(), Failure> {
    let chosen = match (flag, std::env::var(VARIABLE)) {
        (Some(level), _) => level,
        (None, Ok(text)) if !text.is_empty() => {
            level(&text).map_err(|e| Failure::new(Exit::Usage, format!("{VARIABLE}: {e}")))?
        }
        (None, _) => LevelFilter::WARN,
    };
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(chosen)
        .with_timer(Wall)
        .with_ansi(false)
        .with_writer(|| Line)
        // They would go to stderr by `eprintln!`, which panics.
        .log_internal_errors(false)
        .finish();
    tracing::subscriber::set_global_default(subscriber)
        .map_err(|e| Failure::os("cannot begin to log", e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_levels_are_taken() {
        assert_eq!(level("info"), Ok(LevelFilter::INFO));
        for bad in ["", "INFO", "trace", "5", "info,debug"] {
            assert!(level(bad).unwrap_err().contains("expected off"), "{bad}");
        }
    }
}
