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
    files("initrd.gz")
}

/// The same with a shell instead of the first process of tests.
///
/// # Panics
/// As [`guest_linux`].
#[must_use]
#[track_caller]
pub fn guest_shell() -> Option<[PathBuf; 2]> {
    files("shell.gz")
}

#[track_caller]
fn files(archive: &str) -> Option<[PathBuf; 2]> {
    let named = std::env::var_os("PAGEFERRY_GUEST_LINUX").filter(|folder| !folder.is_empty());
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target"),
        PathBuf::from,
    );
    let folder = named.map_or_else(|| target.join("guest-linux"), PathBuf::from);
    let files = ["Image", archive].map(|name| folder.join(name));
    if let Some(absent) = files.iter().find(|file| !file.is_file()) {
        let why = format!(
            "there is no {}; `cargo xtask guest-linux` builds it",
            absent.display()
        );
        skip("linux", why);
        return None;
    }
    Some(files)
}
