//! `cargo xtask test`: all tests, and at the end what failed, what was slow and what could not run.
//!
//! **Guarantee.** The exit code is 0 only if every test program ended with success. A test that was
//! skipped is in the closing lines, with the resource that was missing. So is a test that took
//! longer than [`report::SLOW`].
//!
//! **Mechanism.** Cargo builds all test programs by one command, so every run has the same features
//! and shares one build. [`programs`] lists them. This module runs [`AT_ONCE`] of them at a time,
//! the longest first, and [`report`] reads what they print. Libtest knows no skip at run time:
//! `pageferry_testkit::skip` appends a line to the file that `PAGEFERRY_SKIPS` names, also from
//! child processes.
//!
//! **Neighbours.** `.ci/run` calls it; `testkit` writes the lines of skips.

mod programs;
mod report;

use programs::{Kind, Program};
use report::Report;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// The number of test programs that run at a time. Most wait now and then, and two fill two cores.
const AT_ONCE: usize = 2;

/// The examples, which cargo runs crate by crate.
const DOCUMENTATION: &str = "examples in the documentation";

/// Run the tests of all crates, and say at the end which could not run here and why
///
/// Those of the benchmarks run only if they are named: -p pageferry-bench.
#[derive(clap::Args)]
#[command(
    after_help = "PAGEFERRY_REQUIRE=kvm,uffd,fuse,linux,lab,netns,qemu makes a skip for want of these a failure. \
                  PAGEFERRY_ROTATION=N chooses the seeds of tests that run a part of them; \
                  the commit chooses N otherwise."
)]
pub(crate) struct Args {
    /// Run only the tests of this package; may be given several times
    #[arg(short, long, value_name = "NAME")]
    package: Vec<String>,
    /// Run only these tests of the packages: `lib`, `it`, `doc`
    #[arg(long, value_enum, value_name = "KIND", value_delimiter = ',')]
    only: Vec<Kind>,
    /// Build by this profile. With `stress`, an optimised one, only the crates whose tests stress
    /// or take random cases are built
    #[arg(long, default_value = "dev", value_name = "NAME")]
    profile: String,
    /// Print the twenty slowest tests and the seconds of each test program
    #[arg(long)]
    times: bool,
    /// Build the test programs, and print their package, kind and path instead of running them
    #[arg(long)]
    no_run: bool,
    /// Arguments for the test programs, such as a part of a test's name
    #[arg(last = true, value_name = "ARGUMENT")]
    arguments: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    match tests(args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("test: {why}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all tests passed.
fn tests(args: &Args) -> Result<bool, String> {
    let began = Instant::now();
    let mut programs = programs::build(&args.profile, &args.package)?;
    let built = began.elapsed();
    programs.retain(|program| args.wants(&program.package, program.kind));
    if programs.is_empty() && !args.wants_documentation() {
        return Err("no test program is of these packages and kinds: see --help".to_owned());
    }
    if args.no_run {
        for Program {
            package,
            kind,
            path,
            ..
        } in &programs
        {
            println!("{package} {kind} {}", path.display());
        }
        return Ok(true);
    }
    let environment = Environment::new();
    let report = Mutex::new(Report::new(built));
    let next = AtomicUsize::new(0);
    let run_all = || {
        while let Some(program) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
            run_program(program, args, &environment, &report);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(run_all);
        }
    });
    let mut report = report.into_inner().unwrap_or_else(PoisonError::into_inner);
    if args.wants_documentation() {
        let began = Instant::now();
        run_documentation(args, &environment, &mut report);
        report.program(DOCUMENTATION, began.elapsed());
    }
    let all_passed = report.all_passed();
    print!(
        "\n{}",
        report.text(args.times, &environment.skips(), &environment.rotation)
    );
    Ok(all_passed)
}

impl Args {
    fn wants(&self, package: &str, kind: Kind) -> bool {
        (self.package.is_empty() || self.package.iter().any(|name| name == package))
            && (self.only.is_empty() || self.only.contains(&kind))
    }

