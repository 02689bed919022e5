//! The VMs of other VMMs: `migrate --vm ch:..` and `receive --for ch:..`, or `fc:..`. And
//! `restore --for ch:..`.

mod moves;
mod restore;

use crate::args::{MigrateArgs, ReceiveArgs, RestoreArgs};
use crate::exit::{Exit, Failure};
use crate::host::{Host, StopRequests};
use crate::output;
use crate::progress::Feed;
use crate::signals::Interrupts;
use pageferry_bridge::foreign::{ForeignVmm, LeftBehind, Overrides};
use pageferry_bridge::{CLOUD_HYPERVISOR, FIRECRACKER, FOREIGN};
use pageferry_migration::Incoming;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::sync::Arc;

/// A process of another VMM, by its API socket.
#[derive(Clone)]
pub(crate) struct Vmm {
    kind: &'static dyn ForeignVmm,
    api: PathBuf,
}

impl std::fmt::Debug for Vmm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.kind.names().prefix, self.api.display())
    }
}

impl FromStr for Vmm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let of = |kind: &&'static dyn ForeignVmm| {
            let path = text.strip_prefix(kind.names().prefix)?.strip_prefix(':')?;
            (!path.is_empty()).then(|| Self {
                kind: *kind,
                api: path.into(),
            })
        };
        FOREIGN
            .iter()
            .find_map(of)
            .ok_or_else(|| format!("'{text}' is no VMM: expected ch:API_SOCKET or fc:API_SOCKET"))
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

    fn is(&self, other: &dyn ForeignVmm) -> bool {
        self.kind.names().prefix == other.names().prefix
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
        if args.preserve_source && !self.is(&CLOUD_HYPERVISOR) {
            let why = "--preserve-source is for VMs of Cloud Hypervisor: a VM of Firecracker \
                       always stays, paused";
            return Err(Failure::new(Exit::Usage, why));
        }
        moves::migrate(self, args, interrupts)
    }

    /// A VM that an earlier `receive` has left at it, when it was killed.
    ///
    /// # Errors
    /// When it cannot be taken over.
    pub(crate) fn left_behind(&self) -> Result<Option<LeftBehind>, Failure> {
        Ok(self.kind.left_behind(&self.api)?)
    }

    /// Checks that flags of `receive` are for this VMM, or for none.
    ///
    /// # Errors
    /// When overrides are for another one.
    pub(crate) fn check(vmm: Option<&Self>, args: &ReceiveArgs) -> Result<(), Failure> {
        let given = args.firecracker.overrides() != Overrides::default();
        if (given || args.firecracker.any_version) && !vmm.is_some_and(|vmm| vmm.is(&FIRECRACKER)) {
            let why = "--network-override, --vsock-path, --clock-realtime and --any-version are \
                       for VMs of Firecracker: expected --for fc:API_SOCKET";
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
        if !self.is(&CLOUD_HYPERVISOR) {
            let why = "--for restores snapshots of Cloud Hypervisor (ch:API_SOCKET): for those \
                       of Firecracker use `pageferry pager run`";
            return Err(Failure::new(Exit::Usage, why));
        }
        restore::restore(&self.api, args, interrupts)
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
        moves::take_in(self, left, coming, feed, stops)
    }
}

/// The command of a process that keeps a VM's descriptors.
fn keeper() -> Option<Command> {
    let program = std::env::current_exe().ok().filter(|path| path.exists());
    let Some(program) = program else {
        output::note("this program is not at its path any more: if it dies, so may the VM");
        return None;
    };
    let mut command = Command::new(program);
    command.arg("keep");
    Some(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vmm_is_named_by_its_api_socket() {
        let vmm = |text: &str| text.parse::<Vmm>();
        for text in ["ch:/run/vmm.sock", "fc:/run/vmm.sock"] {
            assert_eq!(format!("{:?}", vmm(text).unwrap()), text);
        }
        for wrong in ["ch:", "fc:", "/run/vmm.sock", "qemu:/run/q"] {
            let why = vmm(wrong).unwrap_err();
            assert!(why.contains("expected ch:API_SOCKET or fc:API_SOCKET"));
        }
        assert!(Vmm::of(Some(Path::new("web"))).unwrap().is_none());
        assert!(Vmm::of(None).unwrap().is_none());
        assert!(Vmm::of(Some(Path::new("fc:"))).is_err());
    }
}
