//! The VMs of other VMMs: `migrate --vm ch:..` and `receive --for ch:..`, or `fc:..`. And
//! `restore --for ch:..`.

mod ch;
mod fc;
mod moves;
mod restore;

use crate::args::{MigrateArgs, ReceiveArgs, RestoreArgs};
use crate::exit::{Exit, Failure};
use crate::host::{Host, StopRequests};
use crate::progress::Feed;
use crate::signals::Interrupts;
use pageferry_bridge::ch::LeftBehind;
use pageferry_bridge::fc::Overrides;
use pageferry_migration::Incoming;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// A process of another VMM, by its API socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Vmm {
    CloudHypervisor(PathBuf),
    Firecracker(PathBuf),
}

impl FromStr for Vmm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("ch", path)) if !path.is_empty() => Ok(Self::CloudHypervisor(path.into())),
            Some(("fc", path)) if !path.is_empty() => Ok(Self::Firecracker(path.into())),
            _ => Err(format!(
                "'{text}' is no VMM: expected ch:API_SOCKET or fc:API_SOCKET"
            )),
        }
    }
}

impl Vmm {
    /// The process, if a VM is named by `ch:PATH` or `fc:PATH`.
    ///
    /// # Errors
    /// When there is no path.
    pub(crate) fn of(vm: Option<&Path>) -> Result<Option<Self>, Failure> {
        let text = vm.and_then(Path::to_str);
        let text = text.filter(|text| text.starts_with("ch:") || text.starts_with("fc:"));
        text.map(str::parse)
            .transpose()
            .map_err(|why| Failure::new(Exit::Usage, why))
    }

    /// Moves its VM, shows the progress and the result.
    ///
    /// # Errors
    /// Why it did not move, and where it is.
    pub(crate) fn migrate(
        &self,
        args: &MigrateArgs,
        interrupts: &Interrupts,
    ) -> Result<(), Failure> {
        match self {
            Self::CloudHypervisor(api) => ch::migrate(api, args, interrupts),
            Self::Firecracker(_) if args.preserve_source => {
                let why = "--preserve-source is for VMs of Cloud Hypervisor: a VM of Firecracker \
                           always stays, paused";
                Err(Failure::new(Exit::Usage, why))
            }
            Self::Firecracker(api) => fc::migrate(api, args, interrupts),
        }
    }

    /// A VM that an earlier `receive` has left at it, when it was killed.
    ///
    /// # Errors
    /// When it cannot be taken over.
    pub(crate) fn left_behind(&self) -> Result<Option<LeftBehind>, Failure> {
        match self {
            Self::CloudHypervisor(api) => ch::left_behind(api),
            Self::Firecracker(_) => Ok(None),
        }
    }

    /// Checks that flags of `receive` are for this VMM, or for none.
    ///
    /// # Errors
    /// When overrides are for another one.
    pub(crate) fn check(vmm: Option<&Self>, args: &ReceiveArgs) -> Result<(), Failure> {
        let overrides = args.firecracker.overrides() != Overrides::default();
        if overrides && !matches!(vmm, Some(Self::Firecracker(_))) {
            let why = "--network-override, --vsock-path and --clock-realtime are for VMs of \
                       Firecracker: expected --for fc:API_SOCKET";
            return Err(Failure::new(Exit::Usage, why));
        }
        Ok(())
    }

    /// Restores a snapshot into it.
    ///
    /// # Errors
    /// Why the VM does not run.
    pub(crate) fn restore(
        &self,
        args: &RestoreArgs,
        interrupts: &Interrupts,
    ) -> Result<(), Failure> {
        match self {
            Self::CloudHypervisor(api) => restore::restore(api, args, interrupts),
            Self::Firecracker(_) => {
                let why = "--for restores snapshots of Cloud Hypervisor (ch:API_SOCKET): for those \
                           of Firecracker use `pageferry pager run`";
                Err(Failure::new(Exit::Usage, why))
            }
        }
    }

    /// Receives an offered VM into it, or goes on with one that was left behind.
    ///
    /// # Errors
    /// Why it did not come, and where it is.
    pub(crate) fn take_in(
        &self,
        left: Option<LeftBehind>,
        coming: (&Arc<Host>, Incoming, &ReceiveArgs),
        feed: &Arc<Feed>,
        stops: &mut StopRequests<'_>,
    ) -> Result<(), Failure> {
        match self {
            Self::CloudHypervisor(api) => ch::take_in(api, left, coming, feed, stops),
            Self::Firecracker(api) => fc::take_in(api, coming, feed, stops),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vmm_is_named_by_its_api_socket() {
        let vmm = |text: &str| text.parse::<Vmm>();
        let path = || "/run/vmm.sock".into();
        assert_eq!(vmm("ch:/run/vmm.sock"), Ok(Vmm::CloudHypervisor(path())));
        assert_eq!(vmm("fc:/run/vmm.sock"), Ok(Vmm::Firecracker(path())));
        for wrong in ["ch:", "fc:", "/run/vmm.sock", "qemu:/run/q"] {
            let why = vmm(wrong).unwrap_err();
            assert!(why.contains("expected ch:API_SOCKET or fc:API_SOCKET"));
        }
        assert_eq!(Vmm::of(Some(Path::new("web"))).unwrap(), None);
        assert_eq!(Vmm::of(None).unwrap(), None);
        assert!(Vmm::of(Some(Path::new("fc:"))).is_err());
    }
}
