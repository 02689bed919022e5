//! `cargo xtask guest-linux`: a Linux for guests of the soft engine.
//!
//! **Guarantee.** The kernel is Debian's source without a patch, verified by apt, for the
//! instructions that the soft engine has. Kernel and archive are what the files of
//! `lab/guest-linux` make now. Nothing is compiled if they have not changed.
//!
//! **Mechanism.** The lab's build of kernels, with a compiler for RISC-V that apt fetches into the
//! cache. The first process is compiled against the kernel's own nolibc, so it needs no C library.
//!
//! **Neighbours.** [`crate::lab::kernel`] compiles the kernel, [`crate::lab::initrd`] has the format
//! of the archive, [`shell`] builds a second archive with a shell.

mod shell;

use crate::lab::initrd::Archive;
use crate::lab::kernel::{Build, Compiler, Target};
use crate::lab::{Error, target_dir};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// The exit code when there is no guest.
const FAILED: u8 = 125;

const COMPILER: Compiler = Compiler {
    prefix: "riscv64-linux-gnu-",
    // Where a package that they depend on is installed, that one is used.
    packages: &["gcc-riscv64-linux-gnu", "binutils-riscv64-linux-gnu"],
};
/// The instructions of the soft engine's hart.
const FLAGS: [&str; 2] = ["-march=rv64ima_zicsr_zifencei", "-mabi=lp64"];
static GUEST: Target = Target {
    folder: "guest",
    arch: "riscv",
    goals: &["Image", "modules"],
    image: "arch/riscv/boot/Image",
    compiler: Some(COMPILER),
};
/// The kernel's torture tests.
const MODULES: [&str; 3] = [
    "kernel/torture.ko",
    "kernel/rcu/rcutorture.ko",
    "kernel/locking/locktorture.ko",
];

/// Build a Linux for guests of the soft engine, and print its folder
///
/// The folder has a kernel (Image), a shell with the usual commands (shell.gz), and a first process
/// (initrd.gz) for tests, for `pageferry demo --guest linux` and for `pageferry bench linux`. All
/// are Debian's source: Linux 6.12, and busybox with musl. The first build fetches it and takes
/// minutes and 2 GiB in the target directory.
#[derive(clap::Args)]
#[command(after_help = "Exit codes: 0; 125 if there is no guest.")]
pub(crate) struct Args {}

pub(crate) fn run(_: &Args) -> ExitCode {
    match build() {
        Ok(folder) => {
            println!("{}", folder.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("guest-linux: {error}");
            ExitCode::from(FAILED)
        }
    }
}

fn build() -> Result<PathBuf, Error> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lab/guest-linux");
    let folder = target_dir().join("guest-linux");
    std::fs::create_dir_all(&folder).map_err(Error::io(format!("make {}", folder.display())))?;
    let folder = folder.canonicalize();
    let folder = folder.map_err(Error::io("find the target directory"))?;
    let build = Build::new(&sources, &GUEST)?;
    let kernel = build.kernel()?;
    check_instructions(&build.built("vmlinux"))?;
    let process = folder.join("init");
    first_process(&build, &sources.join("init.c"), &process)?;
    check_instructions(&process)?;
    let mut archive = Archive::default();
    archive.device("dev/console", [5, 1]);
    archive.file("init", &read(&process)?);
    for module in MODULES {
        let name = module.rsplit('/').next().unwrap_or(module);
        archive.file(name, &read(&build.built(module))?);
    }
    write(&folder.join("initrd.gz"), &compressed(&archive.finish())?)?;
    write(&folder.join("Image"), &read(&kernel)?)?;
    let _ = std::fs::remove_file(process);
    shell::archive(&build, &sources, &folder.join("shell.gz"))?;
    Ok(folder)
}

/// Compiles the first process.
fn first_process(build: &Build, source: &Path, program: &Path) -> Result<(), Error> {
    let headers = build.headers()?;
    let mut gcc = Command::new(format!("{}gcc", COMPILER.prefix));
    build.give_tools(&mut gcc);
    gcc.args(FLAGS)
        .args([
            "-O2",
            "-Wall",
            "-static",
            "-nostdlib",
            "-ffreestanding",
            "-fno-pie",
            "-no-pie",
        ])
        .args(["-fno-stack-protector", "-Wl,--no-warn-rwx-segments"])
        .arg("-include")
        .arg(build.source("tools/include/nolibc/nolibc.h"))
        .arg("-I")
        .arg(headers)
        .arg("-o")
        .arg(program)
        .arg(source);
    let output = gcc.output().map_err(Error::io("run the compiler"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(Error::Failed(format!(
        "{} does not compile: {}",
        source.display(),
        text.trim_end()
    )))
}

/// Checks that a program has only instructions of the soft engine. The header's flags tell of
/// compressed ones and of floating point (RISC-V ELF psABI, "File Header").
fn check_instructions(program: &Path) -> Result<(), Error> {
    let bytes = read(program)?;
    match bytes.get(48..52) {
        Some([0, 0, 0, 0]) => Ok(()),
        flags => Err(Error::Failed(format!(
            "{} has instructions that the soft engine lacks, by the flags {flags:?} of its header: \
             it must be compiled for RV64IMA",
            program.display()
        ))),
    }
}

/// The bytes as gzip compresses them.
fn compressed(bytes: &[u8]) -> Result<Vec<u8>, Error> {
    let failed = || Error::io("compress the archive by gzip");
    let mut gzip = Command::new("gzip")
        .args(["-9", "--no-name"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed())?;
    let mut input = gzip.stdin.take().expect("it is piped");
    let output = std::thread::scope(|scope| {
        let writer = scope.spawn(move || std::io::Write::write_all(&mut input, bytes));
        let output = gzip.wait_with_output();
        writer.join().expect("writing does not panic")?;
        output
    });
    Ok(output.map_err(failed())?.stdout)
}

fn read(file: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(file).map_err(Error::io(format!("read {}", file.display())))
}

/// Writes a file whole, or not at all.
fn write(file: &Path, bytes: &[u8]) -> Result<(), Error> {
    let part = file.with_extension("part");
    std::fs::write(&part, bytes)
        .and_then(|()| std::fs::rename(&part, file))
        .map_err(Error::io(format!("write {}", file.display())))
}
