//! The emulator, the kernel and busybox, as Debian packages in the cache.
//!
//! **Guarantee.** Every file came through apt, which verified it by the archive's signature.
//! Nothing is installed: apt gets lists and a cache of its own, so no privileges are needed.
//!
//! **Mechanism.** The archive is that of the machine's own sources, with the backports of the same
//! release where the kernel or the emulator is too old. Packages are unpacked into one folder.

use super::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The packages, with what they bring.
const PACKAGES: [&str; 3] = [
    "qemu-system-x86",
    "busybox-static",
    "linux-image-cloud-amd64",
];
/// A shell without libraries, in the packages.
const BUSYBOX: &str = "bin/busybox";
/// The oldest emulator that runs nested guests right.
const OLDEST_QEMU: u32 = 10;
/// The oldest kernel with the faults on markers that Pageferry uses, as (major, minor).
const OLDEST_KERNEL: (u32, u32) = (6, 12);

/// The files that a run needs.
pub(crate) struct Components {
    pub(crate) qemu: PathBuf,
    /// The emulator's libraries, as `LD_LIBRARY_PATH` wants them.
    pub(crate) libraries: String,
    /// The folders of the emulator's firmware.
    pub(crate) firmware: [PathBuf; 2],
    pub(crate) busybox: PathBuf,
    pub(crate) kernel: PathBuf,
    /// The modules that a run uses, in the order of loading; none where they are built in.
    pub(crate) modules: Vec<PathBuf>,
}

/// The components, from the cache or from the archive.
pub(crate) fn components(cache: &Path) -> Result<Components, Error> {
    let root = root(cache)?;
    let qemu = root.join("usr/bin/qemu-system-x86_64");
    let libraries = ["usr/lib", "lib"].map(|lib| {
        let folder = root.join(lib).join("x86_64-linux-gnu");
        folder.display().to_string()
    });
    let kernel = newest_kernel(&root)?;
    let mut components = Components {
        qemu,
        libraries: libraries.join(":"),
        firmware: ["qemu", "seabios"].map(|name| root.join("usr/share").join(name)),
        busybox: root.join(BUSYBOX),
        kernel: PathBuf::new(),
        modules: Vec::new(),
    };
    components.set_kernel(&kernel)?;
    components.check_qemu()?;
    Ok(components)
}

fn root(cache: &Path) -> Result<PathBuf, Error> {
    unpacked(cache, "root", "the emulator and a kernel", &PACKAGES)
}

/// A distribution's kernel, as it is, and modules of it.
pub(crate) struct Stock {
    pub(crate) kernel: PathBuf,
    /// Names and contents, in the order asked for.
    pub(crate) modules: Vec<(String, Vec<u8>)>,
}

/// The kernel of Debian's package for clouds, with the modules of these paths.
pub(crate) fn stock(cache: &Path, paths: &[&str]) -> Result<Stock, Error> {
    let root = root(cache)?;
    let kernel = newest_kernel(&root)?;
    let folder = modules_of(&kernel).unwrap_or_default();
    let modules = paths.iter().map(|path| {
        let file = module(&folder, path).ok_or_else(|| {
            let kernel = kernel.display();
            Error::Failed(format!(
                "{kernel} has no module {path} beside it: remove the folder \
                 {} to fetch a newer one",
                root.display()
            ))
        })?;
        Ok((
            module_name(&file),
            module_bytes(&root.join(BUSYBOX), &file)?,
        ))
    });
    let modules = modules.collect::<Result<_, _>>()?;
    Ok(Stock { kernel, modules })
}

/// The folder `name` of the cache with these packages unpacked, which are `what` to a user.
pub(crate) fn unpacked(
    cache: &Path,
    name: &str,
    what: &str,
    packages: &[&str],
) -> Result<PathBuf, Error> {
    let root = cache.join(name);
    // The name comes last, so that a folder of this name is complete.
    if !root.is_dir() {
        eprintln!("lab: fetching {what} through apt");
        let unpacked = fetch(cache, packages)?;
        match std::fs::rename(&unpacked, &root) {
            // Another lab was faster.
            Err(_) if root.is_dir() => drop(std::fs::remove_dir_all(&unpacked)),
            renamed => renamed.map_err(Error::io("rename the unpacked packages"))?,
        }
    }
    Ok(root)
}

impl Components {
    /// Boots `kernel` instead.
    pub(crate) fn set_kernel(&mut self, kernel: &Path) -> Result<(), Error> {
        if !kernel.is_file() {
            return Err(Error::Failed(format!(
                "there is no kernel {}: give the path of a bzImage",
                kernel.display()
            )));
        }
        self.kernel = kernel.to_owned();
        self.modules = match modules_of(kernel) {
            Some(folder) => modules(&folder)?,
            None => Vec::new(),
        };
        Ok(())
    }

