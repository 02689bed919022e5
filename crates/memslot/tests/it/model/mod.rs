//! Operations on a table, compared with a plain model: every look-up, at every version that a
//! reader still uses.

mod again;
pub(crate) mod driver;
mod forms;
mod full;
mod old_views;
pub(crate) mod plain;
pub(crate) mod random;
mod tiny;

use proptest::test_runner::Config;

/// A configuration with `cases` cases, unless the environment sets another number.
fn cases(cases: u32) -> Config {
    let asked = std::env::var_os("PROPTEST_CASES").is_some();
    let default = Config::default();
    Config {
        cases: if asked { default.cases } else { cases },
        failure_persistence: None,
        ..default
    }
}
