//! The file and the version of a QEMU.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The program, as Debian names it.
pub const PROGRAM: &str = "qemu-system-riscv64";
/// The first version with the capability `postcopy-preempt`.
const OLDEST: (u32, u32) = (7, 1);

/// A QEMU that is new enough.
#[derive(Clone, Debug)]
pub struct Qemu {
    file: PathBuf,
    /// As QEMU says it.
    pub version: String,
    numbers: (u32, u32),
}

impl Qemu {
    /// Looks at the QEMU of `file`.
    ///
    /// # Errors
    /// One sentence if it is not there or too old.
    pub fn find(file: &Path) -> Result<Self, String> {
        let output = Command::new(file).arg("--version").output();
        let output = output.map_err(|why| {
            format!(
                "{} cannot be run ({why}): install Debian's package qemu-system-misc, or name \
                 another file",
                file.display()
            )
        })?;
        let text = String::from_utf8_lossy(&output.stdout);
        let (version, numbers) = version(&text).ok_or_else(|| {
            format!(
                "{} is '{}': QEMU {}.{} or later is needed, which has postcopy-preempt",
                file.display(),
                text.lines().next().unwrap_or("silent"),
                OLDEST.0,
                OLDEST.1
            )
        })?;
        Ok(Self {
            file: file.to_owned(),
            version: version.to_owned(),
            numbers,
        })
    }

    /// One that is not run.
    #[must_use]
    pub fn named(version: &str) -> Self {
        Self {
            file: PathBuf::new(),
            version: version.to_owned(),
            numbers: OLDEST,
        }
    }

    /// Whether it is this version or a later one.
    pub fn is_at_least(&self, major: u32, minor: u32) -> bool {
        self.numbers >= (major, minor)
    }

    /// Its file.
    pub fn file(&self) -> &Path {
        &self.file
    }
}

/// The version in what QEMU says of itself, and its first two numbers, if it is new enough.
fn version(text: &str) -> Option<(&str, (u32, u32))> {
    let version = text.strip_prefix("QEMU emulator version ")?;
    let version = version.split_whitespace().next()?;
    let mut numbers = version.split('.').map(|number| number.parse().ok());
    let found = (numbers.next()??, numbers.next()??);
    (found >= OLDEST).then_some((version, found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qemu_that_is_missing_or_old_is_told_in_a_sentence() {
        let missing = Qemu::find(Path::new("/nonexistent/qemu")).unwrap_err();
        assert!(missing.contains("qemu-system-misc"), "{missing}");
        let other = Qemu::find(Path::new("/bin/echo")).unwrap_err();
        assert!(other.contains("7.1 or later is needed"), "{other}");
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)\nCopyright";
        assert_eq!(version(debian), Some(("7.2.22", (7, 2))));
        let newer = version("QEMU emulator version 10.0.2");
        assert_eq!(newer, Some(("10.0.2", (10, 0))));
        for old in ["QEMU emulator version 7.0.9", "QEMU emulator version x", ""] {
            assert_eq!(version(old), None, "{old}");
        }
    }
}
