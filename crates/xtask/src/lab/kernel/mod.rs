//! Kernels from Debian's source, a configuration and a series of patches. `cargo xtask lab kernel`
//! builds one with KVM Userfault.
//!
//! **Guarantee.** The kernel is what the series and its configuration make now, from source that
//! apt verified. Nothing is compiled if neither has changed. After a change, make compiles only
//! what depends on it. Builds of several processes wait for each other.
//!
//! **Mechanism.** [`tree`] unpacks the source and keeps it patched. make builds into a folder
//! beside it, with `allnoconfig` and the options of a file of the series. The series is stored
//! with the build and compared.
//!
//! **Neighbours.** [`packages`] fetches the source, the tools that the compiler needs beside it,
//! and the compiler for another processor. [`super::machine`] boots a kernel of the lab, and
//! [`crate::guest_linux`] makes one for guests.

mod tree;

use super::{Cache, Error, packages};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The source, with the tools and the library that few machines have.
const PACKAGES: [&str; 7] = [
    "linux-source-6.12",
    "bc",
    "bison",
    "flex",
    "libelf-dev",
    "libelf1",
    "m4",
];
/// The archive of the source in its package.
const SOURCE: &str = "usr/src/linux-source-6.12.tar.xz";
/// The tools that the machine must have, and their packages.
const TOOLS: [(&str, &str); 5] = [
    ("gcc", "gcc"),
    ("make", "make"),
    ("patch", "patch"),
    ("tar", "tar"),
    ("xz", "xz-utils"),
];
/// What differs between the kernels that are built here.
pub(crate) struct Target {
    /// The folder of its build in the cache.
    pub(crate) folder: &'static str,
    /// The file with the options, in the folder of the series.
    pub(crate) config: &'static str,
    /// The variable ARCH of make.
    pub(crate) arch: &'static str,
    /// What make builds.
    pub(crate) goals: &'static [&'static str],
    /// The kernel's file in the folder of the build.
    pub(crate) image: &'static str,
    /// The compiler, if it is not the machine's own.
    pub(crate) compiler: Option<Compiler>,
}

/// A compiler for another processor.
#[derive(Clone, Copy)]
pub(crate) struct Compiler {
    /// What the names of its programs begin with.
    pub(crate) prefix: &'static str,
    pub(crate) packages: &'static [&'static str],
}

/// The kernel of the lab.
const LAB: Target = Target {
    folder: "kernel",
    config: "config",
    arch: "x86",
    goals: &["bzImage"],
    image: "arch/x86/boot/bzImage",
    compiler: None,
};
/// The kernel's own tests of KVM that `--selftests` builds.
const SELFTESTS: [&str; 4] = [
    "demand_paging_test",
    "dirty_log_test",
    "guest_memfd_test",
    "set_memory_region_test",
];

/// Build a kernel that has KVM Userfault, and print its path
///
/// The source is Debian's package linux-source-6.12. The first build fetches it and takes minutes
/// and 3 GiB in the cache. `cargo xtask lab --kernel userfault` builds the same kernel
/// and boots it.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A folder with patches (*.patch, applied by name) and the file config
    #[arg(long, value_name = "FOLDER", default_value_os_t = series())]
    series: PathBuf,
    /// Build four of the kernel's own tests of KVM too, and print their paths
    #[arg(long)]
    selftests: bool,
}

/// The series of this repository.
fn series() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lab/kernel")
}

/// Builds what `args` names, and prints the paths.
pub(crate) fn run(args: &Args, cache: &Cache) -> Result<(), Error> {
    let build = Build::new(&args.series, &LAB, cache)?;
    println!("{}", build.kernel()?.display());
    if args.selftests {
        for test in build.selftests()? {
            println!("{}", test.display());
        }
    }
    Ok(())
}

/// The kernel of this repository's series.
pub(crate) fn userfault(cache: &Cache) -> Result<PathBuf, Error> {
    Build::new(&series(), &LAB, cache)?.kernel()
}

