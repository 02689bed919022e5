//! Skips: a test that cannot run here says so where a reader sees it.
//!
//! **Guarantee.** A skip is never hidden by libtest's capture. A test that is required to run
//! fails instead.
//!
//! **Mechanism.** `PAGEFERRY_REQUIRE` lists the resources that must be usable. `PAGEFERRY_SKIPS`
//! names a file: each skip appends a line to it, and `cargo xtask test` sums them up at its end.
//! Without that file, the line goes to standard error past libtest, which captures only the
//! printing macros.
//!
//! **Neighbours.** `xtask/src/test.rs` reads the file.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;

/// Reports that a test is skipped because `resource` is not usable here, for the reason `why`.
///
/// Returns `true`, so that a test can say `if missing.is_some_and(|why| skip("kvm", why)) { return
/// }`.
///
/// # Panics
/// If `PAGEFERRY_REQUIRE` names `resource`.
#[track_caller]
pub fn skip(resource: &str, why: impl Display) -> bool {
    let required = std::env::var("PAGEFERRY_REQUIRE").unwrap_or_default();
    assert!(
        !required.split(',').any(|word| word == resource),
        "PAGEFERRY_REQUIRE names {resource}, which is not usable here: {why}"
    );
    let test = test_name();
    match std::env::var_os("PAGEFERRY_SKIPS") {
        Some(path) => {
            let why = why.to_string().replace(['\t', '\n'], " ");
            let line = format!("{resource}\t{test}\t{why}\n");
            let mut file = OpenOptions::new()
                .create(true)
                .append(true)
                .open(path)
                .unwrap();
            // One write: lines of tests that run at the same time do not mix.
            file.write_all(line.as_bytes()).unwrap();
        }
        None => {
            let line = format!("SKIPPED: {test}: {resource} is not usable here: {why}\n");
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    }
    true
}

/// The crate and the name of the calling test, or the place of the call where libtest has not named
/// the thread.
#[track_caller]
fn test_name() -> String {
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_default();
    let thread = std::thread::current();
    match thread.name().filter(|name| *name != "main") {
        Some(name) => format!("{package} {name}"),
        None => format!("{package} {}", std::panic::Location::caller()),
    }
}