    fn check_qemu(&self) -> Result<(), Error> {
        let output = Command::new(&self.qemu)
            .env("LD_LIBRARY_PATH", &self.libraries)
            .arg("--version")
            .output()
            .map_err(Error::io(format!("run {}", self.qemu.display())))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let major = text
            .split_whitespace()
            .nth(3)
            .and_then(|version| version.split('.').next()?.parse::<u32>().ok());
        match major {
            Some(major) if major >= OLDEST_QEMU => Ok(()),
            _ => Err(Error::Failed(format!(
                "the archive's emulator is too old, or does not run: QEMU {OLDEST_QEMU} is \
                 needed, and it says '{}'{}",
                text.lines().next().unwrap_or_default(),
                String::from_utf8_lossy(&output.stderr).trim_end()
            ))),
        }
    }
}

/// The folder of a kernel's modules, if there is one beside the folder of the kernel.
fn modules_of(kernel: &Path) -> Option<PathBuf> {
    let release = kernel.file_name()?.to_str()?.strip_prefix("vmlinuz-")?;
    let root = kernel.parent()?.parent()?;
    let folder = root.join("lib/modules").join(release);
    (!release.is_empty() && folder.is_dir()).then_some(folder)
}

/// The module of this path, which has no ending.
fn module(folder: &Path, path: &str) -> Option<PathBuf> {
    let files = [".ko", ".ko.xz"].map(|end| folder.join(format!("kernel/{path}{end}")));
    files.into_iter().find(|file| file.is_file())
}

/// The name of a module's file without a compressed file's ending.
pub(crate) fn module_name(file: &Path) -> String {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name.trim_end_matches(".xz").to_owned()
}

/// A module as the kernel loads it, uncompressed.
pub(crate) fn module_bytes(busybox: &Path, file: &Path) -> Result<Vec<u8>, Error> {
    if file.extension().is_none_or(|end| end != "xz") {
        return std::fs::read(file).map_err(Error::io(format!("read {}", file.display())));
    }
    let output = Command::new(busybox)
        .arg("xzcat")
        .arg(file)
        .output()
        .map_err(Error::io("run busybox"))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(Error::Failed(format!(
        "{} is damaged: remove the folder of its package in the cache",
        file.display()
    )))
}

/// The modules that make `/dev/kvm` on an AMD processor, `/dev/net/tun` and bridges, in the order
/// of loading.
fn modules(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    // `ccp` only where kvm-amd depends on it, and network devices only for tests that use them.
    for (path, needed) in [
        ("virt/lib/irqbypass", true),
        ("drivers/crypto/ccp/ccp", false),
        ("arch/x86/kvm/kvm", true),
        ("arch/x86/kvm/kvm-amd", true),
        ("drivers/net/tun", false),
        ("net/llc/llc", false),
        ("net/802/stp", false),
        ("net/bridge/bridge", false),
    ] {
        match module(folder, path) {
            Some(module) => found.push(module),
            None if needed => {
                return Err(Error::Failed(format!(
                    "{} has no module {path}: a kernel with KVM for AMD processors is needed",
                    folder.display()
                )));
            }
            None => {}
        }
    }
    Ok(found)
}

/// The newest kernel in `root`, which must be new enough.
fn newest_kernel(root: &Path) -> Result<PathBuf, Error> {
    let boot = root.join("boot");
    let files = std::fs::read_dir(&boot).map_err(Error::io(format!("read {}", boot.display())))?;
    let newest = files
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let version = release(path.file_name()?.to_str()?)?;
            Some((version, path))
        })
        .max();
    match newest {
        Some((version, kernel)) if version >= OLDEST_KERNEL => Ok(kernel),
        newest => Err(Error::Failed(format!(
            "the archive's newest cloud kernel is {}: {}.{} or later is needed; give one by \
             --kernel",
            newest.map_or_else(|| "none".into(), |((a, b), _)| format!("{a}.{b}")),
            OLDEST_KERNEL.0,
            OLDEST_KERNEL.1
        ))),
    }
}

