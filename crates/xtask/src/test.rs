//! `cargo xtask test`: all tests, and at the end a list of what could not run here.
//!
//! **Guarantee.** The exit code is that of `cargo test`. A test that was skipped is in the closing
//! lines, with the resource that was missing.
//!
//! **Mechanism.** Libtest knows no skip at run time. `pageferry_testkit::skip` appends a line to
//! the file that `PAGEFERRY_SKIPS` names, also from child processes. This command sums them up.
//!
//! **Neighbours.** `.ci/run` calls it; `testkit` writes the lines.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt::Write;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Run the tests of all crates, and say at the end which could not run here and why
///
/// Arguments after `--` go to `cargo test --workspace`.
#[derive(clap::Args)]
#[command(
    after_help = "PAGEFERRY_REQUIRE=kvm,uffd,fuse,linux,lab,netns,qemu makes a skip for want of these a failure."
)]
pub(crate) struct Args {
    /// What `cargo test` gets besides
    #[arg(last = true, value_name = "ARGUMENT")]
    arguments: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let skips = std::env::temp_dir().join(format!("pageferry-skips-{}", std::process::id()));
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["test", "--workspace"])
        .args(&args.arguments)
        .current_dir(root)
        .env("PAGEFERRY_SKIPS", &skips);
    let status = cargo.status();
    let lines = std::fs::read_to_string(&skips).unwrap_or_default();
    // There is no such file if nothing was skipped.
    let _ = std::fs::remove_file(&skips);
    print!("\n{}", summary(&lines));
    match status {
        Ok(status) => ExitCode::from(
            status
                .code()
                .and_then(|code| code.try_into().ok())
                .unwrap_or(1),
        ),
        Err(why) => {
            eprintln!("cannot run {}: {why}", env!("CARGO"));
            ExitCode::FAILURE
        }
    }
}

/// The closing lines. Each line of `skips` has a resource, a test and a reason, with tabs between.
fn summary(skips: &str) -> String {
    let mut by_resource: BTreeMap<&str, (BTreeSet<&str>, &str)> = BTreeMap::new();
    let mut tests = BTreeSet::new();
    for line in skips.lines() {
        let mut fields = line.splitn(3, '\t');
        let (Some(resource), Some(test)) = (fields.next(), fields.next()) else {
            continue;
        };
        let why = fields.next().unwrap_or_default();
        tests.insert(test);
        by_resource
            .entry(resource)
            .or_insert_with(|| (BTreeSet::new(), why))
            .0
            .insert(test);
    }
    if tests.is_empty() {
        return "Nothing was skipped.\n".to_owned();
    }
    let mut text = format!("SKIPPED, in part or whole: {}\n", count(tests.len()));
    for (resource, (tests, why)) in by_resource {
        let _ = writeln!(text, "  {resource}: {}. {why}", count(tests.len()));
    }
    text
}

fn count(tests: usize) -> String {
    format!("{tests} {}", if tests == 1 { "test" } else { "tests" })
}

#[cfg(test)]
mod tests {
    use super::summary;

    #[test]
    fn skips_are_summed_up_by_resource_and_tests_are_counted_once() {
        let lines = "kvm\ta one\tno /dev/kvm\nlab\ta one\tno lab\nkvm\tb two\tno /dev/kvm\n\
                     kvm\ta one\tno /dev/kvm\n";
        assert_eq!(
            summary(lines),
            "SKIPPED, in part or whole: 2 tests\n  kvm: 2 tests. no /dev/kvm\n  lab: 1 test. no lab\n"
        );
    }

    #[test]
    fn a_run_without_skips_says_so_and_a_torn_line_is_passed_over() {
        assert_eq!(summary(""), "Nothing was skipped.\n");
        assert_eq!(summary("kvm"), "Nothing was skipped.\n");
    }
}
