//! A shell for guests: busybox with musl, in an archive for the kernel.
//!
//! **Guarantee.** Both are Debian's source with Debian's patches, verified by apt, compiled for the
//! instructions that the soft engine has. Nothing is compiled if neither they nor this recipe have
//! changed.
//!
//! **Mechanism.** The compiler for Linux brings a libgcc with compressed instructions only. The one
//! for bare RISC-V brings a libgcc for RV64IM, so a small script links with that one. The first
//! process is `lab/guest-linux/start.sh`, which becomes the init of busybox.
//!
//! **Neighbours.** [`super`] has the compiler and the kernel's headers, [`packages`] fetches.

use super::{COMPILER, FLAGS, check_instructions, compressed, read, write};
use crate::lab::initrd::Archive;
use crate::lab::kernel::{Build, check_options, jobs};
use crate::lab::{Cache, Error, packages};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A libgcc for RV64IM, and the program that unpacks busybox.
const TOOLS: [&str; 2] = ["gcc-riscv64-unknown-elf", "bzip2"];
const SOURCES: [&str; 2] = ["musl", "busybox"];
/// The files of the archive besides busybox, with their sources.
const TREE: [(&str, &str); 4] = [
    ("init", "start.sh"),
    ("etc/inittab", "inittab"),
    ("etc/profile", "profile"),
    ("etc/passwd", "passwd"),
];
/// The devices that programs expect, with their numbers
/// (`Documentation/admin-guide/devices.txt`).
const DEVICES: [(&str, [u32; 2]); 8] = [
    ("dev/console", [5, 1]),
    ("dev/tty", [5, 0]),
    ("dev/hvc0", [229, 0]),
    ("dev/null", [1, 3]),
    ("dev/zero", [1, 5]),
    ("dev/full", [1, 7]),
    ("dev/random", [1, 8]),
    ("dev/urandom", [1, 9]),
];

/// Writes the archive to `file`. `configs` is the folder with the files of the guest.
pub(super) fn archive(
    build: &Build,
    configs: &Path,
    cache: &Cache,
    file: &Path,
) -> Result<(), Error> {
    let shell = Shell::new(build, configs, cache)?;
    let busybox = shell.busybox()?;
    let mut archive = Archive::default();
    for (path, numbers) in DEVICES {
        archive.device(path, numbers);
    }
    for folder in [
        "proc", "sys", "tmp", "run", "root", "sbin", "usr/bin", "usr/sbin",
    ] {
        archive.folder(folder);
    }
    archive.file("bin/busybox", &read(&busybox)?);
    archive.link("bin/sh", "busybox");
    for (path, source) in TREE {
        archive.file(path, &read(&configs.join(source))?);
    }
    write(file, &compressed(&archive.finish())?)
}

struct Shell<'a> {
    build: &'a Build,
    /// The folder of what is built.
    folder: PathBuf,
    /// The unpacked sources.
    sources: PathBuf,
    /// The library of the compiler's own functions, without compressed instructions.
    libgcc: PathBuf,
    config: Vec<u8>,
    /// All that determines the program, beside the sources.
    inputs: Vec<u8>,
}

impl<'a> Shell<'a> {
    fn new(build: &'a Build, configs: &Path, cache: &Cache) -> Result<Self, Error> {
        let what = "a library for RV64IM";
        let tools = packages::unpacked(cache.folder(), "userland-tools", what, &TOOLS)?;
        let what = "the sources of a C library and a shell";
        let sources = packages::sources_of(cache.folder(), "userland", what, &SOURCES, &tools)?;
        let config = read(&configs.join("busybox.config"))?;
        let inputs = [include_bytes!("shell.rs"), config.as_slice()].concat();
        let folder = cache.build("shell", &inputs)?;
        Ok(Self {
            build,
            folder,
            sources,
            libgcc: libgcc(&tools)?,
            config,
            inputs,
        })
    }

    /// The program, built if need be.
    fn busybox(&self) -> Result<PathBuf, Error> {
        let program = self.folder.join("busybox/busybox");
        let stamp = self.folder.join("built");
        if program.is_file() && read(&stamp).is_ok_and(|built| built == self.inputs) {
            return Ok(program);
        }
        let _ = std::fs::remove_file(&stamp);
        eprintln!("lab: building a shell");
        for source in SOURCES {
            let copy = self.folder.join(source);
            let _ = std::fs::remove_dir_all(&copy);
            let mut cp = Command::new("cp");
            cp.arg("--archive").arg(self.sources.join(source)).arg(copy);
            self.run(&mut cp)?;
        }
        self.musl()?;
        let cc = self.compiler()?;
        let prefix = COMPILER.prefix;
        let variables = [
            "ARCH=riscv".to_owned(),
            "HOSTCC=gcc".to_owned(),
            format!("CC={}", cc.display()),
            format!("CROSS_COMPILE={prefix}"),
        ];
        let make = |goal: &str| {
            let mut make = Command::new("make");
            make.current_dir(self.folder.join("busybox"))
                .args([&jobs(), goal])
                .args(&variables);
            self.run(&mut make)
        };
        make("allnoconfig")?;
        self.configure()?;
        // It asks about options that the others bring. An empty line takes what busybox proposes.
        make("oldconfig")?;
        self.check_configuration()?;
        make("busybox")?;
        check_instructions(&program)?;
        write(&stamp, &self.inputs)?;
        Ok(program)
    }

