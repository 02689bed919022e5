//! `pageferry bench tdp`: second-stage page tables by themselves, beside other crates' page tables.

use super::json;
use crate::args::TdpFlags;
use crate::exit::{Exit, Failure};
use crate::output;
use crate::report;
use pageferry_peers::tables::{Config, RunError};

/// Measures, prints, and writes the page that was asked for.
///
/// # Errors
/// What the measurement failed at; a wrong translation is a failed verification.
pub(super) fn tdp(flags: &TdpFlags) -> Result<(), Failure> {
    let figures = pageferry_peers::tables::run(&config(flags), &mut |doing| output::note(doing))?;
    if let Some(path) = &flags.report {
        std::fs::write(path, report::tables_page(&figures))
            .map_err(|e| Failure::os(format!("cannot write {}", path.display()), e))?;
    }
    if flags.json {
        json(&figures)
    } else {
        output::result(&figures.to_string());
        Ok(())
    }
}

fn config(flags: &TdpFlags) -> Config {
    let config = if flags.quick {
        Config::quick()
    } else {
        Config::default()
    };
    let rounds = flags.repeat.unwrap_or(config.rounds);
    Config { rounds, ..config }
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Self {
        let exit = match error {
            RunError::Config { .. } => Exit::Usage,
            RunError::Wrong { .. } => Exit::Verification,
        };
        Self::new(exit, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_is_measured() {
        let config = |quick, repeat| {
            let (json, report) = (false, None);
            config(&TdpFlags {
                quick,
                repeat,
                json,
                report,
            })
        };
        assert_eq!(config(false, None).pages, 1 << 18, "a GiB");
        assert!(config(false, None).rounds >= 5);
        assert_eq!(config(true, Some(7)).rounds, 7);
        assert!(config(true, None).pages < config(false, None).pages);
    }
}
