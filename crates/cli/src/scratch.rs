//! Files that must not outlive the command: temporary directories and listening sockets.

use crate::exit::Failure;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// A new directory that only this user can enter. Dropping it removes it with its contents.
#[derive(Debug)]
pub(crate) struct ScratchDir {
    path: PathBuf,
}

impl ScratchDir {
    /// Creates the directory below the system's directory for temporary files.
    ///
    /// # Errors
    /// When the host refuses.
    pub(crate) fn new() -> Result<Self, Failure> {
        let mut random = [0; 8];
        pageferry_machine::fill_random(&mut random)
            .map_err(|e| Failure::os("cannot get random bytes", e))?;
        let name = format!("pageferry-{:016x}", u64::from_ne_bytes(random));
        let path = std::env::temp_dir().join(name);
        DirBuilder::new().mode(0o700).create(&path).map_err(|e| {
            Failure::os(format!("cannot create the directory {}", path.display()), e)
        })?;
        Ok(Self { path })
    }

    /// The path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// A socket file, removed on drop if it is still the same file.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl SocketFile {
    /// Takes ownership of the socket at `path`.
    ///
    /// # Errors
    /// When its metadata cannot be read.
    pub(crate) fn adopt(path: &Path) -> std::io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            identity: identity(path)?,
        })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // After somebody removed our socket, another VM may have created one of this name.
        if identity(&self.path).is_ok_and(|now| now == self.identity) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Device and inode.
fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let meta = std::fs::symlink_metadata(path)?;
    Ok((meta.dev(), meta.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scratch_directory_goes_with_all_it_holds() {
        let dir = ScratchDir::new().unwrap();
        let path = dir.path().to_owned();
        std::fs::write(path.join("file"), "x").unwrap();
        drop(dir);
        assert!(!path.exists());
    }

    #[test]
    fn only_the_own_socket_is_removed() {
        let dir = ScratchDir::new().unwrap();
        let path = dir.path().join("s");
        let first = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let file = SocketFile::adopt(&path).unwrap();
        let kept = dir.path().join("kept");
        std::fs::rename(&path, &kept).unwrap();
        let _second = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop((file, first));
        assert!(path.exists(), "another VM's socket is not ours to remove");
    }
}