    /// Builds the C library, and installs it in the folder `root`.
    fn musl(&self) -> Result<(), Error> {
        let tree = self.folder.join("musl");
        let mut configure = Command::new("./configure");
        configure
            .current_dir(&tree)
            .args(["--target=riscv64", "--disable-shared", "--disable-wrapper"])
            .arg(format!("--prefix={}", self.folder.join("root").display()))
            .env("CC", self.compile())
            .env("CFLAGS", "-O2")
            .env("CROSS_COMPILE", COMPILER.prefix)
            .env("LIBCC", &self.libgcc);
        self.run(&mut configure)?;
        self.run(
            Command::new("make")
                .current_dir(&tree)
                .args([&jobs(), "install"]),
        )
    }

    /// A compiler that knows the C library: a script, since it has to link by itself.
    fn compiler(&self) -> Result<PathBuf, Error> {
        let script = self.folder.join("cc");
        let root = self.folder.join("root");
        let own = self.build.gcc().arg("-print-file-name=include").output();
        let own = own.map_err(Error::io("run the compiler"))?.stdout;
        let text = format!(
            "#!/bin/sh\n\
             # Compiles with the headers of musl. If the words do not say otherwise, it also links.\n\
             compile='{} -nostdinc -isystem {root}/include -isystem {} -isystem {}'\n\
             case \" $* \" in *' -c '* | *' -S '* | *' -E '* | *' -r '*) exec $compile \"$@\" ;; esac\n\
             exec $compile -static -nostdlib -L{root}/lib {root}/lib/crt1.o {root}/lib/crti.o \"$@\" \\\n    \
             -Wl,--start-group {root}/lib/libc.a {} -Wl,--end-group {root}/lib/crtn.o\n",
            self.compile(),
            String::from_utf8_lossy(&own).trim_end(),
            self.build.headers()?.display(),
            self.libgcc.display(),
            root = root.display(),
        );
        write(&script, text.as_bytes())?;
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&script, mode).map_err(Error::io("make a script executable"))?;
        Ok(script)
    }

    fn compile(&self) -> String {
        format!("{}gcc {}", COMPILER.prefix, FLAGS.join(" "))
    }

    /// Puts the options into busybox's configuration.
    fn configure(&self) -> Result<(), Error> {
        let file = self.folder.join("busybox/.config");
        let mut made = String::from_utf8_lossy(&read(&file)?).into_owned();
        for option in String::from_utf8_lossy(&self.config).lines() {
            if let Some(name) = option.strip_suffix("=y") {
                made = made.replace(&format!("# {name} is not set\n"), &format!("{option}\n"));
            }
        }
        write(&file, made.as_bytes())
    }

    /// Every option must be in busybox's configuration.
    fn check_configuration(&self) -> Result<(), Error> {
        let made = read(&self.folder.join("busybox/.config"))?;
        let made = String::from_utf8_lossy(&made);
        let config = String::from_utf8_lossy(&self.config);
        let options = config.lines().filter(|line| line.starts_with("CONFIG_"));
        check_options("shell", &made, options, "busybox.config")
    }

    /// Runs a program with the tools. Its input is empty lines, and its output is in a log.
    fn run(&self, command: &mut Command) -> Result<(), Error> {
        let log = self.folder.join("make.log");
        let mut options = std::fs::OpenOptions::new();
        let output = options.create(true).append(true).open(&log);
        let output = output.map_err(Error::io("write make.log"))?;
        let copy = output.try_clone().map_err(Error::io("write make.log"))?;
        self.build.give_tools(command);
        let name = command.get_program().to_string_lossy().into_owned();
        let answers = self.folder.join("answers");
        write(&answers, &[b'\n'; 4096])?;
        let answers = std::fs::File::open(answers).map_err(Error::io("read the answers"))?;
        let status = command
            .stdin(answers)
            .stdout(output)
            .stderr(copy)
            .status()
            .map_err(Error::io(format!("run {name}")))?;
        if status.success() {
            return Ok(());
        }
        Err(Error::Failed(format!(
            "the shell cannot be built: {name} failed ({status}), see {}",
            log.display()
        )))
    }
}

/// The library in the unpacked package, whose version is in its path.
fn libgcc(tools: &Path) -> Result<PathBuf, Error> {
    let versions = tools.join("usr/lib/gcc/riscv64-unknown-elf");
    let entries = std::fs::read_dir(&versions);
    let mut entries = entries.map_err(Error::io(format!("read {}", versions.display())))?;
    let found = entries.find_map(|entry| {
        let library = entry.ok()?.path().join("rv64im/lp64/libgcc.a");
        library.is_file().then_some(library)
    });
    found.ok_or_else(|| {
        Error::Failed(format!(
            "the package {} has no library for rv64im and lp64",
            TOOLS[0]
        ))
    })
}
