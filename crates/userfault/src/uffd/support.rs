//! The capabilities of this host's userfaultfd, for reports.

use super::error::OpenError;
use super::fd::{OpenedBy, Userfaultfd};
use super::flags::Features;

/// The userfaultfd capabilities of this process on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UffdSupport {
    /// Whether this process can open a userfaultfd that serves faults of the kernel, as KVM needs.
    /// Otherwise the error.
    pub usable: Result<(), OpenError>,
    /// The interface by which a userfaultfd could be opened.
    pub opened_by: Option<OpenedBy>,
    /// Whether this process can at least open a user-mode-only userfaultfd, which does not serve
    /// KVM.
    pub user_mode: bool,
    /// All features of the kernel. Empty if no userfaultfd could be opened.
    pub features: Features,
    /// The sysctl `vm.unprivileged_userfaultfd`, if it can be read.
    pub unprivileged_sysctl: Option<bool>,
}

impl UffdSupport {
    /// Probes the capabilities by opening and closing userfaultfds.
    ///
    /// ```
    /// use pageferry_userfault::uffd::{Features, UffdSupport};
    ///
    /// let support = UffdSupport::probe();
    /// match support.usable {
    ///     Ok(()) => println!("features: {}", support.features),
    ///     Err(why) => println!("userfaultfd is not usable here: {why}"),
    /// }
    /// assert_eq!(support.serves(Features::empty()), support.usable.is_ok());
    /// ```
    #[must_use]
    pub fn probe() -> Self {
        let probe = |user_mode_only| {
            Userfaultfd::open_as(Features::empty(), user_mode_only)
                .map(|(_, opened_by, available)| (opened_by, available))
        };
        let (full, user) = (probe(false), probe(true));
        let sysctl = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").ok();
        Self {
            opened_by: full.ok().map(|(opened_by, _)| opened_by),
            user_mode: user.is_ok(),
            features: full.or(user).map_or(Features::empty(), |(_, all)| all),
            unprivileged_sysctl: sysctl.map(|text| text.trim() != "0"),
            usable: full.map(|_| ()),
        }
    }

    /// Whether this process can open a userfaultfd for KVM *and* the kernel has all of `features`.
    #[must_use]
    pub fn serves(&self, features: Features) -> bool {
        self.usable.is_ok() && self.features.contains(features)
    }
}