/// A build folder, which is this process's until the value is dropped.
pub(crate) struct Build {
    series: tree::Series,
    /// All that determines the kernel.
    inputs: Vec<u8>,
    target: &'static Target,
    /// The unpacked packages.
    tools: PathBuf,
    /// The unpacked compiler, if it is not the machine's own.
    compiler: Option<PathBuf>,
    folder: PathBuf,
    _lock: File,
}

impl Build {
    pub(crate) fn new(
        series: &Path,
        target: &'static Target,
        cache: &Cache,
    ) -> Result<Self, Error> {
        // A mistake in the series is found before anything is fetched.
        let series = tree::Series::read(series, target.config)?;
        for (tool, package) in TOOLS {
            if !is_in_path(tool) {
                return Err(Error::Failed(format!(
                    "{tool} is not here: building a kernel needs the package {package}"
                )));
            }
        }
        let what = "the source of a kernel";
        let tools = packages::unpacked(cache.folder(), "source", what, &PACKAGES)?;
        let source = tools.join(SOURCE);
        let inputs = series.with(&tree::identity(&source)?);
        let folder = cache.build(target.folder, &inputs)?;
        let lock = File::create(folder.join("lock")).map_err(Error::io("make a lock"))?;
        lock.lock()
            .map_err(Error::io("wait for another build of the kernel"))?;
        let compiler = target.compiler.map(|compiler| {
            let name = format!("compiler-{}", target.arch);
            let what = format!("a compiler for {}", target.arch);
            packages::unpacked(cache.folder(), &name, &what, compiler.packages)
        });
        Ok(Self {
            series,
            inputs,
            target,
            tools,
            compiler: compiler.transpose()?,
            folder,
            _lock: lock,
        })
    }

    /// The kernel, built if need be.
    pub(crate) fn kernel(&self) -> Result<PathBuf, Error> {
        let kernel = self.built(self.target.image);
        let stamp = self.folder.join("built");
        if kernel.is_file() && std::fs::read(&stamp).is_ok_and(|built| built == self.inputs) {
            return Ok(kernel);
        }
        let _ = std::fs::remove_file(&stamp);
        tree::prepare(&self.folder, &self.tools.join(SOURCE), &self.series)?;
        eprintln!("lab: building the kernel");
        self.make(&["allnoconfig"])?;
        self.check_configuration()?;
        self.make(self.target.goals)?;
        std::fs::write(&stamp, &self.inputs).map_err(Error::io("store what was built"))?;
        Ok(kernel)
    }

    /// A file of the build.
    pub(crate) fn built(&self, path: &str) -> PathBuf {
        self.folder.join("build").join(path)
    }

    /// A file of the source.
    pub(crate) fn source(&self, path: &str) -> PathBuf {
        self.folder.join("tree").join(path)
    }

    /// The headers of the kernel for programs, built from the same source.
    pub(crate) fn headers(&self) -> Result<PathBuf, Error> {
        self.make(&["headers"])?;
        Ok(self.built("usr/include"))
    }

