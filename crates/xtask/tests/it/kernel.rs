//! `cargo xtask lab kernel` as a user calls it, with a source of two files and a script in the
//! place of make.

use crate::{assert_ended, folder, lab, own_lab};
use pageferry_testkit::skip;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::SystemTime;

/// Does what the lab needs of make: the configuration and the kernel are there, and the call is
/// counted.
pub(crate) const MAKE: &str = "for word; do case $word in O=*) out=${word#O=};; esac; done
mkdir -p $out/arch/x86/boot
cp $KCONFIG_ALLCONFIG $out/.config
cp virt/one.c $out/arch/x86/boot/bzImage
echo $@ >>$out/calls";

/// Changes the second of four lines.
const PATCH: &str = "Subject: two

--- a/virt/one.c
+++ b/virt/one.c
@@ -1,4 +1,4 @@
 one
-two
+zwei
 three
 four
";

/// A target directory of a test's own with a source in it, a series, and tools.
pub(crate) struct Kernel(pub(crate) PathBuf);

impl Kernel {
    /// None where a tool is missing that the tests do not replace.
    pub(crate) fn new(test: &str) -> Option<Self> {
        let kernel = Self(folder(&format!("kernel-{test}")));
        for (tool, script) in [("make", MAKE), ("gcc", "")] {
            kernel.tool(tool, script);
        }
        kernel.file("linux/virt/one.c", "one\ntwo\nthree\nfour\n");
        kernel.file("linux/virt/other.c", "other\n");
        kernel.file("series/config", "# Small.\nCONFIG_KVM=y\n");
        kernel.file("series/0001-two.patch", PATCH);
        let archive = kernel.archive();
        std::fs::create_dir_all(archive.parent().unwrap()).unwrap();
        let packed = Command::new("tar")
            .args(["--create", "--xz", "--file"])
            .arg(archive)
            .arg("--directory")
            .args([&kernel.0, Path::new("linux")])
            .status();
        let patch = Command::new("patch").arg("--version").output();
        let usable = packed.is_ok_and(|status| status.success()) && patch.is_ok();
        (usable || !skip("tar", "no tar, xz or patch is here")).then_some(kernel)
    }

    fn archive(&self) -> PathBuf {
        self.0
            .join("target/lab/source/usr/src/linux-source-6.12.tar.xz")
    }

