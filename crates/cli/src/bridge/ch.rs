//! VMs of Cloud Hypervisor. This process is the migration's end, beside the VMM's own process.
//!
//! **Mechanism.** The crate `bridge` moves. A [`Host`] without a VM of its own serves the control
//! socket, so `status`, `watch`, `set`, `recover`, `abandon` and `cancel` work as for other VMs.

use crate::args::{MigrateArgs, ReceiveArgs};
use crate::control::protocol::ErrorLine;
use crate::control::server::Server;
use crate::exit::{Exit, Failure};
use crate::host::{
    ABANDONED_AT_SOURCE, Activity, Answers, FINISHING, Host, HostService, StopRequests, Told,
    Watch, catch_defect, has_switched_over, wait_for_outcome,
};
use crate::migrate::{options, show_report};
use crate::progress::{Display, Feed, Rates};
use crate::receive::check_limits;
use crate::report::{Conditions, Received, Report, Sent};
use crate::signals::Interrupts;
use crate::{output, size, sockets, wall_clock};
use pageferry_bridge::ch::{
    ChError, ReceiveError, ReceiverOptions, Source, SourceError, SourceOptions, boot_vcpus, receive,
};
use pageferry_machine::Backing;
use pageferry_migration::{
    DestinationVm, Incoming, Phase, Route, SourceSession, TLS_VERSION, check,
};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;

const ENGINE: &str = "cloud-hypervisor";

/// The API socket in `ch:PATH`.
pub(crate) fn api(text: &str) -> Result<PathBuf, String> {
    match text.strip_prefix("ch:") {
        Some("") | None => Err(format!("'{text}' is no VMM: expected ch:API_SOCKET")),
        Some(path) => Ok(path.into()),
    }
}

/// The API socket, if a VM is named by `ch:PATH`.
pub(crate) fn of(vm: Option<&Path>) -> Result<Option<PathBuf>, Failure> {
    let text = vm.and_then(Path::to_str);
    let text = text.filter(|text| text.starts_with("ch:"));
    text.map(api)
        .transpose()
        .map_err(|why| Failure::new(Exit::Usage, why))
}