    /// The kernel's own tests, built from the same source.
    fn selftests(&self) -> Result<Vec<PathBuf>, Error> {
        let headers = self.headers()?;
        let folder = self.folder.join("selftests");
        let tests = SELFTESTS.map(|test| folder.join(test));
        let mut words = vec![
            "-C".to_owned(),
            "tools/testing/selftests/kvm".to_owned(),
            format!("OUTPUT={}", folder.display()),
            format!("KHDR_INCLUDES=-isystem {}", headers.display()),
        ];
        words.extend(tests.iter().map(|test| test.display().to_string()));
        self.make(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
        Ok(tests.into())
    }

    /// Every option of the series must be in the configuration: make drops those whose
    /// dependencies are off.
    fn check_configuration(&self) -> Result<(), Error> {
        let made = std::fs::read_to_string(self.built(".config"));
        let made = made.map_err(Error::io("read the configuration that make wrote"))?;
        check_options("kernel", &made, self.series.options(), self.target.config)
    }

    /// The compiler of the kernel, which finds its tools.
    pub(crate) fn gcc(&self) -> Command {
        let prefix = self.target.compiler.map_or("", |compiler| compiler.prefix);
        let mut gcc = Command::new(format!("{prefix}gcc"));
        self.give_tools(&mut gcc);
        gcc
    }

    /// Runs make in the tree. Its output is in a log.
    fn make(&self, words: &[&str]) -> Result<(), Error> {
        let log = self.folder.join("make.log");
        let output = File::create(&log).map_err(Error::io("write make.log"))?;
        let copy = output.try_clone().map_err(Error::io("write make.log"))?;
        let at = |path: &str| self.tools.join(path).display().to_string();
        let mut make = Command::new("make");
        if let Some(compiler) = &self.target.compiler {
            make.arg(format!("CROSS_COMPILE={}", compiler.prefix));
        }
        self.give_tools(&mut make);
        let status = make
            .current_dir(self.folder.join("tree"))
            .args([format!("ARCH={}", self.target.arch), jobs()])
            .arg(format!("O={}", self.built("").display()))
            .arg(format!("LIBELF_FLAGS=-I{}", at("usr/include")))
            // By its full name: the link of libelf-dev leads nowhere without the library beside.
            .arg(format!(
                "LIBELF_LIBS=-L{} -l:libelf.so.1",
                at("usr/lib/x86_64-linux-gnu")
            ))
            .args(words)
            .env("BISON_PKGDATADIR", at("usr/share/bison"))
            .env("M4", at("usr/bin/m4"))
            .env("KCONFIG_ALLCONFIG", self.folder.join("config"))
            .stdin(std::process::Stdio::null())
            .stdout(output)
            .stderr(copy)
            .status()
            .map_err(Error::io("run make"))?;
        if status.success() {
            return Ok(());
        }
        let text = std::fs::read(&log).unwrap_or_default();
        Err(Error::Failed(format!(
            "make {} failed ({status}), see {}: {}",
            words[0],
            log.display(),
            complaint(&String::from_utf8_lossy(&text))
        )))
    }
}

impl Build {
    /// Lets a command find the fetched programs and their libraries.
    pub(crate) fn give_tools(&self, command: &mut Command) {
        let at = |path: &str| {
            let folders = [Some(&self.tools), self.compiler.as_ref()];
            let paths = folders.map(|folder| Some(folder?.join(path).display().to_string()));
            paths.into_iter().flatten().collect::<Vec<_>>().join(":")
        };
        let path = std::env::var("PATH").unwrap_or_default();
        command
            .env("PATH", format!("{}:{path}", at("usr/bin")))
            .env("LD_LIBRARY_PATH", at("usr/lib/x86_64-linux-gnu"));
    }
}

/// Every option of `file` must be in the configuration that make has `made` of it.
pub(crate) fn check_options<'o>(
    what: &str,
    made: &str,
    mut options: impl Iterator<Item = &'o str>,
    file: &str,
) -> Result<(), Error> {
    match options.find(|option| !made.lines().any(|line| line == *option)) {
        Some(option) => Err(Error::Failed(format!(
            "the {what}'s configuration has no {option}: set the options that it depends on, or \
             remove it from {file}"
        ))),
        None => Ok(()),
    }
}

/// The word by which make uses all cores.
pub(crate) fn jobs() -> String {
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    format!("-j{jobs}")
}

/// The line of make's output that says why it failed: the first error, or else the last line.
fn complaint(output: &str) -> &str {
    let mut lines = output.lines().filter(|line| !line.trim().is_empty());
    let error = lines.clone().find(|line| line.contains("error:"));
    error.or_else(|| lines.next_back()).unwrap_or("no output")
}

fn is_in_path(tool: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(tool).is_file())
}

#[cfg(test)]
mod tests {
    use super::complaint;

    #[test]
    fn the_first_error_is_the_complaint() {
        let output = "  CC a.o\na.c:1: error: no type\nb.c:2: error: x\nmake: *** [a.o] Error 1\n";
        assert_eq!(complaint(output), "a.c:1: error: no type");
        assert_eq!(
            complaint("  CC a.o\nmake: *** No rule\n\n"),
            "make: *** No rule"
        );
        assert_eq!(complaint(""), "no output");
    }
}
