//! VMs of Cloud Hypervisor.

use super::moves::{self, Names, NotCome, Sending};
use crate::args::{MigrateArgs, ReceiveArgs};
use crate::exit::{Exit, Failure};
use crate::host::{Host, StopRequests};
use crate::output;
use crate::progress::Feed;
use crate::signals::Interrupts;
use pageferry_bridge::ch::{
    ChError, LeftBehind, ReceiveError, ReceiverOptions, Source, SourceError, SourceOptions,
    boot_vcpus, receive,
};
use pageferry_migration::{
    DestinationVm, Incoming, Observer, Route, SourceConfig, SourceReport, SourceSession,
};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

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
    fn pause(&self) -> Option<(Duration, Duration)> {
        None
    }
    fn remark(&self) -> Option<&'static str> {
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
    let mut given = SourceOptions {
        api: api.to_owned(),
        preserve: args.preserve_source,
        keeper: keeper(),
    };
    moves::migrate(&NAMES, args, interrupts, |stop| {
        let source = Source::take(&mut given, stop).map_err(|why| of_source(why.into()))?;
        if source.goes_on() {
            output::note("going on with the move that an earlier `migrate` left behind");
        }
        Ok(source)
    })
}

/// The command of a process that keeps a VM's descriptors.
pub(super) fn keeper() -> Option<Command> {
    let program = std::env::current_exe().ok().filter(|path| path.exists());
    let Some(program) = program else {
        output::note("this program is not at its path any more: if it dies, so may the VM");
        return None;
    };
    let mut command = Command::new(program);
    command.arg("keep");
    Some(command)
}

/// A VM that an earlier `receive` has left at this process, when it was killed.
///
/// # Errors
/// When it cannot be taken over.
pub(super) fn left_behind(api: &Path) -> Result<Option<LeftBehind>, Failure> {
    LeftBehind::at(api).map_err(|why| Failure::new(class(&why), why.to_string()))
}

/// Receives an offered VM into a Cloud Hypervisor process, until that has all of it. Or goes on
/// with one that was left behind.
///
/// # Errors
/// Why it did not come, and where it is.
pub(super) fn take_in(
    api: &Path,
    left: Option<LeftBehind>,
    coming: (&Arc<Host>, Incoming, &ReceiveArgs),
    feed: &Arc<Feed>,
    stops: &mut StopRequests<'_>,
) -> Result<(), Failure> {
    let vcpus = boot_vcpus(&coming.1.offer().guest);
    let mut given = ReceiverOptions {
        api: api.to_owned(),
        keeper: keeper(),
    };
    moves::take_in(
        &NAMES,
        vcpus,
        coming,
        feed,
        stops,
        move |destination, incoming, [stop, cut], observer| {
            let arrived = match left {
                Some(left) => left.receive(destination, incoming, stop, observer),
                None => receive(&mut given, destination, incoming, stop, observer),
            };
            let arrived = arrived.map_err(not_come)?;
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
