//! The comparisons with other crates.

use crate::args::{SlotFlags, TableFlags};
use crate::output::Output;
use crate::{BenchError, slots, tables};

/// Compares memory slots, and prints the figures.
pub(super) fn slots(flags: &SlotFlags) -> Result<(), BenchError> {
    let rows = slots::run(&slot_config(flags))?;
    Output::from(rows).show(flags.common.json, None)
}

fn slot_config(flags: &SlotFlags) -> slots::Config {
    let mut config = if flags.quick {
        slots::Config::quick()
    } else {
        slots::Config::default()
    };
    if !flags.slots.is_empty() {
        config.sizes.clone_from(&flags.slots);
        config.sizes.sort_unstable();
        config.sizes.dedup();
    }
    config.rounds = flags.common.repeat.unwrap_or(config.rounds);
    config
}

/// Compares page tables, prints the figures, and writes the requested page.
pub(super) fn tables(flags: &TableFlags) -> Result<(), BenchError> {
    let config = if flags.quick {
        tables::Config::quick()
    } else {
        tables::Config::default()
    };
    let rounds = flags.common.repeat.unwrap_or(config.rounds);
    let rows = tables::run(&tables::Config { rounds, ..config })?;
    Output::from(rows).show(flags.common.json, flags.report.as_deref())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    #[test]
    fn what_is_asked_for_is_measured() {
        let config = |more: &[&str]| {
            let words = [&["pageferry-bench", "slots"], more].concat();
            match Cli::parse_from(words).command {
                Command::Slots(flags) => slot_config(&flags),
                other => panic!("slots is {other:?}"),
            }
        };
        let some = config(&["--quick", "--slots", "30,10,30", "--repeat", "2"]);
        assert_eq!((some.sizes, some.rounds), (vec![10, 30], 2));
        let all = config(&[]);
        assert_eq!((all.sizes.last(), all.rounds), (Some(&32_764), 15));
    }
}
