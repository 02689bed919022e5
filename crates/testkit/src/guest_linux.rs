//! The Linux guest that `cargo xtask guest-linux` builds.

use crate::skip;
use std::path::{Path, PathBuf};

/// The kernel and the archive with the first process; `None` after a skip of the resource `linux`.
///
/// They are in the folder that `PAGEFERRY_GUEST_LINUX` names, or where the command leaves them.
///
/// # Panics
/// If `PAGEFERRY_REQUIRE` names `linux` and a file is not there.
#[must_use]
#[track_caller]
pub fn guest_linux() -> Option<[PathBuf; 2]> {
    files(["Image", "initrd.gz"])
}

/// The kernel of ours for x86-64 with the same first process; `cargo xtask guest-linux --arch
/// x86_64` builds them.
///
/// # Panics
/// As [`guest_linux`].
#[must_use]
#[track_caller]
pub fn guest_linux_x86_64() -> Option<[PathBuf; 2]> {
    files(["x86_64/bzImage", "x86_64/initrd.gz"])
}

/// Debian's kernel for clouds with the same first process, which loads its modules; the same
/// command brings them.
///
/// # Panics
/// As [`guest_linux`].
#[must_use]
#[track_caller]
pub fn guest_linux_cloud() -> Option<[PathBuf; 2]> {
    files(["x86_64/vmlinuz-cloud", "x86_64/stock.gz"])
}

/// The same with a shell instead of the first process of tests.
///
/// # Panics
/// As [`guest_linux`].
#[must_use]
#[track_caller]
pub fn guest_shell() -> Option<[PathBuf; 2]> {
    files(["Image", "shell.gz"])
}

#[track_caller]
fn files(names: [&str; 2]) -> Option<[PathBuf; 2]> {
    let named = std::env::var_os("PAGEFERRY_GUEST_LINUX").filter(|folder| !folder.is_empty());
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target"),
        PathBuf::from,
    );
    let folder = named.map_or_else(|| target.join("guest-linux"), PathBuf::from);
    let files = names.map(|name| folder.join(name));
    if let Some(absent) = files.iter().find(|file| !file.is_file()) {
        let command = if names[0].starts_with("x86_64") {
            "cargo xtask guest-linux --arch x86_64"
        } else {
            "cargo xtask guest-linux"
        };
        let why = format!("there is no {}; `{command}` builds it", absent.display());
        skip("linux", why);
        return None;
    }
    Some(files)
}