/// The release of a kernel's file name, as (major, minor).
fn release(name: &str) -> Option<(u32, u32)> {
    let mut numbers = name
        .strip_prefix("vmlinuz-")?
        .split(['.', '-', '+'])
        .map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Fetches the packages, and unpacks them into a folder of the cache, which it returns.
fn fetch(cache: &Path, packages: &[&str]) -> Result<PathBuf, Error> {
    let apt = Apt::new(cache, "deb")?;
    let mut install = vec![
        "install",
        "--download-only",
        "--yes",
        "--no-install-recommends",
    ];
    // Packages that are installed here already are fetched too.
    install.push("--reinstall");
    if let Some(release) = &apt.release {
        install.extend(["--target-release", release]);
    }
    install.extend(packages);
    apt.run(&install)?;
    let root = apt.work.join("root");
    for archive in files(&apt.work.join("apt/archives"))? {
        if archive.extension().is_some_and(|end| end == "deb") {
            run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&root))?;
        }
    }
    apt.finish(cache, &root)
}

/// The folder `name` of the cache with the sources of these packages, each in a folder of its name
/// and with Debian's patches. They are `what` to a user. Programs that unpacking needs are in
/// `tools`.
pub(crate) fn sources_of(
    cache: &Path,
    name: &str,
    what: &str,
    packages: &[&str],
    tools: &Path,
) -> Result<PathBuf, Error> {
    let root = cache.join(name);
    if root.is_dir() {
        return Ok(root);
    }
    eprintln!("lab: fetching {what} through apt");
    let apt = Apt::new(cache, "deb-src")?;
    let mut source = vec!["source", "--download-only"];
    source.extend(packages);
    apt.run(&source)?;
    let trees = apt.work.join("trees");
    let fetched = files(&apt.work)?;
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}", tools.join("bin").display());
    for package in packages {
        let tree = trees.join(package);
        std::fs::create_dir_all(&tree).map_err(Error::io("make a folder for a source"))?;
        let archive = |part: &str| {
            let found = fetched.iter().find(|file| {
                let name = file.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with(&format!("{package}_"))
                    && name.contains(part)
                    && !name.ends_with(".asc")
            });
            found.ok_or_else(|| {
                let missing = format!("the source package {package} has no archive '{part}'");
                Error::Failed(format!("{missing}: report it"))
            })
        };
        let unpack = |file: &Path, strip: &str| {
            let mut tar = Command::new("tar");
            tar.env("PATH", &path)
                .arg("-xf")
                .arg(file)
                .arg("-C")
                .arg(&tree);
            run(tar.arg(strip))
        };
        unpack(archive(".orig.tar.")?, "--strip-components=1")?;
        unpack(archive(".debian.tar.")?, "--strip-components=0")?;
        let patches = tree.join("debian/patches");
        let series = std::fs::read_to_string(patches.join("series")).unwrap_or_default();
        let names = series.lines().map(str::trim);
        for patch in names.filter(|name| !name.is_empty() && !name.starts_with('#')) {
            let mut command = Command::new("patch");
            command.args(["--strip=1", "--batch", "--silent", "--directory"]);
            run(command.arg(&tree).arg("--input").arg(patches.join(patch)))?;
        }
    }
    let unpacked = apt.finish(cache, &trees)?;
    std::fs::rename(&unpacked, &root).map_err(Error::io("rename the sources"))?;
    Ok(root)
}

/// The package manager with lists and a cache of its own, in a folder that is its own too.
struct Apt {
    work: PathBuf,
    /// The release that is preferred.
    release: Option<String>,
}

