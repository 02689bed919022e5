//! `cargo xtask guest-linux`: a Linux for guests.
//!
//! **Guarantee.** The kernel is Debian's source without a patch, verified by apt. For RISC-V it
//! has only instructions of the soft engine. Kernel and archive are what the files of
//! `lab/guest-linux` make now. No kernel is compiled if they have not changed. For x86-64 there is
//! also the kernel of Debian's package for clouds, byte for byte.
//!
//! **Mechanism.** The lab's build of kernels. For RISC-V, apt fetches a compiler into the cache.
//! The first process is compiled against the kernel's own nolibc, so it needs no C library.
//!
//! **Neighbours.** [`crate::lab::kernel`] compiles the kernel, [`crate::lab::initrd`] has the
//! format of the archive, [`shell`] builds a second archive with a shell.

mod shell;

use crate::lab::initrd::Archive;
use crate::lab::kernel::{Build, Compiler, Target};
use crate::lab::{Cache, Error, packages, target_dir};
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
static RISCV64: Target = Target {
    folder: "guest",
    config: "config",
    arch: "riscv",
    goals: &["Image", "modules"],
    image: "arch/riscv/boot/Image",
    compiler: Some(COMPILER),
};
static X86_64: Target = Target {
    folder: "guest-x86_64",
    config: "config.x86_64",
    arch: "x86",
    goals: &["bzImage", "modules"],
    image: "arch/x86/boot/bzImage",
    compiler: None,
};
/// The kernel's torture tests.
const MODULES: [&str; 3] = [
    "kernel/torture.ko",
    "kernel/rcu/rcutorture.ko",
    "kernel/locking/locktorture.ko",
];

/// What Debian's kernel for clouds has as modules and a guest needs, in the order of loading.
const STOCK_MODULES: [&str; 6] = [
    "drivers/virtio/virtio_mmio",
    "drivers/block/virtio_blk",
    "net/core/failover",
    "drivers/net/net_failover",
    "drivers/net/virtio_net",
    "drivers/char/hw_random/virtio-rng",
];

/// Build a Linux for guests, and print its folder
///
/// The folder has a kernel (Image), a shell with the usual commands (shell.gz), and a first process
/// (initrd.gz) for tests, for `pageferry demo --guest linux` and for `pageferry-bench linux`. All
/// are Debian's source: Linux 6.12, and busybox with musl. The first build fetches it and takes
/// minutes and 2 GiB in the cache. For x86-64 the folder has a small kernel (bzImage and
/// vmlinux) with the same first process (initrd.gz). It also has Debian's own kernel for clouds
/// (vmlinuz-cloud), and that process with the modules of this kernel (stock.gz).
#[derive(clap::Args)]
#[command(after_help = "Exit codes: 0; 125 if there is no guest.")]
pub(crate) struct Args {
    /// The processor of the guests
    #[arg(long, value_enum, default_value_t = Arch::Riscv64)]
    arch: Arch,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Arch {
    /// The soft engine's
    #[value(name = "riscv64")]
    Riscv64,
    /// That of KVM
    #[value(name = "x86_64")]
    X86_64,
}

pub(crate) fn run(args: &Args, no_cache: bool) -> ExitCode {
    match Cache::new(no_cache).and_then(|cache| build(args.arch, &cache)) {
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

fn build(arch: Arch, cache: &Cache) -> Result<PathBuf, Error> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lab/guest-linux");
    let folder = target_dir().join("guest-linux");
    let (folder, target) = match arch {
        Arch::Riscv64 => (folder, &RISCV64),
        Arch::X86_64 => (folder.join("x86_64"), &X86_64),
    };
    std::fs::create_dir_all(&folder).map_err(Error::io(format!("make {}", folder.display())))?;
    let folder = folder.canonicalize();
    let folder = folder.map_err(Error::io("find the target directory"))?;
    let build = Build::new(&sources, target, cache)?;
    let kernel = build.kernel()?;
    let program = folder.join("init");
    let source = sources.join("init.c");
    match arch {
        Arch::Riscv64 => {
            check_instructions(&build.built("vmlinux"))?;
            first_process(&build, &FLAGS, &source, &program)?;
            check_instructions(&program)?;
            write(&folder.join("Image"), &read(&kernel)?)?;
        }
        Arch::X86_64 => {
            first_process(&build, &[], &source, &program)?;
            write(&folder.join("bzImage"), &read(&kernel)?)?;
            write(&folder.join("vmlinux"), &read(&build.built("vmlinux"))?)?;
        }
    }
    let process = read(&program)?;
    let _ = std::fs::remove_file(program);
    let mut archive = archive_with(&process);
    for module in MODULES {
        let name = module.rsplit('/').next().unwrap_or(module);
        archive.file(name, &read(&build.built(module))?);
    }
    write(&folder.join("initrd.gz"), &compressed(&archive.finish())?)?;
    match arch {
        Arch::Riscv64 => shell::archive(&build, &sources, cache, &folder.join("shell.gz"))?,
        Arch::X86_64 => stock(&process, &folder, cache)?,
    }
    Ok(folder)
}

/// An archive with this first process, which may grow.
fn archive_with(process: &[u8]) -> Archive {
    let mut archive = Archive::default();
    archive.device("dev/console", [5, 1]);
    archive.file("init", process);
    archive
}

/// Writes Debian's kernel for clouds, and an archive for it.
fn stock(process: &[u8], folder: &Path, cache: &Cache) -> Result<(), Error> {
    let stock = packages::stock(cache.folder(), &STOCK_MODULES)?;
    let mut archive = archive_with(process);
    let mut list = String::new();
    for (name, bytes) in &stock.modules {
        archive.file(&format!("modules/{name}"), bytes);
        list.push_str(name);
        list.push('\n');
    }
    archive.file("modules/list", list.as_bytes());
    write(&folder.join("stock.gz"), &compressed(&archive.finish())?)?;
    write(&folder.join("vmlinuz-cloud"), &read(&stock.kernel)?)
}

/// Compiles the first process.
fn first_process(
    build: &Build,
    flags: &[&str],
    source: &Path,
    program: &Path,
) -> Result<(), Error> {
    let headers = build.headers()?;
    let mut gcc = build.gcc();
    gcc.args(flags)
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
