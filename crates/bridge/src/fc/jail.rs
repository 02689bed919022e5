//! The files that we share with a Firecracker process, also one in a jail.
//!
//! **Guarantee.** Firecracker reaches each file by the path that it is given. All of them, and what
//! was mounted for them, are gone when [`Place`] is dropped.
//!
//! **Mechanism.** They lie in a directory beside the API socket, which Firecracker's user owns. The
//! jailer gives Firecracker a root of its own (`chroot`), in a mount namespace of its own. So a
//! path within that root has another beginning there.
//!
//! A memfd has a path in `/proc` only, and a jail has no `/proc`. There the memory file lies in a
//! tmpfs, which is as fast. A thread enters Firecracker's mount namespace and attaches it below the
//! directory. Other processes never see it. The kernel detaches it when its directory is removed
//! here.
//!
//! **Neighbours.** `foreign::api` has the directory.
#![expect(
    unsafe_code,
    reason = "a thread leaves the mount namespace of the others"
)]

use crate::foreign::VmmError;
use crate::foreign::api::Meeting;
use pageferry_hostfs::give;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, fsconfig_create,
    fsconfig_set_string, fsmount, fsopen, move_mount,
};
use rustix::process::Pid;
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Where Firecracker finds our files.
pub(super) struct Place {
    pub(super) meeting: Meeting,
    jail: Option<Jail>,
}

/// A root that is not ours.
struct Jail {
    process: Pid,
    /// Its path here.
    root: PathBuf,
}

/// A memory file.
pub(super) struct MemoryFile {
    pub(super) fd: OwnedFd,
    /// Its path as Firecracker sees it.
    pub(super) path: PathBuf,
    /// Whether its size is sealed.
    pub(super) is_sealed: bool,
}

impl Place {
    /// Makes a directory beside the API socket of a process.
    pub(super) fn beside(api: &Path, process: Option<Pid>) -> Result<Self, VmmError> {
        let Some(process) = process.filter(|process| has_own_root(*process)) else {
            let meeting = Meeting::beside(api)?;
            return Ok(Self {
                meeting,
                jail: None,
            });
        };
        let real = std::fs::canonicalize(api);
        let paths = [real.unwrap_or_else(|_| api.to_owned()), api.to_owned()];
        for path in paths {
            let mut above = path.ancestors();
            if let Some(root) = above.find(|above| is_root(above, process)) {
                return Ok(Self {
                    meeting: Meeting::beside(&path)?,
                    jail: Some(Jail {
                        process,
                        root: root.to_owned(),
                    }),
                });
            }
        }
        Err(VmmError::Jail(format!(
            "{} does not lie below the root directory of its process",
            api.display()
        )))
    }

    /// A path below the directory, as Firecracker sees it.
    pub(super) fn inside(&self, path: &Path) -> PathBuf {
        let below = self.jail.as_ref().map(|jail| path.strip_prefix(&jail.root));
        match below {
            Some(Ok(below)) => Path::new("/").join(below),
            _ => path.to_owned(),
        }
    }

    /// A file of `bytes` bytes for Firecracker's memory.
    pub(super) fn memory_file(&self, bytes: u64) -> Result<MemoryFile, VmmError> {
        let Some(jail) = &self.jail else {
            let fd = super::source::memfd(bytes)?;
            let number = std::os::fd::AsRawFd::as_raw_fd(&fd);
            let path = format!("/proc/{}/fd/{number}", std::process::id());
            return Ok(MemoryFile {
                fd,
                path: path.into(),
                is_sealed: true,
            });
        };
        let process = jail.process.as_raw_nonzero();
        let [theirs, ours] = [
            format!("/proc/{process}/ns/mnt"),
            "/proc/self/ns/mnt".into(),
        ];
        if identity(Path::new(&theirs)) == identity(Path::new(&ours)) {
            // A mount would stay here.
            let why = "it shares our mount namespace: expected one of its own, as by the jailer";
            return Err(VmmError::Jail(why.into()));
        }
        let failed = |e: Errno| VmmError::io("cannot make a tmpfs for guest memory", e);
        let mount = tmpfs(bytes).map_err(failed)?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let fd = rustix::fs::openat(&mount, "memory", flags, mode).map_err(failed)?;
        rustix::fs::ftruncate(&fd, bytes).map_err(failed)?;
        let file = File::from(fd);
        give(&file, &self.meeting.owner)
            .map_err(|e| VmmError::io("cannot give Firecracker its memory file", e))?;
        let folder = &self.meeting.folder;
        let point = folder.path().join("memory");
        folder
            .create_directory("memory")
            .map_err(|e| VmmError::io(format!("cannot make {}", point.display()), e))?;
        let path = self.inside(&point);
        let attached = jail.attach(&mount, &path);
        attached.map_err(|e| VmmError::io("cannot mount a tmpfs in Firecracker's jail", e))?;
        Ok(MemoryFile {
            fd: file.into(),
            path: path.join("memory"),
            is_sealed: false,
        })
    }
}

/// A tmpfs that is attached nowhere.
fn tmpfs(bytes: u64) -> Result<OwnedFd, Errno> {
    let fs = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&fs, "size", bytes.to_string())?;
    fsconfig_set_string(&fs, "mode", "0755")?;
    fsconfig_create(&fs)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

impl Jail {
    /// Attaches a mount at a directory, by its path in the jail.
    fn attach(&self, mount: &OwnedFd, path: &Path) -> std::io::Result<()> {
        let of_process = |name: &str| format!("/proc/{}/{name}", self.process.as_raw_nonzero());
        let namespace = File::open(of_process("ns/mnt"))?;
        let below = path.strip_prefix("/").unwrap_or(path);
        let target = Path::new(&of_process("root")).join(below);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let target = rustix::fs::open(target, flags, Mode::empty())?;
        let attach = || {
            // SAFETY: it unshares the root and the directory of this thread. No descriptor closes.
            unsafe { unshare_unsafe(UnshareFlags::FS) }?;
            let kind = Some(LinkNameSpaceType::Mount);
            move_into_link_name_space(namespace.as_fd(), kind)?;
            let empty =
                MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
            move_mount(mount, "", &target, "", empty)
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("fc-jail".into());
            let attached = thread.spawn_scoped(scope, attach)?.join();
            attached.unwrap_or(Err(Errno::IO)).map_err(Into::into)
        })
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino()))
}

fn root_of(process: Pid) -> PathBuf {
    format!("/proc/{}/root", process.as_raw_nonzero()).into()
}

/// Whether the root of a process is another directory than ours. If we may not look, it is ours:
/// Firecracker then says which file it does not find.
fn has_own_root(process: Pid) -> bool {
    identity(&root_of(process)).is_some_and(|root| Some(root) != identity(Path::new("/")))
}

/// Whether a directory is the root of a process.
fn is_root(directory: &Path, process: Pid) -> bool {
    let found = identity(directory);
    found.is_some() && found == identity(&root_of(process))
}