    pub(crate) fn file(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub(crate) fn tool(&self, name: &str, script: &str) {
        self.file(&format!("bin/{name}"), &format!("#!/bin/sh\n{script}\n"));
        let mode = PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(self.0.join("bin").join(name), mode).unwrap();
    }

    /// The folder of tools, then those of the machine.
    pub(crate) fn path(&self) -> String {
        let path = std::env::var("PATH").unwrap();
        format!("{}:{path}", self.0.join("bin").display())
    }

    fn build(&self) -> Output {
        self.build_with(&self.path())
    }

    fn build_with(&self, path: &str) -> Output {
        own_lab(&self.0.join("target"), &["kernel", "--series"])
            .arg(self.0.join("series"))
            .env("PATH", path)
            .output()
            .unwrap()
    }

    /// Builds, and returns the printed kernel's contents.
    #[track_caller]
    fn built(&self) -> String {
        let output = self.build();
        assert!(output.status.success(), "{output:?}");
        let path = String::from_utf8(output.stdout).unwrap();
        std::fs::read_to_string(path.trim_end()).unwrap()
    }

    /// The calls of make so far.
    fn calls(&self) -> usize {
        let calls = std::fs::read_to_string(self.0.join("target/lab/kernel/build/calls"));
        calls.unwrap().lines().count()
    }

    fn changed(&self, file: &str) -> SystemTime {
        let file = self.0.join("target/lab/kernel/tree").join(file);
        file.metadata().unwrap().modified().unwrap()
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_kernel_is_built_again_only_for_what_changed() {
    let Some(kernel) = Kernel::new("again") else {
        return;
    };
    assert_eq!(kernel.built(), "one\nzwei\nthree\nfour\n");
    assert_eq!(kernel.calls(), 2);
    let (one, other) = (kernel.changed("virt/one.c"), kernel.changed("virt/other.c"));
    kernel.built();
    assert_eq!(kernel.calls(), 2, "nothing has changed");

    // A second patch, which changes another file only.
    let second = "--- a/virt/other.c\n+++ b/virt/other.c\n@@ -1 +1 @@\n-other\n+more\n";
    kernel.file("series/0002-other.patch", second);
    kernel.built();
    assert_eq!(kernel.calls(), 4);
    assert_eq!(kernel.changed("virt/one.c"), one);
    assert_ne!(kernel.changed("virt/other.c"), other);

    // An edited patch, then none.
    let edited = PATCH.replace("zwei", "deux");
    kernel.file("series/0001-two.patch", &edited);
    assert_eq!(kernel.built(), "one\ndeux\nthree\nfour\n");
    std::fs::remove_file(kernel.0.join("series/0001-two.patch")).unwrap();
    assert_eq!(kernel.built(), "one\ntwo\nthree\nfour\n");
}

#[test]
fn checkouts_share_the_builds_of_one_cache() {
    let Some(kernel) = Kernel::new("shared") else {
        return;
    };
    let (home, path) = (kernel.0.join("home"), kernel.path());
    std::fs::create_dir_all(home.join("pageferry")).unwrap();
    let source = |folder: &Path| folder.join("source");
    std::fs::rename(
        source(&kernel.0.join("target/lab")),
        source(&home.join("pageferry")),
    )
    .unwrap();
    let build = |checkout: &str| {
        let output = lab(&["kernel", "--series"])
            .arg(kernel.0.join("series"))
            .env("CARGO_TARGET_DIR", kernel.0.join(checkout))
            .env("XDG_CACHE_HOME", &home)
            .env("PATH", &path)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let image = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim_end());
        let builds = String::from_utf8_lossy(&output.stderr).contains("building the kernel");
        (std::fs::read_to_string(&image).unwrap(), builds)
    };
    let (first, second) = ("one\nzwei\nthree\nfour\n", "one\ndeux\nthree\nfour\n");
    assert_eq!(build("a"), (first.to_owned(), true));
    assert_eq!(build("b"), (first.to_owned(), false));
    // Another series has its own build, and the first one stays.
    kernel.file("series/0001-two.patch", &PATCH.replace("zwei", "deux"));
    assert_eq!(build("b"), (second.to_owned(), true));
    kernel.file("series/0001-two.patch", PATCH);
    assert_eq!(build("a"), (first.to_owned(), false));
}

#[test]
fn another_source_replaces_the_tree() {
    let Some(kernel) = Kernel::new("source") else {
        return;
    };
    kernel.built();
    let newer = Kernel::new("newer-source").unwrap();
    newer.file("linux/virt/one.c", "one\ntwo\nthree\nfour\nfive\n");
    let tar = Command::new("tar")
        .args(["--create", "--xz", "--file"])
        .arg(kernel.archive())
        .arg("--directory")
        .args([&newer.0, Path::new("linux")])
        .status();
    assert!(tar.unwrap().success());
    assert_eq!(kernel.built(), "one\nzwei\nthree\nfour\nfive\n");
}

#[test]
fn a_patch_that_does_not_apply_is_named() {
    let Some(kernel) = Kernel::new("patch") else {
        return;
    };
    kernel.file("series/0001-two.patch", &PATCH.replace("-two", "-second"));
    let says = "0001-two.patch does not apply to this source: Hunk #1 FAILED at 1.";
    assert_ended(&kernel.build(), 125, says);
    // And it leaves nothing behind that a right one would meet.
    kernel.file("series/0001-two.patch", PATCH);
    assert_eq!(kernel.built(), "one\nzwei\nthree\nfour\n");
}

#[test]
fn a_patch_that_names_no_file_of_the_source_is_refused() {
    let Some(kernel) = Kernel::new("names") else {
        return;
    };
    for wrong in ["", "+++ b/../outside\n", "+++ b//etc/passwd\n"] {
        kernel.file("series/0001-two.patch", wrong);
        let says = "0001-two.patch is no patch for a kernel: 'git format-patch'";
        assert_ended(&kernel.build(), 125, says);
    }
    kernel.file("series/0001-two.patch", "+++ b/virt/none.c\n");
    assert_ended(&kernel.build(), 125, "tree/virt/none.c: No such file");
}

#[test]
fn a_damaged_source_is_named() {
    let Some(kernel) = Kernel::new("damaged") else {
        return;
    };
    std::fs::write(kernel.archive(), "not xz").unwrap();
    let output = kernel.build();
    assert_ended(&output, 125, "linux-source-6.12.tar.xz: ");
    assert_ended(
        &output,
        125,
        "the file is damaged: remove the folder source",
    );
}

#[test]
fn a_bad_checksum_is_one_sentence() {
    let Some(kernel) = Kernel::new("checksum") else {
        return;
    };
    std::fs::remove_dir_all(kernel.0.join("target/lab/source")).unwrap();
    // The words of apt 2.6.
    let apt = "case \"$*\" in
*indextargets*) . /etc/os-release; echo http://here/debian $VERSION_CODENAME;;
*install*) cat >&2 <<END
E: Failed to fetch http://here/linux-source-6.12.deb  Hash Sum mismatch
   Hashes of expected file:
    - SHA256:00
E: Unable to fetch some archives, maybe run apt-get update or try with --fix-missing?
END
exit 100;;
esac";
    kernel.tool("apt-get", apt);
    let output = kernel.build();
    assert_ended(&output, 125, "linux-source-6.12.deb  Hash Sum mismatch");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(stderr.lines().count(), 2, "{stderr}");
    // The next try begins anew.
    assert!(!kernel.0.join("target/lab/source").exists());
}

#[test]
fn an_option_that_make_drops_is_named() {
    let Some(kernel) = Kernel::new("option") else {
        return;
    };
    kernel.tool("make", &format!("{MAKE}\necho CONFIG_X=y >$out/.config"));
    assert_ended(&kernel.build(), 125, "configuration has no CONFIG_KVM=y");
}

#[test]
fn a_failed_build_says_what_the_compiler_says() {
    let Some(kernel) = Kernel::new("fails") else {
        return;
    };
    kernel.built();
    let fails = "echo '  CC a.o'; echo 'a.c:1: error: no type' >&2; echo 'make: *** a'; exit 2";
    let make = format!("{MAKE}\ncase $* in *bzImage*) {fails};; esac");
    kernel.tool("make", &make);
    kernel.file("series/0001-two.patch", &PATCH.replace("zwei", "deux"));
    assert_ended(&kernel.build(), 125, "make.log: a.c:1: error: no type");
    // The failed build is taken neither for its own series nor for the one before.
    kernel.tool("make", MAKE);
    kernel.file("series/0001-two.patch", PATCH);
    assert_eq!(kernel.built(), "one\nzwei\nthree\nfour\n");
}

#[test]
fn a_missing_tool_or_configuration_is_named() {
    let Some(kernel) = Kernel::new("tool") else {
        return;
    };
    let only = kernel.0.join("bin").display().to_string();
    let says = "patch is not here: building a kernel needs the package patch";
    assert_ended(&kernel.build_with(&only), 125, says);
    std::fs::remove_file(kernel.0.join("series/config")).unwrap();
    assert_ended(&kernel.build(), 125, "series/config: No such file");
}
