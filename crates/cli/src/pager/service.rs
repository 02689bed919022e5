#![expect(
    unsafe_code,
    reason = "descriptors that a process inherits are known by their numbers alone"
)]

//! The service manager of a pager: descriptors that it keeps, readiness, and the watchdog.
//!
//! **Guarantee.** Nothing is claimed that the manager has not said: without `$FDSTORE` (systemd
//! 254) descriptors count as not kept. Without a manager all of this does nothing.

use crate::exit::Failure;
use crate::probe::calls;
use crate::procfs;
use pageferry_pager::Keeper;
use rustix::thread::{CapabilitySet, capabilities};
use sd_notify::NotifyState;
use std::collections::HashMap;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// A kind of descriptor that is kept: the beginning of its name.
#[derive(Clone, Copy)]
pub(crate) struct Kind(&'static str);

impl Kind {
    /// The userfaultfds of restores.
    pub(crate) const RESTORE: Self = Self("uffd-");
    /// The descriptor of a mount.
    pub(crate) const MOUNT: Self = Self("fuse-");
}

/// The store of descriptors of the service manager.
struct Store(Kind);

impl Keeper for Store {
    fn keep(&self, name: &str, fd: BorrowedFd<'_>) -> Result<(), String> {
        let name = format!("{}{name}", self.0.0);
        let states = [NotifyState::FdStore, NotifyState::FdName(&name)];
        sd_notify::notify_with_fds(&states, &[fd]).map_err(|why| format!("FDSTORE failed: {why}"))
    }

    fn forget(&self, name: &str) {
        let name = format!("{}{name}", self.0.0);
        let states = [NotifyState::FdStoreRemove, NotifyState::FdName(&name)];
        if let Err(why) = sd_notify::notify(&states) {
            tracing::warn!("FDSTOREREMOVE failed: {why}");
        }
    }
}

/// The store, if the service manager says that it has room.
pub(crate) fn keeper(kind: Kind) -> Option<Box<dyn Keeper>> {
    has_store().then(|| Box::new(Store(kind)) as _)
}

fn has_store() -> bool {
    let room = std::env::var("FDSTORE")
        .ok()
        .and_then(|room| room.parse::<u32>().ok());
    room.is_some_and(|room| room > 0) && std::env::var_os("NOTIFY_SOCKET").is_some()
}

/// The descriptors of a kind that the service manager kept for this process, by their names.
///
/// # Errors
/// When the variables of the manager are not readable.
pub(crate) fn kept(kind: Kind) -> Result<HashMap<String, OwnedFd>, Failure> {
    let cannot = |why| Failure::os("the descriptors of the service manager", why);
    let all = sd_notify::listen_fds_with_names().map_err(cannot)?;
    Ok(all
        .filter_map(|(fd, name)| named(kind, fd, &name))
        .collect())
}

fn named(kind: Kind, fd: RawFd, name: &str) -> Option<(String, OwnedFd)> {
    let name = name.strip_prefix(kind.0)?.to_owned();
    // SAFETY: the service manager handed the descriptor over under a name of ours, and this is the
    // only place that takes it, once.
    Some((name, unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Whether no filter kills this process when it takes a descriptor out of another. Only a process
/// with a filter spends the time for a trial.
pub(crate) fn may_take() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let unfiltered = procfs::field(&status, "Seccomp:") == Some("0");
    unfiltered || calls::may_take()
}

/// Why the death of this pager may cost VMs.
pub(crate) fn risk() -> Option<&'static str> {
    if has_store() {
        return None;
    }
    if !may_take() {
        return Some(
            "no service manager keeps their descriptors (FileDescriptorStoreMax), and a filter \
             forbids pidfd_getfd",
        );
    }
    let traces =
        capabilities(None).is_ok_and(|own| own.effective.contains(CapabilitySet::SYS_PTRACE));
    (!traces).then_some(
        "no service manager keeps their descriptors, and CAP_SYS_PTRACE is missing for VMs of \
         other users",
    )
}

/// Tells the manager that the pager serves.
pub(crate) fn ready(text: &str) {
    tell(&[NotifyState::Ready, NotifyState::Status(text)]);
}

/// Tells the manager that the pager ends.
pub(crate) fn stopping() {
    tell(&[NotifyState::Stopping]);
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(why) = sd_notify::notify(states) {
        tracing::warn!("the service manager does not listen: {why}");
    }
}

/// The watchdog of the manager: it ends a process that says nothing.
pub(crate) struct Watchdog {
    /// Half the time that the manager waits.
    interval: Option<Duration>,
    last: Instant,
}

impl Watchdog {
    pub(crate) fn new() -> Self {
        Self {
            interval: sd_notify::watchdog_enabled().map(|limit| limit / 2),
            last: Instant::now(),
        }
    }

    /// Says that the process lives, if it is time to.
    pub(crate) fn live(&mut self) {
        if self
            .interval
            .is_some_and(|interval| self.last.elapsed() >= interval)
        {
            self.last = Instant::now();
            tell(&[NotifyState::Watchdog]);
        }
    }
}
