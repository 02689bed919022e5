//! `cargo xtask lab`: a command under a real TDP MMU, on any x86-64 Linux machine.
//!
//! **Guarantee.** The command's output and exit code are this command's own. A run ends at the
//! latest when the emulator has used its CPU time, or has been idle for [`machine::IDLE_LIMIT`].
//!
//! **Mechanism.** QEMU emulates a CPU with SVM and nested paging, without `/dev/kvm`. A stock
//! kernel boots there and loads kvm-amd, so the command finds a `/dev/kvm` with the TDP MMU.
//! [`packages`] gets the emulator and the kernel, [`program`] finds what the command needs,
//! [`extra`] what the user adds, [`initrd`] packs it, and [`machine`] runs it.
//!
//! The emulated clock counts instructions by default. A busy host then makes no time limit fire
//! inside, and a figure repeats from run to run; it is an instruction count and no time.

mod cache;
mod extra;
pub(crate) mod initrd;
pub(crate) mod kernel;
mod machine;
pub(crate) mod packages;
mod program;

pub(crate) use cache::Cache;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// The exit code of a run that the lab itself could not make.
const FAILED: u8 = 125;

/// Run a command in an emulated machine whose KVM has nested paging (the TDP MMU)
///
/// COMMAND is a program of this machine with its arguments; the lab gets it with its libraries.
/// `cargo test ...` builds the tests here and runs them there. Variables named PAGEFERRY_*, RUST_*
/// and PROPTEST_* are passed on.
#[derive(clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "Exit codes: those of COMMAND; 124 if the CPU time is used up or the machine \
                        is idle; 125 if the lab cannot run."
)]
pub(crate) struct Args {
    #[command(subcommand)]
    task: Option<Task>,
    /// Boot this kernel, with the modules in lib/modules beside its boot folder or built in;
    /// "userfault" is the one that `lab kernel` builds
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// The most CPU time that the emulator may use, in seconds
    #[arg(long, value_name = "N", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    cpu_seconds: u64,
    /// Memory of the emulated machine, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 3072, value_parser = clap::value_parser!(u64).range(256..=1_048_576))]
    memory: u64,
    /// Load kvm-amd without nested paging, so that KVM uses shadow paging
    #[arg(long)]
    shadow: bool,
    /// Let the emulated clock follow the host's instead of counting instructions
    #[arg(long)]
    real_time: bool,
    /// Put a file or a folder of this machine into the emulated one, at its own path or at the
    /// absolute path DEST; may be given several times
    #[arg(long, value_name = "SRC[:DEST]")]
    file: Vec<String>,
    /// The command and its arguments
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// The tasks of the lab beside running commands.
#[derive(clap::Subcommand)]
enum Task {
    Kernel(kernel::Args),
}

/// Why the lab could not run a command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot {what}: {source}")]
    Io {
        what: String,
        source: std::io::Error,
    },
    #[error("{0}")]
    Failed(String),
}

impl Error {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io {
            what: what.into(),
            source,
        }
    }
}

/// Runs the command. Returns its exit code, or what the help says.
pub(crate) fn run(args: &Args, no_cache: bool) -> ExitCode {
    let outcome = Cache::new(no_cache).and_then(|cache| match &args.task {
        Some(Task::Kernel(args)) => kernel::run(args, &cache).map(|()| 0),
        None => in_lab(args, &cache),
    });
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("lab: {error}");
            ExitCode::from(FAILED)
        }
    }
}

fn in_lab(args: &Args, cache: &Cache) -> Result<u8, Error> {
    // A mistake in the arguments is found before anything is fetched.
    let files = extra::files(&args.file)?;
    let programs = program::find(&args.command)?;
    let mut parts = packages::components(cache.folder())?;
    match &args.kernel {
        Some(name) if name == "userfault" => parts.set_kernel(&kernel::userfault(cache)?)?,
        Some(file) => parts.set_kernel(file)?,
        None => {}
    }
    let initrd = initrd::Initrd {
        parts: &parts,
        programs: &programs,
        files: &files,
        kvm_amd_options: if args.shadow { "npt=0" } else { "" },
    };
    // A file of this process's own: several labs may run at once.
    let file = std::env::temp_dir().join(format!("pageferry-initrd-{}", std::process::id()));
    let written = initrd.write(&file);
    let outcome = written.and_then(|()| {
        machine::Machine {
            parts: &parts,
            initrd: &file,
            memory_mib: args.memory,
            cpu_seconds: args.cpu_seconds,
            counts_instructions: !args.real_time,
            kvm_amd_option: if args.shadow { "kvm_amd.npt=0" } else { "" },
            commands: programs.commands.len(),
        }
        .run()
    });
    let _ = std::fs::remove_file(&file);
    outcome
}

/// The target directory of the workspace.
pub(crate) fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target"),
        PathBuf::from,
    )
}
