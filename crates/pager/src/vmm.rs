#![expect(unsafe_code, reason = "registers memory of another process")]
//! The process that runs a VM: whether it lives, its userfaultfd, and what may be done to it.

use crate::regions::Region;
use pageferry_addr::Hva;
use pageferry_userfault::uffd::{Features, RegisterMode, Userfaultfd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open, pidfd_send_signal,
};
use serde::{Deserialize, Serialize};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A process, told from a later one with the same number by its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) pid: i32,
    /// Field 22 of `/proc/PID/stat`: clock ticks since the host's start.
    pub(crate) started: u64,
}

/// A process that runs a VM.
#[derive(Debug)]
pub(crate) struct Vmm {
    pub(crate) identity: Identity,
    pidfd: OwnedFd,
}

impl Vmm {
    /// The living process of this number.
    pub(crate) fn of_pid(pid: i32) -> Result<Self, Errno> {
        let number = Pid::from_raw(pid).ok_or(Errno::SRCH)?;
        let pidfd = pidfd_open(number, PidfdFlags::empty())?;
        // Read after the descriptor is there, which keeps the number from being used again unless
        // the process has ended. Then there is no such file, or the caller sees the end.
        let started = started(pid).ok_or(Errno::SRCH)?;
        let identity = Identity { pid, started };
        Ok(Self { identity, pidfd })
    }

    /// The process of a record, if it lives.
    pub(crate) fn again(identity: Identity) -> Result<Self, Errno> {
        let vmm = Self::of_pid(identity.pid)?;
        if vmm.identity == identity && !vmm.has_ended() {
            Ok(vmm)
        } else {
            Err(Errno::SRCH)
        }
    }

    /// Becomes readable when the process ends.
    pub(crate) fn end(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Whether it has ended. Its number and its files in `/proc` stay until its parent waits for
    /// it.
    pub(crate) fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1..))
    }

    pub(crate) fn signal(&self, signal: Signal) -> Result<(), Errno> {
        pidfd_send_signal(&self.pidfd, signal)
    }

    /// Takes the userfaultfd of `regions` out of the process. It needs ptrace rights over it.
    ///
    /// # Errors
    /// One sentence.
    pub(crate) fn take_userfaultfd(&self, regions: &[Region]) -> Result<Userfaultfd, String> {
        let pid = self.identity.pid;
        let directory = format!("/proc/{pid}/fd");
        let entries = std::fs::read_dir(&directory)
            .map_err(|why| format!("cannot look into {directory}: {why}"))?;
        let mut refusal = format!("process {pid} has no userfaultfd");
        for entry in entries.flatten() {
            // The link's text is not a path. A descriptor that has been closed meanwhile has none.
            let target = std::fs::read_link(entry.path()).unwrap_or_default();
            if target.as_os_str() != "anon_inode:[userfaultfd]" {
                continue;
            }
            let name = entry.file_name();
            let Some(number) = name.to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            match pidfd_getfd(&self.pidfd, number, PidfdGetfdFlags::empty()) {
                Ok(fd) => match adopt(fd, regions) {
                    Ok(uffd) => return Ok(uffd),
                    Err(why) => refusal = why,
                },
                Err(errno) => {
                    refusal = format!(
                        "pidfd_getfd of the userfaultfd of process {pid} failed: {errno}; it needs \
                         CAP_SYS_PTRACE, or the same user and kernel.yama.ptrace_scope 0"
                    );
                }
            }
        }
        Err(refusal)
    }
}

/// Adopts a descriptor that must be the userfaultfd of `regions`. It may lack `EVENT_REMOVE`:
/// Firecracker up to 1.11 asks for that only if its VM has a balloon, and else removes nothing.
pub(crate) fn adopt(fd: OwnedFd, regions: &[Region]) -> Result<Userfaultfd, String> {
    let uffd = Userfaultfd::adopt(fd, Features::empty()).map_err(|why| why.to_string())?;
    // Each fork event would bring a descriptor, and nobody would serve the child's memory.
    let unread =
        Features::EVENT_FORK | Features::EVENT_REMAP | Features::EVENT_UNMAP | Features::SIGBUS;
    let unread = unread.difference(unread.difference(uffd.features()));
    if !unread.is_empty() {
        return Err(format!(
            "it was opened with {unread}, and this pager serves EVENT_REMOVE alone: open it without"
        ));
    }
    for region in regions {
        // SAFETY: the memory is that of the process that made the descriptor, and that process has
        // registered it already. If not, what follows is its own affair: it asked for a pager.
        let registered = unsafe {
            let start = Hva(region.address);
            uffd.register(start, region.size, RegisterMode::MISSING)
        };
        // Doing it again shows that the range is mapped and has no other userfaultfd.
        registered.map_err(|why| why.to_string())?;
    }
    Ok(uffd)
}

/// The start of a process in clock ticks since the host's start.
fn started(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program is in brackets, and may have blanks and brackets itself.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_told_from_a_later_one_of_its_number() {
        let own = Vmm::of_pid(rustix::process::getpid().as_raw_nonzero().get()).unwrap();
        assert!(Vmm::again(own.identity).is_ok());
        let other = Identity {
            started: own.identity.started + 1,
            ..own.identity
        };
        assert_eq!(Vmm::again(other).unwrap_err(), Errno::SRCH);
        assert_eq!(Vmm::of_pid(0).unwrap_err(), Errno::SRCH);
    }
}
