//! The files of the Linux guest that `cargo xtask guest-linux` builds.

use pageferry_machine::Engine;
use std::path::{Path, PathBuf};

/// The environment variable that names the folder.
const VARIABLE: &str = "PAGEFERRY_GUEST_LINUX";
/// The folder where `cargo xtask guest-linux` leaves its files.
const FOLDER: &str = "target/guest-linux";

/// A kernel and its initial RAM disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestLinux {
    /// The kernel.
    pub kernel: PathBuf,
    /// The initial RAM disk.
    pub initrd: PathBuf,
}

/// Finds the files of the guest for `engine`: the two that are named, else those in the folder that
/// the environment names, else those of the build.
///
/// # Errors
/// One sentence if there are none.
pub fn find(
    engine: Engine,
    kernel: Option<&Path>,
    initrd: Option<&Path>,
) -> Result<GuestLinux, String> {
    let named = std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty());
    let folder = named.map_or_else(|| PathBuf::from(FOLDER), PathBuf::from);
    find_in(&folder, engine, kernel, initrd)
}

fn find_in(
    folder: &Path,
    engine: Engine,
    kernel: Option<&Path>,
    initrd: Option<&Path>,
) -> Result<GuestLinux, String> {
    let (folder, image, build) = match engine {
        Engine::Soft => (folder.to_owned(), "Image", "cargo xtask guest-linux"),
        Engine::Kvm => (
            folder.join("x86_64"),
            "bzImage",
            "cargo xtask guest-linux --arch x86_64",
        ),
    };
    let file = |named: Option<&Path>, name| {
        let path = named.map_or_else(|| folder.join(name), Path::to_owned);
        match path.is_file() {
            true => Ok(path),
            false => Err(format!(
                "there is no Linux guest: {} is not a file; build one with `{build}`, or name its \
                 folder by {VARIABLE}",
                path.display()
            )),
        }
    };
    Ok(GuestLinux {
        kernel: file(kernel, image)?,
        initrd: file(initrd, "initrd.gz")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_files_come_before_the_folder() {
        let folder = std::env::temp_dir().join(format!("guest-linux-{}", std::process::id()));
        std::fs::create_dir(&folder).expect("a fresh folder");
        for (engine, file) in [(Engine::Soft, "/Image"), (Engine::Kvm, "/x86_64/bzImage")] {
            let absent = find_in(&folder, engine, None, None).expect_err("it is empty");
            for words in [file, "cargo xtask guest-linux"] {
                assert!(absent.contains(words), "{absent}");
            }
        }
        let files = ["Image", "initrd.gz", "own"].map(|name| folder.join(name));
        for file in &files {
            std::fs::write(file, "x").expect("written");
        }
        let [kernel, initrd, own] = files;
        let found = |named: Option<&Path>| find_in(&folder, Engine::Soft, named, None).ok();
        let both = GuestLinux { kernel, initrd };
        assert_eq!(found(None), Some(both.clone()));
        assert_eq!(
            found(Some(&own)),
            Some(GuestLinux {
                kernel: own.clone(),
                ..both
            })
        );
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
