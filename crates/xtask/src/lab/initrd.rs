//! The emulated machine's file system: an archive in the format that Linux unpacks at boot
//! (cpio, "newc": `Documentation/driver-api/early-userspace/buffer-format.rst`).

use super::Error;
use super::extra::Extra;
use super::packages::{Components, module_bytes, module_name};
use super::program::{Programs, quoted};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

/// A line of the serial console that begins so brings a command's exit code.
pub(crate) const EXIT_CODE: &str = "@@ lab exit code ";
/// A line that begins so says what the lab is.
pub(crate) const ABOUT: &str = "@@ lab ";
/// A line that begins so says why no command runs.
pub(crate) const CANNOT: &str = "@@ lab cannot run: ";
/// The last line that counts.
pub(crate) const ENDED: &str = "@@ lab ended";

/// Variables that are passed on.
const PASSED_ON: [&str; 3] = ["PAGEFERRY_", "RUST_", "PROPTEST_"];

/// The contents of the archive.
pub(crate) struct Initrd<'a> {
    pub(crate) parts: &'a Components,
    pub(crate) programs: &'a Programs,
    pub(crate) files: &'a [Extra],
    pub(crate) kvm_amd_options: &'a str,
}

impl Initrd<'_> {
    /// Writes the archive to `file`.
    pub(crate) fn write(&self, file: &Path) -> Result<(), Error> {
        let mut archive = Archive::default();
        for folder in ["proc", "sys", "dev", "tmp", "run", "root"] {
            archive.folder(folder);
        }
        archive.file("init", &self.script()?.into_bytes());
        archive.file("bin/busybox", &read(&self.parts.busybox)?);
        for module in &self.parts.modules {
            let path = format!("modules/{}", module_name(module));
            archive.file(&path, &module_bytes(&self.parts.busybox, module)?);
        }
        for executable in &self.programs.executables {
            let stripped = file.with_extension("stripped");
            let bytes = stripped_copy(executable, &stripped);
            let _ = std::fs::remove_file(&stripped);
            archive.file(inside(executable), &bytes?);
        }
        for library in &self.programs.libraries {
            archive.file(inside(library), &read(library)?);
        }
        for file in self.files {
            archive.file(inside(&file.path), &read(&file.source)?);
        }
        let bytes = archive.finish();
        std::fs::write(file, bytes).map_err(Error::io(format!("write {}", file.display())))
    }

    /// The first program of the emulated machine.
    fn script(&self) -> Result<String, Error> {
        let mut script = String::from(START);
        for module in &self.parts.modules {
            let name = module_name(module);
            let options = if name.starts_with("kvm-amd") {
                self.kvm_amd_options
            } else {
                ""
            };
            let _ = writeln!(script, "insmod '/modules/{name}' {options}");
        }
        script.push_str(WAIT_FOR_CLOCK);
        for (key, value) in std::env::vars_os() {
            let passed = |key: &str| PASSED_ON.iter().any(|start| key.starts_with(start));
            if let Some(key) = key.to_str().filter(|key| passed(key)) {
                let _ = writeln!(script, "export {key}={}", quoted(&value)?);
            }
        }
        for command in &self.programs.commands {
            for word in command {
                script.push_str(&quoted(word)?);
                script.push(' ');
            }
            // The line begins anew, even where the command's last one did not end.
            let _ = writeln!(script, "</dev/null\necho \"\n{EXIT_CODE}$?\"");
        }
        script.push_str(END);
        Ok(script)
    }
}

/// Up to the modules. The console is the serial line; what a terminal would change stays as it is.
const START: &str = "#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin HOME=/root TMPDIR=/tmp
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs none /dev/shm
mount -t devpts pts /dev/pts
stty -opost </dev/console
ifconfig lo 127.0.0.1 up
cd /root
";

/// No VM before the clock is the processor's: a nested guest would see it jump.
const WAIT_FOR_CLOCK: &str =
    "clock=/sys/devices/system/clocksource/clocksource0/current_clocksource
