//! VMs of Cloud Hypervisor.

use super::moves::{self, Names, NotCome, Sending};
use crate::args::{MigrateArgs, ReceiveArgs};
use crate::exit::{Exit, Failure};
use crate::host::{Host, StopRequests};
use crate::progress::Feed;
use crate::signals::Interrupts;
use pageferry_bridge::ch::{
    ChError, ReceiveError, ReceiverOptions, Source, SourceError, SourceOptions, boot_vcpus, receive,
};
use pageferry_migration::{
    DestinationVm, Incoming, Observer, Route, SourceConfig, SourceReport, SourceSession,
};
use std::path::Path;
use std::sync::Arc;

const NAMES: Names = Names {
    vmm: "Cloud Hypervisor",
    engine: "cloud-hypervisor",
    prefix: "ch",
};

pub(super) fn class(error: &ChError) -> Exit {
    match error {
        ChError::Io { .. } | ChError::Closed(_) | ChError::Timeout { .. } => Exit::NoVm,
        ChError::Wire(_) | ChError::Order { .. } | ChError::Http(_) => Exit::Protocol,
        ChError::Refused(_) | ChError::Offer(_) => Exit::Refused,
        ChError::Stopped => Exit::Cancelled,
        ChError::Gone { .. } => Exit::LinkLost,
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
        Self::vcpus(self).unwrap_or_default()
    }
    fn memory_bytes(&self) -> u64 {
        Self::memory_bytes(self)
    }
    fn remark(&self) -> Option<String> {
        None
    }
}

/// Moves a VM of Cloud Hypervisor, shows its progress and its result.
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
        preserve: args.preserve_source,
    };
    moves::migrate(&NAMES, args, interrupts, |stop| {
        Source::take(&given, stop).map_err(|why| of_source(why.into()))
    })
}

/// Receives an offered VM into a Cloud Hypervisor process, until that has all of it.
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
    };
    let vcpus = boot_vcpus(&coming.1.offer().guest);
    moves::take_in(
        &NAMES,
        vcpus,
        coming,
        feed,
        stops,
        move |destination, incoming, [stop, cut], observer| {
            let arrived =
                receive(&given, destination, incoming, stop, observer).map_err(not_come)?;
            let report = arrived.report.clone();
            let served = arrived.serve(cut);
            served.map_err(|why| NotCome {
                failure: Failure::new(class(&why), why.to_string()),
                stays: false,
            })?;
            Ok(report)
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
