//! A move of another VMM's VM. This process is the migration's end, beside the VMM's own process.
//!
//! **Mechanism.** The crate `bridge` moves. A [`Host`] without a VM of its own serves the control
//! socket, so `status`, `watch`, `set`, `recover`, `abandon` and `cancel` work as for other VMs.

use super::{Vmm, keeper};
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
use crate::{output, sockets, wall_clock};
use pageferry_bridge::foreign::{
    LeftBehind, Pause, ReceiveError, ReceiverOptions, SourceError, SourceOptions, end_keepers,
    receive,
};
use pageferry_harness::size;
use pageferry_machine::Backing;
use pageferry_migration::{DestinationVm, Incoming, Phase, Route, SourceSession, check};
use pageferry_transport::TLS_VERSION;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

/// A VM that has not come.
struct NotCome {
    failure: Failure,
    /// The VM stays at its source, so the host may wait for it again.
    stays: bool,
}

impl From<ReceiveError> for NotCome {
    fn from(error: ReceiveError) -> Self {
        let stays = match &error {
            ReceiveError::Refused(_) => true,
            ReceiveError::Migration(failure) => failure.vm == DestinationVm::Discarded,
            _ => false,
        };
        Self {
            failure: error.into(),
            stays,
        }
    }
}

/// Moves the VM of another VMM, shows its progress and its result.
///
/// # Errors
/// Why it did not move, and where it is.
pub(super) fn migrate(
    vmm: &Vmm,
    args: &MigrateArgs,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    let names = vmm.kind.names();
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
    let name = format!("{}-{}", names.prefix, std::process::id());
    let server = sockets::path_for(None, Some(&name))
        .and_then(|path| Server::start(&path, Arc::new(HostService(Arc::clone(&host)))));
    let _server = server
        .inspect_err(|why| output::note(&format!("no control socket: {why}")))
        .ok();
    let mut given = SourceOptions {
        api: vmm.api.clone(),
        preserve: args.preserve_source,
        keeper: keeper(),
    };
    let taken = vmm.kind.depart(&mut given, &|| interrupts.any());
    let source = Arc::new(taken.map_err(SourceError::from)?);
    if source.goes_on() {
        output::note("going on with the move that an earlier `migrate` left behind");
    }
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
            let _ = sender.send(result.and_then(|result| Ok(result?)));
        })
        .map_err(|e| Failure::os("cannot start the migration's thread", e))?;
    let mut stops = StopRequests::new(interrupts, Some(&host));
    let answers = Answers {
        switched_over: &|| matches!(host.activity(), Activity::Leaving(phase) if has_switched_over(phase)),
        cancel: &|_| {
            let vmm = names.vmm;
            feed.note(format!(
                "cancelling the migration; the VM stays with its {vmm}"
            ));
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
    let mut half = Sent::new(&sent, Backing::Shmem, Vec::new());
    let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    half.vmm_pause_ns = source
        .pause()
        .map(|Pause { stop, save }| (ns(stop), ns(save)));
    let report = Report {
        engine: names.engine.into(),
        vcpus: source.vcpus().unwrap_or_default(),
        memory_bytes: source.memory_bytes(),
        sent: Some(half),
        received: None,
        verified: None,
        guest_view: None,
        conditions: Conditions::here(format!("to {to}")).with(&settings),
    };
    show_report(&report, args);
    if source.keeps_vm() {
        output::note(&format!(
            "the old {} process has the paused VM: end it, and never resume it",
            names.vmm
        ));
    }
    Ok(())
}

/// Receives an offered VM into another VMM, until that has all of it. Or goes on with one that was
/// left behind. The host waits again ([`Activity::Waiting`]) if the VM stays at its source.
///
/// # Errors
/// Why it did not come, and where it is.
pub(super) fn take_in(
    vmm: &Vmm,
    left: Option<LeftBehind>,
    (host, incoming, args): (&Arc<Host>, Incoming, &ReceiveArgs),
    feed: &Arc<Feed>,
    stops: &mut StopRequests<'_>,
) -> Result<(), Failure> {
    let names = vmm.kind.names();
    let vcpus = vmm.kind.vcpus(&incoming.offer().guest);
    if let Err(failure) = check_limits(incoming.offer(), args) {
        incoming.refuse(&failure.message);
        return Err(failure);
    }
    let Some(destination) = host.destination() else {
        return Err(Failure::new(Exit::Internal, "the destination has ended"));
    };
    let bytes = incoming.offer().memory_bytes;
    let human = size::human(bytes);
    feed.note(format!("receiving a VM of {} with {human}", names.vmm));
    host.set_activity(Activity::Arriving(Phase::Setup));
    let watch = Watch {
        host: Arc::clone(host),
        activity: Activity::Arriving,
        feed: Arc::clone(feed),
    };
    let stop = Arc::new(AtomicBool::new(false));
    // Only the end of the command ends the service of the last pages.
    let cut = Arc::new(AtomicBool::new(false));
    let (sender, outcome) = channel();
    let there = Arc::clone(&destination);
    let (stopping, cutting) = (Arc::clone(&stop), Arc::clone(&cut));
    let (kind, mut given) = (
        vmm.kind,
        ReceiverOptions {
            api: vmm.api.clone(),
            keeper: keeper(),
            any_version: args.firecracker.any_version,
            overrides: args.firecracker.overrides(),
        },
    );
    std::thread::Builder::new()
        .name("migration".into())
        .spawn(move || {
            let stop = || stopping.load(Ordering::Acquire);
            let cut = || cutting.load(Ordering::Acquire);
            let result = catch_defect(|| {
                let (report, arrival) = match left {
                    Some(left) => {
                        let arrival = left.arrive(&there).map_err(ReceiveError::Refused);
                        let arrival = arrival.map_err(NotCome::from)?;
                        (arrival.receive(incoming, &stop, &watch)?, arrival)
                    }
                    None => receive(kind, &mut given, &there, incoming, &stop, &watch)?,
                };
                arrival.serve(&cut).map_err(|why| NotCome {
                    failure: why.into(),
                    stays: false,
                })?;
                Ok::<_, NotCome>(report)
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
            feed.note("the VM is here and nowhere else, and lacks pages: to end it now, ask again");
        },
        hangup_cancels: true,
    };
    let ended = wait_for_outcome(&outcome, stops, &answers);
    cut.store(true, Ordering::Release);
    let ended = ended.map_err(|none| none.failure("the VM ran here, and ends with this command"));
    let ended = ended.inspect_err(|_| end_keepers())?;
    let report = match ended? {
        Ok(report) => report,
        Err(NotCome { failure, stays }) => {
            if stays {
                host.set_activity(Activity::Waiting);
            }
            return Err(failure);
        }
    };
    host.set_arrived(destination.status(), destination.stalls());
    host.set_activity(Activity::Here);
    let report = Report {
        engine: names.engine.into(),
        vcpus: vcpus.unwrap_or_default(),
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
        output::note(&format!("{} has all of the VM", names.vmm));
        output::result(&report.table(args.details.verbose));
    }
    Ok(())
}