fn class(error: &ChError) -> Exit {
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

/// Moves a VM of Cloud Hypervisor, shows its progress and its result.
///
/// # Errors
/// Why it did not move, and where it is.
pub(crate) fn migrate(
    api: &Path,
    args: &MigrateArgs,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    let config = options(args).config(args.source.precopy_passes);
    let config = config.map_err(|why| Failure::new(Exit::Usage, why))?;
    let route = Route::To(args.to.clone());
    if args.check {
        let checked = check(&route, &config, &|| interrupts.any())?;
        let tls = checked.tls.then_some(TLS_VERSION);
        if args.json {
            output::json(&json!({
                "peer": checked.peer, "version": checked.version, "tls": tls,
                "peer_name": checked.tls_name,
            }));
        } else {
            let peer = &checked.peer;
            output::result(&format!("{peer} can take the VM; nothing was moved\n"));
        }
        return Ok(());
    }
    let (host, _jobs) = Host::new();
    let name = format!("ch-{}", std::process::id());
    let server = sockets::path_for(None, Some(&name))
        .and_then(|path| Server::start(&path, Arc::new(HostService(Arc::clone(&host)))));
    let _server = server
        .inspect_err(|why| output::note(&format!("no control socket: {why}")))
        .ok();
    let given = SourceOptions {
        api: api.to_owned(),
        preserve: args.preserve_source,
    };
    let taken = Source::take(&given, &|| interrupts.any());
    let source = Arc::new(taken.map_err(|why| of_source(why.into()))?);
    let session = Arc::new(SourceSession::new().map_err(Failure::from)?);
    session.prepare(config.settings);
    host.set_session(&session);
    host.set_activity(Activity::Leaving(Phase::Setup));
    let feed = Feed::new();
    let watched = Arc::clone(&session);
    feed.measure(move || Rates::of(&watched.status()));
    let display = (!args.events).then(|| Display::start(&feed));
    let watch = Watch {
        host: Arc::clone(&host),
        activity: Activity::Leaving,
        feed: Arc::clone(&feed),
    };
    let (sender, outcome) = channel();
    let settings = config.settings;
    let (sent, over) = (Arc::clone(&source), Arc::clone(&session));
    std::thread::Builder::new()
        .name("migration".into())
        .spawn(move || {
            let result = catch_defect(|| sent.migrate(&route, &config, &over, &watch));
            let _ = sender.send(result.and_then(|result| result.map_err(of_source)));
        })
        .map_err(|e| Failure::os("cannot start the migration's thread", e))?;
    let mut stops = StopRequests::new(interrupts, Some(&host));
    let answers = Answers {
        switched_over: &|| matches!(host.activity(), Activity::Leaving(phase) if has_switched_over(phase)),
        cancel: &|_| {
            feed.note("cancelling the migration; the VM stays with its Cloud Hypervisor");
            session.cancel();
        },
        finishing: &|| feed.note(FINISHING),
        hangup_cancels: false,
    };
    let told = AtomicBool::new(false);
    let ended = std::thread::scope(|scope| {
        if args.events {
            scope.spawn(|| {
                let mut told_so_far = Told::new(&feed, &session);
                let mut print = |event| {
                    output::json_line(&json!({"at": wall_clock::now(), "event": event}));
                };
                while !told.load(Ordering::Acquire) {
                    told_so_far.tell(&mut print);
                    std::thread::sleep(Interrupts::POLL);
                }
                told_so_far.tell(&mut print);
            });
        }
        let ended = wait_for_outcome(&outcome, &mut stops, &answers);
        told.store(true, Ordering::Release);
        ended
    });
    if let Some(display) = display {
        display.finish();
    }
    let to = args.to.to_string();
    let result = ended
        .map_err(|none| none.failure(ABANDONED_AT_SOURCE))
        .and_then(|outcome| outcome);
    let sent = result.inspect_err(|failure| {
        if args.events {
            let error = ErrorLine::from(failure);
            output::json_line(&json!({"at": wall_clock::now(), "error": error}));
        }
    })?;
    host.set_activity(Activity::Left { to: to.clone() });
    let report = Report {
        engine: ENGINE.into(),
        vcpus: source.vcpus().unwrap_or_default(),
        memory_bytes: source.memory_bytes(),
        sent: Some(Sent::new(&sent, Backing::Shmem, Vec::new())),
        received: None,
        verified: None,
        guest_view: None,
        conditions: Conditions::here(format!("to {to}")).with(&settings),
    };
    show_report(&report, args);
    Ok(())
}

/// Receives an offered VM into a Cloud Hypervisor process, until that has all of it. The host waits
/// again ([`Activity::Waiting`]) if the VM stays at its source.
///
/// # Errors
/// Why it did not come, and where it is.
pub(crate) fn take_in(
    api: &Path,
    host: &Arc<Host>,
    incoming: Incoming,
    args: &ReceiveArgs,
    feed: &Arc<Feed>,
    stops: &mut StopRequests<'_>,
) -> Result<(), Failure> {
    if let Err(failure) = check_limits(incoming.offer(), args) {
        incoming.refuse(&failure.message);
        return Err(failure);
    }
    let Some(destination) = host.destination() else {
        return Err(Failure::new(Exit::Internal, "the destination has ended"));
    };
    let bytes = incoming.offer().memory_bytes;
    let vcpus = boot_vcpus(&incoming.offer().guest).unwrap_or_default();
    let human = size::human(bytes);
    feed.note(format!("receiving a VM of Cloud Hypervisor with {human}"));
    host.set_activity(Activity::Arriving(Phase::Setup));
    let watch = Watch {
        host: Arc::clone(host),
        activity: Activity::Arriving,
        feed: Arc::clone(feed),
    };
    let given = ReceiverOptions {
        api: api.to_owned(),
    };
    let stop = Arc::new(AtomicBool::new(false));
    // Only the end of the command ends the service of the last pages.
    let cut = Arc::new(AtomicBool::new(false));
    let (sender, outcome) = channel();
    let there = Arc::clone(&destination);
    let (stopping, cutting) = (Arc::clone(&stop), Arc::clone(&cut));
    std::thread::Builder::new()
        .name("migration".into())
        .spawn(move || {
            let stop = || stopping.load(Ordering::Acquire);
            let result = catch_defect(|| {
                let arrived = receive(&given, &there, incoming, &stop, &watch)?;
                let report = arrived.report.clone();
                let served = arrived.serve(&|| cutting.load(Ordering::Acquire));
                Ok((report, served))
            });
            let _ = sender.send(result);
        })
        .map_err(|e| Failure::os("cannot start the migration's thread", e))?;
    let answers = Answers {
        switched_over: &|| matches!(host.activity(), Activity::Arriving(phase) if has_switched_over(phase)),
        cancel: &|_| {
            if stop.swap(true, Ordering::AcqRel) {
                destination.give_up();
            }
        },
        finishing: &|| {
            feed.note("the VM is here and nowhere else: it ends without the rest (again: end it)");
        },
        hangup_cancels: true,
    };
    let ended = wait_for_outcome(&outcome, stops, &answers);
    cut.store(true, Ordering::Release);
    let ended =
        ended.map_err(|none| none.failure("the VM ran here, and ends with this command"))?;
    let (report, served) = match ended? {
        Ok(arrived) => arrived,
        Err(error) => return Err(failed(host, error)),
    };
    served.map_err(|why| Failure::new(class(&why), why.to_string()))?;
    host.set_arrived(destination.status(), destination.stalls());
    host.set_activity(Activity::Here);
    let report = Report {
        engine: ENGINE.into(),
        vcpus,
        memory_bytes: bytes,
        sent: None,
        received: Some(Received::new(&report, Backing::Shmem, |_| true)),
        verified: None,
        guest_view: None,
        conditions: Conditions::here("received"),
    };
    if args.json {
        output::json(&report.json());
    } else {
        output::note("Cloud Hypervisor has all of the VM");
        output::result(&report.table(args.details.verbose));
    }
    Ok(())
}

/// The failure in words. A VM that stays at its source lets the host wait again.
fn failed(host: &Host, error: ReceiveError) -> Failure {
    match error {
        ReceiveError::Refused(why) => {
            host.set_activity(Activity::Waiting);
            Failure::new(class(&why), ReceiveError::Refused(why).to_string())
        }
        ReceiveError::Migration(failure) => {
            if failure.vm == DestinationVm::Discarded {
                host.set_activity(Activity::Waiting);
            }
            failure.into()
        }
        ReceiveError::Vmm { why, failure } if failure.vm == DestinationVm::Discarded => {
            host.set_activity(Activity::Waiting);
            let exit = class(&why);
            Failure::new(exit, ReceiveError::Vmm { why, failure }.to_string())
        }
        other => Failure::new(Exit::LinkLost, other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vmm_is_named_by_its_api_socket() {
        assert_eq!(api("ch:/run/ch.sock"), Ok("/run/ch.sock".into()));
        for wrong in ["ch:", "/run/ch.sock", "qemu:/run/q"] {
            assert!(api(wrong).unwrap_err().contains("expected ch:API_SOCKET"));
        }
        assert_eq!(of(Some(Path::new("web"))).unwrap(), None);
        assert_eq!(of(None).unwrap(), None);
        assert!(of(Some(Path::new("ch:"))).is_err());
    }
}
