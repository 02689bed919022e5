//! The descriptor of `/dev/fuse`: replies, and the mount that belongs to it.
//!
//! All threads share one open file. A clone (`FUSE_DEV_IOC_CLONE`) would take the requests that
//! were read from it into its own end, and readers would get errors when the process dies.

use super::protocol::OutHeader;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::ffi::CString;
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// The type that this program's mounts have in `/proc/self/mountinfo`.
const KIND: &str = "fuse.pageferry";
/// The time in which a mount that is served answers.
const ANSWERS: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Device(OwnedFd);

impl Device {
    /// Opens a descriptor that has no mount yet.
    pub(super) fn open() -> Result<Self, Errno> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        rustix::fs::open("/dev/fuse", flags, Mode::empty()).map(Self)
    }

    /// Mounts a file system on a directory.
    pub(super) fn mount(&self, target: &Path) -> Result<(), Errno> {
        let user = rustix::process::geteuid().as_raw();
        let group = rustix::process::getegid().as_raw();
        let data = format!(
            "fd={},rootmode=40000,user_id={user},group_id={group},allow_other,default_permissions",
            self.0.as_raw_fd()
        );
        let data = CString::new(data).map_err(|_| Errno::INVAL)?;
        let flags =
            MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount("pageferry", target, KIND, flags, &*data)
    }

    /// A descriptor that outlived the process that mounted it. `None` if its mount has ended.
    pub(super) fn kept(fd: OwnedFd) -> Option<Self> {
        let mut polled = [PollFd::new(&fd, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec::default())).ok()?;
        let is_over = polled[0].revents().intersects(PollFlags::ERR);
        (!is_over).then_some(Self(fd))
    }

    /// Whether it is the descriptor of this mount, as far as the kernel tells. Linux 6.18 does.
    pub(super) fn is_of(&self, mount: &Found) -> bool {
        let path = format!("/proc/self/fdinfo/{}", self.0.as_raw_fd());
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let mut lines = text.lines();
        lines
            .find_map(|line| line.strip_prefix("fuse_connection:"))
            .is_none_or(|number| number.trim() == mount.connection)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Waits for a message. `None` once the file system has ended.
    pub(super) fn read<'a>(&self, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
        loop {
            match rustix::io::read(&self.0, &mut *buffer) {
                Ok(bytes) => return Some(&buffer[..bytes]),
                Err(Errno::NODEV | Errno::CONNABORTED) => return None,
                // A request that was taken back meanwhile, or a signal.
                Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => {}
                Err(errno) => {
                    tracing::error!("reading /dev/fuse failed: {errno}");
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
    }

    pub(super) fn reply(&self, unique: u64, body: &[u8]) {
        let header = OutHeader::reply(unique, body.len());
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(body)];
        Self::tell(rustix::io::writev(
            &self.0,
            &parts[..1 + usize::from(!body.is_empty())],
        ));
    }

    pub(super) fn refuse(&self, unique: u64, errno: Errno) {
        let header = OutHeader::refusal(unique, errno);
        Self::tell(rustix::io::write(&self.0, header.as_bytes()));
    }

    /// Asks for all requests that were read and not answered.
    pub(super) fn resend(&self) -> Result<(), Errno> {
        rustix::io::write(&self.0, OutHeader::resend().as_bytes()).map(drop)
    }

    fn tell(written: Result<usize, Errno>) {
        match written {
            // The thread that asked is gone, or the file system.
            Ok(_) | Err(Errno::NOENT | Errno::NODEV | Errno::PERM) => {}
            Err(errno) => tracing::error!("a reply to the kernel failed: {errno}"),
        }
    }
}

/// Takes a mount out of the tree. `lazily` also one that is in use: its users keep it.
pub(super) fn unmount_at(target: &Path, lazily: bool) -> Result<(), Errno> {
    let flags = match lazily {
        true => UnmountFlags::NOFOLLOW | UnmountFlags::DETACH,
        false => UnmountFlags::NOFOLLOW,
    };
    unmount(target, flags)
}

/// A mount of this program.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    connection: String,
}

/// The mount of this program that is the topmost one at a path. It asks the file system nothing.
pub(super) fn find(target: &Path) -> std::io::Result<Option<Found>> {
    let text = std::fs::read_to_string("/proc/self/mountinfo")?;
    Ok(found_in(&text, target))
}

fn found_in(mountinfo: &str, target: &Path) -> Option<Found> {
    let at_target = |line: &&str| {
        let point = line.split(' ').nth(4);
        point.is_some_and(|point| unescaped(point) == target)
    };
    // Later ones lie over earlier ones.
    let line = mountinfo.lines().rfind(at_target)?;
    let (before, behind) = line.split_once(" - ")?;
    let connection = before.split(' ').nth(2)?.split_once(':')?.1.to_owned();
    (behind.split(' ').next() == Some(KIND)).then_some(Found { connection })
}

/// A path of `mountinfo`, where some characters are octal numbers such as `\040`.
fn unescaped(text: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, more)) = rest.split_first() {
        let number = more
            .get(..3)
            .and_then(|digits| std::str::from_utf8(digits).ok());
        let number = number.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match number.filter(|_| byte == b'\\') {
            Some(number) => {
                bytes.push(number);
                rest = &more[3..];
            }
            None => {
                bytes.push(byte);
                rest = more;
            }
        }
    }
    std::ffi::OsString::from_vec(bytes).into()
}

/// Whether a mount's pager is gone for good. A thread asks, since nobody may answer.
pub(super) fn is_dead(target: &Path) -> bool {
    let (told, hear) = mpsc::channel();
    let target = target.to_owned();
    std::thread::spawn(move || told.send(rustix::fs::statfs(&target).err()));
    hear.recv_timeout(ANSWERS) == Ok(Some(Errno::NOTCONN))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:41 / /mnt/a\\040b ro,nosuid shared:7 - fuse.pageferry pageferry ro
31 22 0:42 / /mnt/web ro - fuse.pageferry pageferry ro
32 31 0:43 / /mnt/web rw - tmpfs tmpfs rw
";

    #[test]
    fn the_topmost_mount_counts() {
        let at = |path| found_in(MOUNTS, Path::new(path)).map(|found| found.connection);
        assert_eq!(at("/mnt/a b").as_deref(), Some("41"));
        assert_eq!(at("/mnt/web"), None, "something else covers it");
        assert_eq!((at("/"), at("/mnt")), (None, None));
    }

    #[test]
    fn a_path_that_is_no_escape_stays() {
        for (text, path) in [
            ("/a\\134b", "/a\\b"),
            ("/a\\9", "/a\\9"),
            ("/\\777", "/\\777"),
        ] {
            assert_eq!(unescaped(text), Path::new(path));
        }
    }

    #[test]
    fn a_descriptor_without_a_mount_is_over() {
        if let Ok(device) = Device::open() {
            assert!(Device::kept(device.0).is_none());
        }
    }
}