    /// Cargo refuses to look for examples in a package that has no library.
    fn wants_documentation(&self) -> bool {
        let all = self.only.is_empty() && self.package.is_empty();
        self.profile == "dev" && (all || self.only.contains(&Kind::Doc))
    }
}

/// The variables that tests read.
struct Environment {
    /// The file of the lines of skips.
    skips: PathBuf,
    rotation: String,
}

impl Environment {
    fn new() -> Self {
        let skips = std::env::temp_dir().join(format!("pageferry-skips-{}", std::process::id()));
        let rotation = std::env::var("PAGEFERRY_ROTATION");
        let rotation = rotation.unwrap_or_else(|_| rotation_of_commit().to_string());
        Self { skips, rotation }
    }

    fn give(&self, command: &mut Command) {
        command
            .env("PAGEFERRY_SKIPS", &self.skips)
            .env("PAGEFERRY_ROTATION", &self.rotation);
    }

    /// The lines of skips. There is no file if nothing was skipped.
    fn skips(&self) -> String {
        let lines = std::fs::read_to_string(&self.skips).unwrap_or_default();
        let _ = std::fs::remove_file(&self.skips);
        lines
    }
}

/// A number that the current commit determines, 0 outside a repository.
fn rotation_of_commit() -> u32 {
    let git = Command::new("git")
        .args(["rev-parse", "--short=7", "HEAD"])
        .current_dir(programs::root())
        .stderr(Stdio::null())
        .output();
    let commit = git.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    u32::from_str_radix(commit.unwrap_or_default().trim(), 16).unwrap_or(0)
}

/// Runs a test program, and prints its output when it has ended.
fn run_program(program: &Program, args: &Args, environment: &Environment, report: &Mutex<Report>) {
    let name = program.name();
    println!("     Running {name} ({})", program.path.display());
    let mut command = Command::new(&program.path);
    command
        .args(["-Z", "unstable-options", "--report-time"])
        // Libtest tells the times of tests only where unstable options are allowed.
        .env("RUSTC_BOOTSTRAP", "1")
        .args(&args.arguments)
        .current_dir(&program.folder)
        .env("CARGO_MANIFEST_DIR", &program.folder)
        .env("CARGO_PKG_NAME", &program.package);
    environment.give(&mut command);
    let began = Instant::now();
    let output = command.stdin(Stdio::null()).output();
    let mut report = report.lock().unwrap_or_else(PoisonError::into_inner);
    report.program(&name, began.elapsed());
    see(&name, output, &mut report);
}

/// Runs the examples in the documentation.
fn run_documentation(args: &Args, environment: &Environment, report: &mut Report) {
    let mut cargo = programs::cargo();
    cargo.args(["test", "--doc"]);
    if args.package.is_empty() {
        cargo.args(programs::workspace(&[]));
    }
    cargo.args(args.package.iter().flat_map(|name| ["-p", name]));
    cargo.arg("--").args(&args.arguments);
    environment.give(&mut cargo);
    println!("     Running {DOCUMENTATION}");
    see(DOCUMENTATION, cargo.stdin(Stdio::null()).output(), report);
}

/// Prints what a program printed, and notes its results.
fn see(name: &str, output: std::io::Result<Output>, report: &mut Report) {
    let output = match output {
        Ok(output) => output,
        Err(why) => return report.failed(format!("{name} cannot run: {why}")),
    };
    let stdout = String::from_utf8_lossy(&output.stdout);
    print!(
        "\n{name}:\n{}{stdout}",
        String::from_utf8_lossy(&output.stderr)
    );
    // Behind this line is what failed tests printed, which may have been tests of their own.
    for line in stdout.lines().take_while(|line| *line != "failures:") {
        report.line(name, line);
    }
    let is_result = |line: &&str| line.starts_with("test result: ");
    if name == DOCUMENTATION {
        let results = stdout.lines().filter(is_result);
        results.for_each(|line| report.result(line));
    } else if let Some(line) = stdout.lines().rfind(is_result) {
        report.result(line);
    }
    if !output.status.success() {
        report.failed(format!("{name}: {}", output.status));
    }
}
