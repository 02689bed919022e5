//! `pageferry-bench dirty-log`: the cost of dirty logging with and without one lock around every
//! fault.

use crate::BenchError;
use crate::args::DirtyLogFlags;
use crate::dirty_log::{Config, DirtyBy, run};
use crate::output::Output;
use pageferry_addr::PAGE_SIZE;

/// Measures and prints.
pub(super) fn dirty_log(flags: &DirtyLogFlags) -> Result<(), BenchError> {
    if flags.memory == 0 || !flags.memory.is_multiple_of(PAGE_SIZE) {
        let message = format!(
            "--memory {} is not a multiple of the page size, {PAGE_SIZE} bytes",
            flags.memory
        );
        return Err(BenchError::Setting(message));
    }
    let config = Config {
        vcpus: flags.vcpus,
        pages: flags.memory / PAGE_SIZE,
        rounds: flags.repeat,
        dirty_by: if flags.dirty_bits {
            DirtyBy::Bits
        } else {
            DirtyBy::WriteProtection
        },
        ..Config::default()
    };
    Output::from(run(config)?).show(flags.json, None)
}
