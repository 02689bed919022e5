//! `cargo xtask guest-linux --arch x86_64` as a user calls it. Most tests have a script in the
//! place of make. The last one boots the kernels that the command has left, in plain QEMU.

use crate::kernel::{Kernel, MAKE};
use crate::packages;
use pageferry_testkit::{guest_linux_cloud, guest_linux_x86_64};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Makes the files that only this command needs.
const MORE: &str = "mkdir -p $out/kernel/rcu $out/kernel/locking
for made in vmlinux kernel/torture.ko kernel/rcu/rcutorture.ko kernel/locking/locktorture.ko
do echo $made >$out/$made; done";
/// Compiles nothing.
const GCC: &str = "while [ $# -gt 0 ]; do [ $1 = -o ] && echo the first process >$2; shift; done";
const MODULES: [&str; 6] = [
    "drivers/virtio/virtio_mmio",
    "drivers/block/virtio_blk",
    "net/core/failover",
    "drivers/net/net_failover",
    "drivers/net/virtio_net",
    "drivers/char/hw_random/virtio-rng",
];

/// A kernel's source and Debian's kernel with its modules, of which the last is compressed.
fn fetched(test: &str) -> Option<Kernel> {
    let kernel = Kernel::new(test)?;
    kernel.tool("make", &format!("{MAKE}\n{MORE}"));
    kernel.tool("gcc", GCC);
    let [plain @ .., compressed] = MODULES;
    for module in plain {
        kernel.file(&module_file(module, "ko"), &format!("this is {module}"));
    }
    kernel.file(&module_file(compressed, "ko.xz"), "compressed");
    kernel.file("target/lab/root/boot/vmlinuz-6.12.1-cloud", "Debian's own");
    kernel.tool("../target/lab/root/bin/busybox", "echo unpacked by $1");
    Some(kernel)
}

fn module_file(module: &str, end: &str) -> String {
    format!("target/lab/root/lib/modules/6.12.1-cloud/kernel/{module}.{end}")
}

fn guest_linux(kernel: &Kernel) -> Output {
    Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["--no-cache", "guest-linux", "--arch", "x86_64"])
        .env("CARGO_TARGET_DIR", kernel.0.join("target"))
        .env("PATH", kernel.path())
        .output()
        .unwrap()
}

/// The text that gzip has compressed there.
fn uncompressed(file: &Path) -> String {
    let output = Command::new("gzip").arg("-dc").arg(file).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn both_kernels_and_their_archives_are_left_in_a_folder_of_their_own() {
    let Some(kernel) = fetched("guest") else {
        return;
    };
    let output = guest_linux(&kernel);
    assert!(output.status.success(), "{output:?}");
    let folder = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim_end());
    assert!(folder.ends_with("target/guest-linux/x86_64"), "{folder:?}");
    for (file, contents) in [
        ("bzImage", "one\ntwo\nthree\nfour\n"),
        ("vmlinux", "vmlinux\n"),
        ("vmlinuz-cloud", "Debian's own"),
    ] {
        let made = std::fs::read_to_string(folder.join(file)).unwrap();
        assert_eq!(made, contents, "{file}");
    }
    let ours = uncompressed(&folder.join("initrd.gz"));
    assert!(ours.contains("the first process"), "{ours}");
    assert!(ours.contains("rcutorture.ko"), "{ours}");
    assert!(!ours.contains("modules/list"), "{ours}");
    let stock = uncompressed(&folder.join("stock.gz"));
    let list = "virtio_mmio.ko\nvirtio_blk.ko\nfailover.ko\nnet_failover.ko\nvirtio_net.ko\n\
                virtio-rng.ko\n";
    for part in [
        "the first process",
        "modules/list",
        list,
        "modules/virtio_net.ko",
        "this is drivers/net/virtio_net",
        "unpacked by xzcat",
    ] {
        assert!(stock.contains(part), "no {part} in {stock}");
    }

    // Nothing has changed: no kernel is made again, but for the headers.
    let calls = || {
        let calls = kernel.0.join("target/lab/guest-x86_64/build/calls");
        std::fs::read_to_string(calls).unwrap()
    };
    let before = calls();
    assert!(before.contains("bzImage modules"), "{before}");
    assert!(guest_linux(&kernel).status.success());
    let after = calls();
    let added = after.strip_prefix(&before).unwrap();
    assert!(!added.contains("bzImage"), "{added}");
}

#[test]
fn a_kernel_for_clouds_that_lacks_a_module_is_refused() {
    let Some(kernel) = fetched("guest-module") else {
        return;
    };
    let module = kernel.0.join(module_file("drivers/net/virtio_net", "ko"));
    std::fs::remove_file(module).unwrap();
    let output = guest_linux(&kernel);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{stderr}");
    let says = "vmlinuz-6.12.1-cloud has no module drivers/net/virtio_net";
    assert!(stderr.contains(says), "{stderr}");
}

/// The results are those of the soft engine's guest.
#[test]
fn the_kernels_boot_in_plain_qemu_and_check_themselves() {
    let Some(root) = packages() else {
        return;
    };
    for (files, modules) in [(guest_linux_x86_64(), 0), (guest_linux_cloud(), 6)] {
        let Some([kernel, initrd]) = files else {
            return;
        };
        let libraries = ["usr/lib", "lib"].map(|lib| {
            let folder = root.join(lib).join("x86_64-linux-gnu");
            folder.display().to_string()
        });
        let mut qemu = Command::new("timeout");
        qemu.env("LD_LIBRARY_PATH", libraries.join(":"))
            .arg("250")
            .arg(root.join("usr/bin/qemu-system-x86_64"));
        for firmware in ["qemu", "seabios"] {
            qemu.arg("-L").arg(root.join("usr/share").join(firmware));
        }
        let output = qemu
            .args(["-machine", "q35", "-accel", "tcg", "-smp", "2", "-m", "256"])
            .args(["-nodefaults", "-display", "none", "-serial", "stdio"])
            .arg("-no-reboot")
            .arg("-kernel")
            .arg(&kernel)
            .arg("-initrd")
            .arg(&initrd)
            .args(["-append", "console=ttyS0 panic=-1 loglevel=3 pf=check"])
            .output()
            .unwrap();
        let console = String::from_utf8_lossy(&output.stdout);
        let has = |line: &str| console.lines().any(|said| said.trim_end() == line);
        for line in [
            "PF check loop 3efd7e62a4424207",
            "PF check md5-of-a-tree 8999ebebc1070351",
            "PF check written-code 60865a5103832432",
            "PF check load-across-pages 1c150e0700f9f2eb",
            "PF check store-across-pages 75d8c8f8c8c7edfb",
            "PF check store-to-read-only b",
            "PF check run-without-execute b",
            "PF check run-with-execute 0",
            "PF check processes 1",
            "PF done",
        ] {
            assert!(has(line), "{}: no '{line}' in {console}", kernel.display());
        }
        assert_eq!(has(&format!("PF modules {modules}")), modules > 0);
        assert!(!console.contains("PF FAIL"), "{console}");
        // It has powered off, which needs ACPI.
        assert!(output.status.success(), "{:?}: {console}", output.status);
    }
}
