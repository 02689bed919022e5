//! The configuration of a double.

use crate::double;
use pageferry_userfault::uffd::Features;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The properties of a double.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Config {
    /// The seed of the memory file's contents, and of what the threads touch.
    pub seed: u64,
    /// The sizes of the regions in bytes: multiples of the page size. With an API, whole MiB in
    /// all. Without any there is no VM.
    pub regions: Vec<u64>,
    /// Where the memory's contents come from. With an API they come from nowhere.
    pub backend: Backend,
    /// The number of threads that stand for vCPUs.
    pub vcpus: usize,
    /// The time between two removals of the balloon in microseconds, or `None` for no balloon.
    pub balloon_us: Option<u64>,
    /// The API socket.
    pub api: Option<PathBuf>,
    /// What it does wrong.
    pub quirk: Quirk,
    /// The directory that becomes its root, in a mount namespace of its own. It has the API socket.
    pub jail: Option<PathBuf>,
}

/// Firecracker's memory backends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backend {
    /// `Uffd`: a page server. Pages have 4 KiB.
    #[default]
    Uffd,
    /// `Uffd` of releases up to 1.11 without a balloon: a page server is not told of removals.
    UffdOld,
    /// `Uffd` with pages of 2 MiB from the host's pool.
    UffdHuge,
    /// `File`: a private mapping of this memory file, without a page server.
    File(PathBuf),
}

/// Something that a real process could do wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Quirk {
    /// It does all right.
    #[default]
    Right,
    /// It does not pause its VM.
    RefusePause,
    /// It makes no snapshot.
    RefuseCreate,
    /// It ends while it makes a snapshot.
    DieAtCreate,
    /// Its state file is longer than Firecracker's limit.
    LongState,
    /// Its state file is a link to another file.
    LinkState,
    /// It says that its pages have 1 GiB, which no version has.
    HugePages,
    /// It does all right, and its pages are huge pages of a pool of 2 MiB pages.
    Pool,
    /// It has 1 MiB more than it says, as with hot-plugged memory.
    MoreMemory,
    /// It refuses the snapshot, and ends.
    RefuseLoad,
    /// A tap is busy: it opens its devices behind its vCPUs, refuses, and ends.
    RefuseDevice,
    /// It ends before the handshake.
    DieAtLoad,
    /// Its handshake has a region less.
    ShortHandshake,
    /// It ends when its VM is to run.
    DieAtResume,
    /// It does all right, and its VM has metadata, a log of dirty pages, and a logger.
    Settings,
    /// It is of another minor version.
    OtherVersion,
    /// It makes no diff snapshot without a log of dirty pages, as older versions.
    NoDiff,
}

impl double::Config for Config {
    const ENTRY: &'static str = "firecracker_double";

    fn needs(&self) -> Option<Features> {
        match self.backend {
            Backend::File(_) => None,
            Backend::UffdOld => Some(Features::empty()),
            Backend::Uffd | Backend::UffdHuge => Some(Features::EVENT_REMOVE),
        }
    }

    fn api(&self) -> Option<PathBuf> {
        let api = self.api.clone()?;
        Some(match &self.jail {
            Some(jail) => Path::new("/").join(api.strip_prefix(jail).expect("a path in the jail")),
            None => api,
        })
    }

    fn program(&self) -> Option<Command> {
        let this = std::env::current_exe().expect("a path");
        let Some(jail) = &self.jail else {
            return Some(Command::new(this));
        };
        let works = Command::new("unshare").args(["--mount", "true"]).status();
        if !works.is_ok_and(|status| status.success()) {
            crate::skip("jail", "`unshare --mount` fails: only root may");
            return None;
        }
        // A program needs its libraries, which a jailer has linked into the real one.
        let script = "set -e
            mount --bind \"$0\" \"$0\"
            cd \"$0\"
            for each in lib lib64 usr; do
                if [ -d /$each ]; then mkdir -p $each; mount --bind /$each $each; fi
            done
            touch program
            mount --bind \"$1\" program
            shift
            exec chroot . /program \"$@\"";
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c", script])
            .arg(jail)
            .arg(this);
        Some(command)
    }
}
