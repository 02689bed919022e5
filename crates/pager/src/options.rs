//! The request for a restore. As JSON it is the body of `PUT /restores/{id}`.

use crate::source::is_address;
use pageferry_hostfs::Owner;
use serde::{Deserialize, Serialize};
use std::io;
use std::num::NonZeroU64;
use std::path::PathBuf;

/// A snapshot, the socket at which its VMM asks for pages, and how they are served.
///
/// ```
/// use pageferry_pager::{Background, Restore};
///
/// let body = r#"{"memory": "/snapshots/web/memory", "socket": "/run/web.sock"}"#;
/// let restore: Restore = serde_json::from_str(body)?;
/// assert_eq!(restore.background, Background::Off);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Restore {
    /// The memory file of the snapshot: a path, or an address such as `s3://bucket/memory` if the
    /// pager has a store for it. It must not change while a VM uses it: the VM itself is saved
    /// to another path. All paths are absolute.
    pub memory: PathBuf,
    /// The kind of that file. It is never guessed: the bytes of a memory file are the guest's.
    #[serde(default)]
    pub format: Format,
    /// The path of the Unix socket that the pager makes.
    pub socket: PathBuf,
    /// Owner and mode of that socket. A jailed VMM has a user of its own.
    #[serde(default)]
    pub owner: Owner,
    /// Whether pages come that nobody asked for.
    #[serde(default)]
    pub background: Background,
    /// The VM's fate while its memory cannot be read.
    #[serde(default)]
    pub on_loss: OnLoss,
    /// Where the order of first touches is written, when the restore ends. Pages then come one by
    /// one, since a touch of a page that came as a neighbour would not be seen. A pager that takes
    /// the VM over puts the pages that it finds first, in their order in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record: Option<PathBuf>,
    /// A recording whose pages are loaded ahead of the faults.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay: Option<PathBuf>,
}

impl Restore {
    /// A restore of `memory` at `socket`, with defaults.
    #[must_use]
    pub fn new(memory: impl Into<PathBuf>, socket: impl Into<PathBuf>) -> Self {
        Self {
            memory: memory.into(),
            format: Format::default(),
            socket: socket.into(),
            owner: Owner::default(),
            background: Background::default(),
            on_loss: OnLoss::default(),
            record: None,
            replay: None,
        }
    }

    /// The same with absolute paths, from the directory of this process.
    ///
    /// # Errors
    /// When the process has no directory.
    pub fn absolute(mut self) -> io::Result<Self> {
        for path in self.paths() {
            *path = std::path::absolute(&*path)?;
        }
        Ok(self)
    }

    /// A path that means something else to the next pager, whose directory may be another.
    pub(crate) fn relative(&self) -> Option<PathBuf> {
        let mut own = self.clone();
        let mut all = own.paths();
        all.find(|path| !path.is_absolute()).cloned()
    }

    /// The paths of files.
    fn paths(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        let memory = (!is_address(&self.memory)).then_some(&mut self.memory);
        let files = [self.record.as_mut(), self.replay.as_mut(), memory];
        files.into_iter().flatten().chain([&mut self.socket])
    }
}

/// The kind of a snapshot's memory file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// The bytes of memory, as Firecracker and Cloud Hypervisor write them.
    #[default]
    Raw,
    /// A snapshot packed by `pageferry snapshot pack`. Its bases lie beside it.
    Packed,
}

/// Whether pages come that nobody asked for. They cost the host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Background {
    /// Only pages that the VM touches, and their neighbours that are at hand.
    #[default]
    Off,
    /// All pages, while no fault waits.
    Idle,
    /// All pages, at most this number of bytes a second.
    Rate(NonZeroU64),
}

/// The fate of a VM that waits for a page that cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnLoss {
    /// Its threads wait. The pager reads again, every second in the end.
    #[default]
    Wait,
    /// SIGKILL: an orchestrator starts another VM.
    Kill,
    /// SIGSTOP: it stands still as a whole, until an operator sends SIGCONT.
    #[serde(alias = "pause-by-signal")]
    Pause,
}
