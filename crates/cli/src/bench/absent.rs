//! `pageferry bench` in a build without benchmarks: it explains how to get them.

use crate::exit::{Exit, Failure};
use clap::Args;
use std::ffi::OsString;

/// All words after `bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

/// Explains how to get the benchmarks.
///
/// # Errors
/// Always.
pub(crate) fn bench(args: &BenchArgs) -> Result<(), Failure> {
    let wanted: Vec<_> = args
        .words
        .iter()
        .map(|word| word.to_string_lossy())
        .collect();
    Err(Failure::new(
        Exit::Usage,
        format!(
            "this pageferry was built without benchmarks: `cargo run --release --features bench -- bench {}` has them",
            wanted.join(" ")
        )
        .trim_end()
        .to_owned(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    #[test]
    fn any_benchmark_says_how_to_get_it() {
        let words = ["pageferry", "bench", "link", "--repeat", "3"];
        let Command::Bench(args) = Cli::parse_from(words).command else {
            panic!("bench is not bench");
        };
        let failure = bench(&args).expect_err("there are none");
        assert_eq!(failure.exit, Exit::Usage);
        assert!(
            failure
                .message
                .contains("--features bench -- bench link --repeat 3"),
            "{failure}"
        );
    }
}
