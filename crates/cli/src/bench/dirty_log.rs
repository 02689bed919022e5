//! `pageferry bench dirty-log`: the cost of dirty logging with and without one lock around every
//! fault.

use super::args::DirtyLogFlags;
use super::show;
use crate::exit::{Exit, Failure};
use crate::output;
use pageferry_addr::PAGE_SIZE;
use pageferry_bench::dirty_log::{Config, DirtyBy, run};

/// Measures and prints.
///
/// # Errors
/// The failure of the measurement. Memory that is not whole pages is a usage error.
pub(super) fn dirty_log(flags: &DirtyLogFlags) -> Result<(), Failure> {
    if flags.memory == 0 || !flags.memory.is_multiple_of(PAGE_SIZE) {
        let message = format!(
            "--memory {} is not a multiple of the page size, {PAGE_SIZE} bytes",
            flags.memory
        );
        return Err(Failure::new(Exit::Usage, message));
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
    let report = run(config, &mut |doing| output::note(doing))?;
    show(&report, flags.json, None, |_| Ok(String::new()))
}
