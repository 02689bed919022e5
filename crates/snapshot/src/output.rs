//! Files that appear whole or not at all.
//!
//! **Guarantee.** A file gets its name only when all its bytes are on the disk. It never takes the
//! place of another file: that might be the base of a diff. Only its owner can read it, because
//! guest memory holds secrets.
//!
//! **Mechanism.** The bytes go to `.NAME.PID-N.part` in the same directory. Dropping the output
//! removes that file. Only SIGKILL or a crash of the host leaves it.

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// A file that has no name yet.
pub(crate) struct Output {
    pub(crate) file: File,
    part: PathBuf,
    path: PathBuf,
}

impl Output {
    /// # Errors
    /// When there is a file at `path` already, or the directory cannot be written.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let Some(name) = path.file_name() else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "it names no file",
            ));
        };
        if path.symlink_metadata().is_ok() {
            return Err(there_already());
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let mut number = 0;
        loop {
            let mut part = std::ffi::OsString::from(".");
            part.push(name);
            part.push(format!(".{}-{number}.part", std::process::id()));
            let part = path.with_file_name(part);
            match options.open(&part) {
                Ok(file) => {
                    return Ok(Self {
                        file,
                        part,
                        path: path.to_owned(),
                    });
                }
                // Another thread, or a process of this number that was killed.
                Err(why) if why.kind() == io::ErrorKind::AlreadyExists && number < 100 => {
                    number += 1;
                }
                Err(why) => return Err(why),
            }
        }
    }

    /// Writes all to the disk, and gives the file its name.
    ///
    /// # Errors
    /// When the host refuses, or a file has come to the path meanwhile.
    pub(crate) fn finish(self) -> io::Result<()> {
        self.file.sync_all()?;
        let renamed = renameat_with(CWD, &self.part, CWD, &self.path, RenameFlags::NOREPLACE);
        match renamed {
            Ok(()) => {}
            Err(Errno::EXIST) => return Err(there_already()),
            // Some file systems, such as NFS, only know the plain call.
            Err(Errno::INVAL | Errno::NOSYS) if self.path.symlink_metadata().is_err() => {
                fs::rename(&self.part, &self.path)?;
            }
            Err(why) => return Err(why.into()),
        }
        let directory = self
            .path
            .parent()
            .filter(|path| !path.as_os_str().is_empty());
        let synced = File::open(directory.unwrap_or(Path::new("."))).and_then(|dir| dir.sync_all());
        if synced.is_err() {
            let _ = fs::remove_file(&self.path);
        }
        synced
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // Once renamed, it is not there any more.
        let _ = fs::remove_file(&self.part);
    }
}

fn there_already() -> io::Error {
    let why = "there is a file already: remove it first, or choose another name";
    io::Error::new(io::ErrorKind::AlreadyExists, why)
}
