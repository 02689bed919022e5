//! What this host's userfaultfd can do, for reports.

use super::error::OpenError;
use super::fd::{OpenedBy, Userfaultfd};
use super::flags::Features;

/// What this process can do with userfaultfd on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UffdSupport {
    /// Whether a userfaultfd can be opened that serves faults of the kernel, as KVM needs; else
    /// why not.
    pub usable: Result<(), OpenError>,
    /// By which door, where one could be opened.
    pub opened_by: Option<OpenedBy>,
    /// Whether at least a user-mode-only one can be opened. It does not serve KVM.
    pub user_mode: bool,
    /// All features the kernel has; empty where nothing could be opened to ask.
    pub features: Features,
    /// The sysctl `vm.unprivileged_userfaultfd`, where it can be read.
    pub unprivileged_sysctl: Option<bool>,
}

impl UffdSupport {
    /// Opens and closes userfaultfds to find out.
    #[must_use]
    pub fn probe() -> Self {
        let full = Userfaultfd::open(Features::empty());
        let user = Userfaultfd::open_user_mode_only(Features::empty());
        let sysctl = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").ok();
        Self {
            opened_by: full.as_ref().ok().map(Userfaultfd::opened_by),
            user_mode: user.is_ok(),
            features: full
                .as_ref()
                .or(user.as_ref())
                .map_or(Features::empty(), Userfaultfd::available),
            unprivileged_sysctl: sysctl.map(|text| text.trim() != "0"),
            usable: full.map(drop),
        }
    }

    /// Whether a userfaultfd for KVM can be opened *and* the kernel has all of `features`.
    #[must_use]
    pub fn serves(&self, features: Features) -> bool {
        self.usable.is_ok() && self.features.contains(features)
    }
}