i=0
while [ \"$(cat $clock)\" != tsc ] && [ $i -lt 50 ]; do sleep 0.1; i=$((i+1)); done
if [ ! -e /dev/kvm ]; then
    echo \"@@ lab cannot run: Linux $(uname -r) gives no /dev/kvm: it needs KVM for AMD processors\"
    poweroff -f
fi
echo \"@@ lab Linux $(uname -r), npt=$(cat /sys/module/kvm_amd/parameters/npt), \
tdp_mmu=$(cat /sys/module/kvm/parameters/tdp_mmu)\"
";

/// The kernel's complaints, then the end.
const END: &str = "dmesg | grep -E 'BUG:|WARNING: CPU|Oops|segfault|blocked for' | \
sed 's/^/@@ lab kernel: /'
echo '@@ lab ended'
poweroff -f
";

fn read(file: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(file).map_err(Error::io(format!("read {}", file.display())))
}

/// `file` without what only a debugger needs, by way of `copy`; as it is where there is no `strip`.
fn stripped_copy(file: &Path, copy: &Path) -> Result<Vec<u8>, Error> {
    let stripped = Command::new("strip").arg("-o").arg(copy).arg(file).status();
    read(if stripped.is_ok_and(|status| status.success()) {
        copy
    } else {
        file
    })
}

/// An absolute path, relative to the root.
fn inside(path: &Path) -> &str {
    path.to_str().unwrap_or_default().trim_start_matches('/')
}

/// An archive that grows.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    folders: BTreeSet<String>,
    entries: u32,
}

impl Archive {
    /// A folder, with those above it.
    pub(crate) fn folder(&mut self, path: &str) {
        if path.is_empty() || !self.folders.insert(path.to_owned()) {
            return;
        }
        self.entry(path, 0o040_755, [0, 0], &[]);
    }

    /// A character device with its major and minor number.
    pub(crate) fn device(&mut self, path: &str, numbers: [u32; 2]) {
        self.entry(path, 0o020_600, numbers, &[]);
    }

    /// A symbolic link.
    pub(crate) fn link(&mut self, path: &str, target: &str) {
        self.entry(path, 0o120_777, [0, 0], target.as_bytes());
    }

    /// A file that may be executed.
    pub(crate) fn file(&mut self, path: &str, bytes: &[u8]) {
        self.entry(path, 0o100_755, [0, 0], bytes);
    }

    /// Adds what has this path, behind the folders above it.
    fn entry(&mut self, path: &str, mode: u32, [major, minor]: [u32; 2], bytes: &[u8]) {
        if let Some((above, _)) = path.rsplit_once('/') {
            self.folder(above);
        }
        self.entries += 1;
        let size = u32::try_from(bytes.len()).expect("no program has 4 GiB");
        let path_size = path.len() as u32 + 1;
        // Magic; inode, mode, links, user, group, time, size, the numbers of the device that holds
        // the file, those of the device that it is, size of the path, checksum.
        let fields = [
            self.entries,
            mode,
            1,
            0,
            0,
            0,
            size,
            0,
            0,
            major,
            minor,
            path_size,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(bytes);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, [0, 0], &[]);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The paths, modes and bytes of an archive.
    fn entries(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut found = Vec::new();
        loop {
            let field = |at: usize| {
                let text = std::str::from_utf8(&bytes[6 + 8 * at..][..8]).unwrap();
                u32::from_str_radix(text, 16).unwrap()
            };
            assert_eq!(&bytes[..6], b"070701");
            let (mode, size, path_size) = (field(1), field(6) as usize, field(11) as usize);
            let path = String::from_utf8(bytes[110..110 + path_size - 1].to_vec()).unwrap();
            if path == "TRAILER!!!" {
                return found;
            }
            let data = (110 + path_size).next_multiple_of(4);
            found.push((path, mode, bytes[data..data + size].to_vec()));
            bytes = &bytes[(data + size).next_multiple_of(4)..];
        }
    }

    #[test]
    fn folders_come_before_their_files_and_once() {
        let mut archive = Archive::default();
        archive.file("a/b/one", b"1");
        archive.file("a/b/three", b"333");
        let found = entries(&archive.finish());
        let paths: Vec<_> = found
            .iter()
            .map(|(path, mode, _)| (path.as_str(), *mode))
            .collect();
        let (folder, file) = (0o040_755, 0o100_755);
        assert_eq!(
            paths,
            [
                ("a", folder),
                ("a/b", folder),
                ("a/b/one", file),
                ("a/b/three", file)
            ]
        );
        assert_eq!(found[3].2, b"333");
    }
}
