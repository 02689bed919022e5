//! Sockets, directories and files that another user, another process or the next run may touch.
//!
//! **Guarantee.** A user who may change the directory gets the things that were made for him there,
//! and nothing else: no swapped name or link makes this process give him another file. Nobody but
//! the owner of a socket can connect, from the first moment on. Of two processes that want one
//! path, one gets it, and a socket that somebody listens at is never taken away. Dropping a value
//! removes its file or directory, if that is still there and still the same. The next process
//! removes what a killed one left.
//!
//! **Mechanism.** A path is resolved once, to a descriptor of its directory. All later calls go
//! through that descriptor, and follow no link. A socket of somebody else is made in a [`Folder`]
//! that only this process can enter, gets its owner and mode there, and is then renamed to its
//! place. Only a process that holds the lock of the directory (`flock(2)`) replaces a socket.
//!
//! **Neighbours.** Above: all rooms that listen at a path or meet a VMM in a directory. No other
//! room calls `chown` or `chmod`, or binds a socket to a path.

mod folder;
mod note;
mod socket;
#[cfg(test)]
mod tests;

pub use folder::{Folder, OwnError, give, own_directory, remove_directory};
pub use note::Note;
pub use socket::{ListenError, SocketFile, listen_at};

use rustix::fs::{FileType, Gid, Mode, OFlags, Stat, Uid};
use rustix::io::Errno;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::Path;

/// The user, group and mode of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Owner {
    /// The user id; that of this process by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<u32>,
    /// The group id; that of this process by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// The permission bits, 0o600 by default. In JSON they are text in octal, such as "660", or a
    /// number: JSON has no octal numbers.
    #[serde(deserialize_with = "octal", serialize_with = "as_octal")]
    pub mode: u32,
}

impl Default for Owner {
    fn default() -> Self {
        Self {
            user: None,
            group: None,
            mode: 0o600,
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Octal {
    Text(String),
    Number(u32),
}

fn octal<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    let expected = "the mode: expected octal text such as \"660\", or a number up to 511";
    match Octal::deserialize(from).map_err(|_| D::Error::custom(expected))? {
        Octal::Text(text) => {
            let digits = text.bytes().all(|digit| digit.is_ascii_digit());
            let mode = digits.then(|| u32::from_str_radix(&text, 8).ok()).flatten();
            mode.ok_or_else(|| D::Error::custom(expected))
        }
        Octal::Number(number) => Ok(number),
    }
}

fn as_octal<S: Serializer>(mode: &u32, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&format_args!("{mode:03o}"))
}

impl Owner {
    fn ids(&self) -> (Option<Uid>, Option<Gid>) {
        (self.user.map(Uid::from_raw), self.group.map(Gid::from_raw))
    }
}

/// Opens a directory, whose path may have links.
fn open_directory(path: &Path) -> Result<OwnedFd, Errno> {
    let path = match path.as_os_str().is_empty() {
        true => Path::new("."),
        false => path,
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty())
}

/// The open directory of a path, and the name in it.
fn split(path: &Path) -> Result<(OwnedFd, &OsStr), Errno> {
    let name = path.file_name().ok_or(Errno::ISDIR)?;
    let parent = path.parent().unwrap_or(Path::new("."));
    Ok((open_directory(parent)?, name))
}

fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// Runs the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
