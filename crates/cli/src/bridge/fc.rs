//! VMs of Firecracker.

use super::moves::{self, Names, NotCome, Sending};
use crate::args::{MigrateArgs, ReceiveArgs};
use crate::exit::{Exit, Failure};
use crate::host::{Host, StopRequests};
use crate::progress::Feed;
use crate::signals::Interrupts;
use pageferry_bridge::fc::{
    FcError, ReceiveError, ReceiverOptions, Source, SourceError, SourceOptions, receive, vcpus,
};
use pageferry_migration::{
    DestinationVm, Incoming, Observer, Route, SourceConfig, SourceReport, SourceSession,
};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const NAMES: Names = Names {
    vmm: "Firecracker",
    engine: "firecracker",
    prefix: "fc",
};

fn class(error: &FcError) -> Exit {
    match error {
        FcError::Io { .. } | FcError::Closed(_) | FcError::Timeout { .. } => Exit::NoVm,
        FcError::Http { .. } | FcError::Handshake(_) => Exit::Protocol,
        FcError::Api { .. } | FcError::Offer(_) => Exit::Refused,
        // The VM or its VMM, as it is now.
        _ => Exit::Declined,
    }
}

fn of_source(error: SourceError) -> Failure {
    match error {
        SourceError::Vmm(why) => Failure::new(class(&why), SourceError::Vmm(why).to_string()),
        SourceError::Migration(failure) => failure.into(),
        other => Failure::new(Exit::LinkLost, other.to_string()),
    }
}

impl Sending for Source {
    fn migrate(
        &self,
        route: &Route,
        config: &SourceConfig,
        session: &SourceSession,
        observer: &dyn Observer,
    ) -> Result<SourceReport, Failure> {
        Self::migrate(self, route, config, session, observer).map_err(of_source)
    }
    fn vcpus(&self) -> u32 {
        Self::vcpus(self)
    }
    fn memory_bytes(&self) -> u64 {
        Self::memory_bytes(self)
    }
    fn pause(&self) -> Option<(Duration, Duration)> {
        Self::pause(self).map(|pause| (pause.stop, pause.save))
    }
    fn remark(&self) -> Option<&'static str> {
        Some("the old Firecracker process has the paused VM: end it, and never resume it")
    }
}

/// Moves a VM of Firecracker, shows its progress and its result.
///
/// # Errors
/// Why it did not move, and where it is.
pub(super) fn migrate(
    api: &Path,
    args: &MigrateArgs,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    let given = SourceOptions {
        api: api.to_owned(),
    };
    moves::migrate(&NAMES, args, interrupts, |_| {
        Source::take(&given).map_err(|why| of_source(why.into()))
    })
}

/// Receives an offered VM into a Firecracker process, until that has all of it.
///
/// # Errors
/// Why it did not come, and where it is.
pub(super) fn take_in(
    api: &Path,
    coming: (&Arc<Host>, Incoming, &ReceiveArgs),
    feed: &Arc<Feed>,
    stops: &mut StopRequests<'_>,
) -> Result<(), Failure> {
    let given = ReceiverOptions {
        api: api.to_owned(),
        overrides: coming.2.firecracker.overrides(),
    };
    let vcpus = vcpus(&coming.1.offer().guest);
    moves::take_in(
        &NAMES,
        vcpus,
        coming,
        feed,
        stops,
        move |destination, incoming, [stop, _], observer| {
            receive(&given, destination, incoming, stop, observer).map_err(not_come)
        },
    )
}

/// The failure in words.
fn not_come(error: ReceiveError) -> NotCome {
    let stays = match &error {
        ReceiveError::Refused(_) => true,
        ReceiveError::Migration(failure) | ReceiveError::Vmm { failure, .. } => {
            failure.vm == DestinationVm::Discarded
        }
        _ => false,
    };
    let class = match &error {
        ReceiveError::Refused(why) => class(why),
        ReceiveError::Vmm { why, .. } if stays => class(why),
        _ => Exit::LinkLost,
    };
    let failure = match error {
        ReceiveError::Migration(failure) => failure.into(),
        other => Failure::new(class, other.to_string()),
    };
    NotCome { failure, stays }
}
