//! `cargo xtask lab` as a user calls it. Most tests put a script in the emulator's place. One runs
//! a command in the emulated machine, if its packages have been fetched. The other commands have
//! modules.

mod guest_linux;
mod kernel;
mod two_hosts;

use pageferry_testkit::skip;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A target directory of a test's own, with what the lab would have fetched.
struct Fetched {
    target: PathBuf,
}

impl Fetched {
    /// An emulator that is the shell script `qemu`, and the kernel `kernel`.
    fn new(test: &str, qemu: &str, kernel: &str) -> Self {
        let target = folder(&format!("lab-{test}"));
        let fetched = Self { target };
        fetched.file("usr/bin/qemu-system-x86_64", &format!("#!/bin/sh\n{qemu}"));
        fetched.file(&format!("boot/{kernel}"), "");
        fetched.file("bin/busybox", "");
        fetched
    }

    fn file(&self, path: &str, text: &str) {
        let path = self.target.join("lab/root").join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    }

    /// Runs the lab with `arguments`.
    fn lab(&self, arguments: &[&str]) -> Output {
        own_lab(&self.target, arguments).output().unwrap()
    }
}

impl Drop for Fetched {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.target);
    }
}

/// The path of a folder of this run's own, which is not there yet.
fn folder(name: &str) -> PathBuf {
    let name = format!("{name}-{}", std::process::id());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

fn lab(arguments: &[&str]) -> Command {
    let mut lab = Command::new(env!("CARGO_BIN_EXE_xtask"));
    lab.arg("lab").args(arguments);
    lab
}

/// The lab with its packages and builds in a target directory of the test's own.
fn own_lab(target: &Path, arguments: &[&str]) -> Command {
    let mut lab = Command::new(env!("CARGO_BIN_EXE_xtask"));
    lab.args(["--no-cache", "lab"]).args(arguments);
    lab.env("CARGO_TARGET_DIR", target);
    lab
}

/// Checks the exit code, and that the last line of stderr says `says`.
#[track_caller]
fn assert_ended(output: &Output, code: i32, says: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    let last = stderr.lines().last().unwrap_or_default();
    assert!(last.starts_with("lab: ") && last.contains(says), "{stderr}");
}

/// A script in the emulator's place, which also answers when the lab asks for its version.
fn version_10(then: &str) -> String {
    format!("[ \"$1\" = --version ] && echo QEMU emulator version 10.0.2 && exit\n{then}")
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let output = lab(&["--", "/nonexistent/program"]).output().unwrap();
    assert_ended(&output, 125, "there is no program /nonexistent/program");
}

#[test]
fn without_a_package_manager_the_lab_says_what_it_needs() {
    let empty = folder("lab-no-apt");
    std::fs::create_dir_all(&empty).unwrap();
    symlink("/usr/bin/ldd", empty.join("ldd")).unwrap();
    let mut lab = own_lab(&empty, &["--", "/bin/sh"]);
    let output = lab.env("PATH", &empty).output().unwrap();
    std::fs::remove_dir_all(&empty).unwrap();
    assert_ended(&output, 125, "apt-get is not here");
}

#[test]
fn an_old_emulator_is_refused() {
    let old = "echo QEMU emulator version 7.2.17";
    let fetched = Fetched::new("old-qemu", old, "vmlinuz-6.12.1");
    let output = fetched.lab(&["--", "/bin/sh"]);
    assert_ended(&output, 125, "QEMU 10 is needed");
}

#[test]
fn an_old_kernel_is_refused() {
    let fetched = Fetched::new("old-kernel", &version_10(""), "vmlinuz-6.1.0");
    let output = fetched.lab(&["--", "/bin/sh"]);
    assert_ended(&output, 125, "6.12 or later is needed");
}

#[test]
fn a_kernel_that_is_not_there_is_named() {
    let fetched = Fetched::new("no-kernel", &version_10(""), "vmlinuz-6.12.1");
    let output = fetched.lab(&["--kernel", "/nonexistent/bzImage", "--", "/bin/sh"]);
    assert_ended(&output, 125, "there is no kernel /nonexistent/bzImage");
}

#[test]
fn a_machine_that_ends_early_is_a_failure() {
    let ends = version_10("echo '@@ lab Linux'; echo out of memory >&2");
    let fetched = Fetched::new("ends-early", &ends, "vmlinuz-6.12.1");
    let output = fetched.lab(&["--", "/bin/sh"]);
    assert_ended(&output, 125, "ended after 0 of 1 commands; out of memory");
}

#[test]
fn shadow_paging_is_asked_of_a_kernel_without_modules() {
    let says = version_10("echo \"@@ lab cannot run: $*\"");
    let fetched = Fetched::new("shadow", &says, "vmlinuz-6.12.1");
    let output = fetched.lab(&["--shadow", "--", "/bin/sh"]);
    assert_ended(&output, 125, "kvm_amd.npt=0");
}

#[test]
fn a_machine_that_uses_up_its_time_is_ended() {
    let busy = version_10("while :; do :; done");
    let fetched = Fetched::new("busy", &busy, "vmlinuz-6.12.1");
    let output = fetched.lab(&["--cpu-seconds", "1", "--", "/bin/sh"]);
    assert_ended(&output, 124, "used 1 s of CPU time");
}

#[test]
fn a_file_that_is_not_there_is_named_before_anything_is_built() {
    let output = lab(&["--file", "/nonexistent/disk", "--", "cargo", "test", "none"])
        .output()
        .unwrap();
    assert_ended(&output, 125, "no file or folder /nonexistent/disk");
}

#[test]
fn files_are_in_the_archive_at_their_paths() {
    let finds = "while [ \"$1\" != -initrd ]; do shift; done
for word in guests/one/disk its-bytes; do
    grep -q $word \"$2\" || { echo \"@@ lab cannot run: no $word\"; exit; }
done
echo '@@ lab cannot run: all found'";
    let fetched = Fetched::new("files", &version_10(finds), "vmlinuz-6.12.1");
    let folder = fetched.target.join("disks");
    std::fs::create_dir_all(folder.join("one")).unwrap();
    std::fs::write(folder.join("one/disk"), "its-bytes").unwrap();
    let argument = format!("{}:/guests", folder.display());
    let output = fetched.lab(&["--file", &argument, "--", "/bin/sh"]);
    assert_ended(&output, 125, "all found");
}

/// The packages of the lab; `None` after a skip.
fn packages() -> Option<PathBuf> {
    let caches = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let caches = caches.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cache")));
    let packages = caches.unwrap_or_default().join("pageferry/root");
    let why = "nothing is fetched: run 'cargo xtask lab -- /bin/true' once";
    (packages.is_dir() || !skip("lab", why)).then_some(packages)
}

#[test]
fn a_guest_and_its_tap_are_found_in_the_machine() {
    if packages().is_none() {
        return;
    }
    let folder = folder("lab-guest");
    std::fs::create_dir_all(folder.join("x86_64")).unwrap();
    std::fs::write(folder.join("x86_64/bzImage"), "a kernel").unwrap();
    let folder = folder.canonicalize().unwrap();
    let argument = folder.to_str().unwrap();
    let script = "cat $PAGEFERRY_GUEST_LINUX/x86_64/bzImage; \
                  test -c /dev/net/tun && tunctl -t tap7 && truncate -s 1G $TMPDIR/disk";
    let output = lab(&["--file", argument, "--", "/bin/sh", "-c", script])
        .env("PAGEFERRY_GUEST_LINUX", &folder)
        .output();
    std::fs::remove_dir_all(&folder).unwrap();
    let output = output.unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!(stdout, "a kerneltap7\n", "{output:?}");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

#[test]
fn output_and_exit_code_are_those_of_the_command() {
    if packages().is_none() {
        return;
    }
    let script = "echo \"it's $1\"; echo; cat /sys/module/kvm_amd/parameters/npt; exit 7";
    let output = lab(&["--", "/bin/sh", "-c", script, "sh", "$HOME"])
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!(stdout, "it's $HOME\n\nY\n", "{output:?}");
    assert_eq!(output.status.code(), Some(7), "{output:?}");
}
