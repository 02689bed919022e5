//! `pageferry bench memslot`: memory slots on our hypervisor, or by themselves beside other crates.

use super::json;
use crate::args::MemslotFlags;
use crate::exit::{Exit, Failure};
use crate::output;
use crate::report;
use pageferry_bench::memslot::MemslotSetting;
use pageferry_peers::{Config, RunError};

/// Measures, prints, and writes the page that was asked for.
///
/// # Errors
/// What the measurement failed at; a wrong value of a guest is a failed verification.
pub(super) fn memslot(flags: &MemslotFlags) -> Result<(), Failure> {
    if flags.micro {
        return micro(flags);
    }
    let figures = pageferry_bench::memslot::memslot(&setting(flags), &mut |doing| {
        output::note(doing);
    })?;
    if let Some(path) = &flags.report {
        let page = report::slots_page(&figures).map_err(|why| {
            Failure::new(Exit::Internal, format!("cannot draw the report: {why}"))
        })?;
        std::fs::write(path, page)
            .map_err(|e| Failure::os(format!("cannot write {}", path.display()), e))?;
    }
    if flags.json {
        json(&figures)
    } else {
        output::result(&figures.to_string());
        Ok(())
    }
}

fn setting(flags: &MemslotFlags) -> MemslotSetting {
    let mut setting = if flags.quick {
        MemslotSetting::quick(flags.repeat)
    } else {
        MemslotSetting::full(flags.repeat)
    };
    if !flags.slots.is_empty() {
        setting.sizes.clone_from(&flags.slots);
        setting.sizes.sort_unstable();
        setting.sizes.dedup();
    }
    let required = std::env::var("PAGEFERRY_REQUIRE").unwrap_or_default();
    setting.require_kvm = required.split(',').any(|word| word == "kvm");
    setting
}

fn micro(flags: &MemslotFlags) -> Result<(), Failure> {
    let mut config = if flags.quick {
        Config::quick()
    } else {
        Config::default()
    };
    if !flags.slots.is_empty() {
        config.sizes.clone_from(&flags.slots);
        config.sizes.sort_unstable();
        config.sizes.dedup();
    }
    config.rounds = config.rounds.max(flags.repeat);
    let figures = pageferry_peers::run(&config, &mut |doing| output::note(doing))?;
    if flags.json {
        json(&figures)
    } else {
        output::result(&figures.to_string());
        Ok(())
    }
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Self {
        let exit = match error {
            RunError::Slots(_) | RunError::Nothing => Exit::Usage,
            _ => Exit::Internal,
        };
        Self::new(exit, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags() -> MemslotFlags {
        MemslotFlags {
            quick: true,
            slots: Vec::new(),
            repeat: 4,
            micro: false,
            json: false,
            report: None,
        }
    }

    #[test]
    fn quick_has_two_sizes_unless_others_are_named() {
        let setting = setting(&flags());
        assert_eq!((setting.sizes, setting.repeat), (vec![10, 509], 4));
        let named = MemslotFlags {
            slots: vec![30, 10, 30],
            ..flags()
        };
        assert_eq!(super::setting(&named).sizes, [10, 30]);
        let full = MemslotFlags {
            quick: false,
            ..flags()
        };
        assert_eq!(super::setting(&full).sizes.last(), Some(&32_764));
    }
}