impl Apt {
    /// With current lists. `kind` is `deb` for packages and `deb-src` for their sources.
    fn new(cache: &Path, kind: &str) -> Result<Self, Error> {
        let work = cache.join(format!("fetch-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&work);
        for folder in ["lists", "apt/archives"] {
            let folder = work.join(folder).join("partial");
            std::fs::create_dir_all(&folder)
                .map_err(Error::io(format!("make {}", folder.display())))?;
        }
        let work = work.canonicalize().map_err(Error::io("find the cache"))?;
        let (sources, release) = sources(kind)?;
        std::fs::write(work.join("sources.list"), sources).map_err(Error::io("write sources"))?;
        let apt = Self { work, release };
        apt.run(&["update"])?;
        Ok(apt)
    }

    /// Runs `apt-get`, in its folder.
    fn run(&self, words: &[&str]) -> Result<String, Error> {
        let at = |name: &str| self.work.join(name).display().to_string();
        let mut apt = Command::new("apt-get");
        for option in [
            format!("Dir::Etc::SourceList={}", at("sources.list")),
            "Dir::Etc::SourceParts=/dev/null".into(),
            format!("Dir::State::Lists={}", at("lists")),
            format!("Dir::Cache={}", at("apt")),
            // Nothing is installed, so the system's own lock need not be held.
            "Debug::NoLocking=1".into(),
            "APT::Sandbox::User=".into(),
        ] {
            apt.args(["-o", &option]);
        }
        run(apt.current_dir(&self.work).arg("-qq").args(words))
    }

    /// Moves `result` out into the cache, and removes the rest. Returns its new place.
    fn finish(self, cache: &Path, result: &Path) -> Result<PathBuf, Error> {
        let unpacked = cache.join(format!("root-{}", std::process::id()));
        std::fs::rename(result, &unpacked).map_err(Error::io("rename the unpacked packages"))?;
        let _ = std::fs::remove_dir_all(&self.work);
        Ok(unpacked)
    }
}

/// The files of a folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = std::fs::read_dir(folder).map_err(Error::io("read fetched packages"))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    Ok(paths.filter(|path| path.is_file()).collect())
}

/// The lines of a sources file of this kind: the machine's own archive, and the backports of its
/// release. Also the release that is preferred.
fn sources(kind: &str) -> Result<(String, Option<String>), Error> {
    let format = "$(REPO_URI) $(CODENAME)";
    let targets = run(Command::new("apt-get").args([
        "indextargets",
        "--format",
        format,
        "Identifier: Packages",
        "Component: main",
    ]))?;
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let release = |key: &str| {
        let line = release.lines().find_map(|line| line.strip_prefix(key));
        line.map(|value| value.trim_matches('"').to_owned())
    };
    let codename = release("VERSION_CODENAME=").unwrap_or_default();
    let own = targets.lines().find_map(|line| {
        let (uri, suite) = line.split_once(' ')?;
        (suite == codename).then_some(uri)
    });
    let Some(uri) = own else {
        return Err(Error::Failed(format!(
            "apt has no sources for this release ('{codename}'): the lab needs a Debian archive"
        )));
    };
    let id = release("ID=").unwrap_or_default();
    let keyring = format!("/usr/share/keyrings/{id}-archive-keyring.gpg");
    let key = if Path::new(&keyring).is_file() {
        format!("[signed-by={keyring}] ")
    } else {
        // Then the keys that apt trusts for all archives must do.
        String::new()
    };
    // Debian 12 has QEMU 7 and Linux 6.1; later releases have what is needed.
    let backports = release("VERSION_ID=").is_some_and(|id| id == "12");
    let mut suites = vec![codename.clone()];
    let preferred = backports.then(|| format!("{codename}-backports"));
    suites.extend(preferred.clone());
    let lines = suites
        .iter()
        .map(|suite| format!("{kind} {key}{uri} {suite} main\n"));
    Ok((lines.collect(), preferred))
}

/// Runs a command of the package manager. Returns what it printed.
fn run(command: &mut Command) -> Result<String, Error> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::Failed(format!(
            "{name} is not here: the lab fetches its emulator and kernel as Debian packages"
        )),
        _ => Error::io(format!("run {name}"))(error),
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(Error::Failed(format!(
        "{name} could not fetch or unpack packages ({}): {}",
        output.status,
        complaint(&String::from_utf8_lossy(&output.stderr))
    )))
}

/// The first error in what apt says, or all if it marks none.
fn complaint(stderr: &str) -> &str {
    let error = stderr.lines().find_map(|line| line.strip_prefix("E: "));
    error.unwrap_or(stderr.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_as_numbers() {
        assert_eq!(release("vmlinuz-6.12.95+deb12-cloud-amd64"), Some((6, 12)));
        assert_eq!(release("vmlinuz-6.1.0-40-cloud-amd64"), Some((6, 1)));
        assert!(release("vmlinuz-6.1.0") < release("vmlinuz-6.12.0"));
        for other in ["System.map-6.12.95", "vmlinuz-", "vmlinuz-six.1"] {
            assert_eq!(release(other), None);
        }
    }

    #[test]
    fn a_kernel_without_kvm_for_amd_is_refused() {
        let folder = std::env::temp_dir().join(format!("pf-xtask-{}", std::process::id()));
        let kvm = folder.join("lib/modules/6.12.0/kernel/arch/x86/kvm");
        std::fs::create_dir_all(&kvm).unwrap();
        std::fs::create_dir_all(folder.join("boot")).unwrap();
        let kernel = folder.join("boot/vmlinuz-6.12.0");
        std::fs::write(&kernel, b"").unwrap();
        let mut components = Components {
            qemu: PathBuf::new(),
            libraries: String::new(),
            firmware: [PathBuf::new(), PathBuf::new()],
            busybox: PathBuf::new(),
            kernel: PathBuf::new(),
            modules: Vec::new(),
        };
        let refused = components.set_kernel(&kernel).unwrap_err().to_string();
        let missing = components.set_kernel(&folder.join("none")).unwrap_err();
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(
            refused.contains("no module virt/lib/irqbypass"),
            "{refused}"
        );
        assert!(missing.to_string().contains("bzImage"), "{missing}");
    }
}
