//! `pageferry receive`: takes a VM in and runs it.

use crate::args::ReceiveArgs;
use crate::control::server::ControlServer;
use crate::exit::{Exit, Failure};
use crate::host::{Activity, Ended, Host, HostService, Jobs, Watch, has_switched_over};
use crate::output;
use crate::progress::{Display, Feed};
use crate::report::{Conditions, Received, Report, Verified};
use crate::sampler::Sampler;
use crate::signals::Interrupts;
use crate::size;
use crate::vm::{GuestDescription, PAUSE_LIMIT, Vm, check_host_memory};
use pageferry_machine::EngineChoice;
use pageferry_migration::channel::Listener;
use pageferry_migration::handshake::Stranger;
use pageferry_migration::{
    DestinationConfig, DestinationFailure, DestinationReport, DestinationVm, Incoming,
    MigrationError, Resolver,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

/// Waits for a VM, receives it, and runs it until somebody wants the end.
///
/// # Errors
/// What keeps a VM from coming; [`Exit::LinkLost`] when one came in part.
pub(crate) fn receive(args: &ReceiveArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    if let Some(parent) = args.child_of {
        end_with(parent)?;
    }
    let (host, jobs) = Host::new();
    let server = match &args.control {
        Some(path) => Some(ControlServer::start(
            path,
            Arc::new(HostService(Arc::clone(&host))),
        )?),
        None => None,
    };
    let listener = Listener::bind(&args.listen)?;
    announce(args, &listener);
    let config = DestinationConfig {
        delivery: args.delivery.delivery.0,
        allocate: !args.sparse,
        ..DestinationConfig::default()
    };
    let stop = || interrupts.any() || host.quits();
    let mut turned_away = |stranger: &Stranger| {
        output::note(&format!(
            "turned away {}: {}; still listening",
            stranger.peer, stranger.why
        ));
    };
    let incoming = match Incoming::accept(&listener, config, &stop, &mut turned_away) {
        Ok(incoming) => incoming,
        // Asked for over the control socket: what was wanted.
        Err(MigrationError::Cancelled) if host.quits() => return Ok(()),
        Err(MigrationError::Cancelled) => {
            return Err(Failure::new(
                Exit::Cancelled,
                "cancelled while waiting for a source",
            ));
        }
        Err(e) => return Err(Failure::new(crate::exit::of_migration(&e), e.to_string())),
    };
    drop(listener);
    let feed = Feed::new();
    let display = args.child_of.is_none().then(|| Display::start(&feed));
    let taken = take_in(&host, incoming, args, &feed, interrupts);
    if let Some(display) = display {
        display.finish();
    }
    let vm = match taken {
        Ok(vm) => vm,
        Err(failure) => {
            if failure.exit == Exit::LinkLost
                && server.is_some()
                && matches!(host.activity(), Activity::Incomplete { .. })
            {
                // Said as an error when the command ends.
                output::note(&format!(
                    "{failure}; it stays here until `pageferry quit` or Ctrl-C"
                ));
                host.wait_for_end(interrupts);
            }
            return Err(failure);
        }
    };
    keep(args, &host, &vm, &jobs, interrupts)
}

/// Runs the VM that came until the end, and says then what its migration did.
fn keep(
    args: &ReceiveArgs,
    host: &Arc<Host>,
    vm: &Vm,
    jobs: &Jobs,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    let report = host.received().map(|received| Report {
        engine: vm.engine().name().into(),
        vcpus: vm.vcpus(),
        memory_bytes: vm.memory_bytes(),
        sent: None,
        received: Some(received),
        verified: None,
        conditions: Conditions::here(format!("received at {}", args.listen)),
    });
    let shown = args.child_of.is_none();
    if shown {
        // Only a demo draws a timeline.
        host.set_sampler(None);
        output::note("all of the VM is here; it runs until `pageferry quit` or Ctrl-C");
    }
    if let Some(report) = report.as_ref().filter(|_| shown && !args.json) {
        output::result(&report.table());
    }
    let ended = host.keep(jobs, interrupts)?;
    if let Some(report) = report.filter(|_| args.json) {
        output::json(&report.json());
    }
    match ended {
        Ended::Asked if shown => output::note("the VM was ended"),
        Ended::Migrated(to) if !args.json => output::result(&format!("the VM runs at {to} now\n")),
        _ => {}
    }
    Ok(())
}

/// Has the kernel end this process when the one that started it ends, whatever ends that.
fn end_with(parent: u32) -> Result<(), Failure> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|e| Failure::os("cannot tie this process to the demo that started it", e))?;
    // It may have ended before the kernel was told.
    let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    if now != Some(parent) {
        return Err(Failure::new(
            Exit::Cancelled,
            "the demo that started this process has ended",
        ));
    }
    Ok(())
}

fn announce(args: &ReceiveArgs, listener: &Listener) {
    let address = listener.local_addr();
    if args.child_of.is_some() {
        output::result(&format!("{address}\n"));
    } else if args.json {
        output::note(&format!("listening on {address}"));
    } else {
        output::result(&format!("listening on {address}\n"));
    }
}

/// Builds the machine that is offered, or refuses the offer.
fn build(incoming: &Incoming, args: &ReceiveArgs) -> Result<(Arc<Vm>, Arc<Resolver>), Failure> {
    let refused = |e: Failure| match e.exit {
        // No flag given here is wrong: what is offered does not fit.
        Exit::Usage => Failure::new(Exit::Refused, e.message),
        _ => e,
    };
    let guest = GuestDescription::of_offer(incoming.offer())?;
    check_host_memory(guest.memory_bytes, 1).map_err(refused)?;
    let resolver = Resolver::new();
    // No probe VM is run first: beside a busy source on the same host it could miss its time limit.
    let vm = Vm::create(&guest, Some(Arc::clone(&resolver))).map_err(|failure| {
        let why = pageferry_machine::select(EngineChoice::Only(guest.engine())).err();
        match why.map(Failure::from) {
            Some(why) if why.exit == Exit::Engine => {
                why.and("the source can run its VM with --engine soft")
            }
            _ => refused(failure),
        }
    })?;
    vm.check_delivery(args.delivery.delivery.0)?;
    Ok((Arc::new(vm), resolver))
}

/// Receives the VM.
fn take_in(
    host: &Arc<Host>,
    incoming: Incoming,
    args: &ReceiveArgs,
    feed: &Arc<Feed>,
    interrupts: &Interrupts,
) -> Result<Arc<Vm>, Failure> {
    if args.child_of.is_none() {
        let offer = incoming.offer();
        let size = size::human(offer.memory_bytes);
        feed.note(format!(
            "receiving a VM with {} vCPUs and {size} for {}",
            offer.vcpus, offer.engine
        ));
    }
    let (vm, resolver) = match build(&incoming, args) {
        Ok(built) => built,
        Err(failure) => {
            incoming.refuse(&failure.message);
            return Err(failure);
        }
    };
    host.set_vm(&vm);
    let watched = Arc::clone(host);
    let runs = move || match watched.activity() {
        Activity::Arriving(phase) => has_switched_over(phase),
        activity => activity == Activity::Here,
    };
    host.set_sampler(Some(Sampler::start(&vm, runs)));
    let stop = Arc::new(AtomicBool::new(false));
    let outcome = start(host, incoming, &vm, resolver, &stop, feed)?;
    match watch(host, &outcome, &stop, feed, interrupts)? {
        Ok(report) => {
            let workload = vm.workload();
            host.set_received(Received::new(&report, |page| workload.is_data(page)));
            if args.corrupt_page {
                corrupt(host, &vm)?;
            }
            host.set_activity(Activity::Here);
            Ok(vm)
        }
        Err(failure) => {
            match failure.vm {
                DestinationVm::PausedIncomplete { missing } => {
                    host.set_activity(Activity::Incomplete { missing });
                }
                DestinationVm::Discarded => host.set_activity(Activity::Waiting),
            }
            Err(failure.into())
        }
    }
}

type Outcome = Result<DestinationReport, DestinationFailure>;

/// Receives on a thread of its own, so that the user can give it up.
fn start(
    host: &Arc<Host>,
    incoming: Incoming,
    vm: &Arc<Vm>,
    resolver: Arc<Resolver>,
    stop: &Arc<AtomicBool>,
    feed: &Arc<Feed>,
) -> Result<Receiver<Outcome>, Failure> {
    let (sender, outcome) = channel();
    let (vm, stop) = (Arc::clone(vm), Arc::clone(stop));
    let watch = Watch {
        host: Arc::clone(host),
        activity: Activity::Arriving,
        feed: Arc::clone(feed),
    };
    std::thread::Builder::new()
        .name("migration".into())
        .spawn(move || {
            let stop = || stop.load(Ordering::Acquire);
            let result = incoming.receive(&vm.running(), &resolver, &stop, &watch);
            // Nobody waits any more only when the process is ending.
            let _ = sender.send(result);
        })
        .map_err(|e| Failure::os("cannot start the migration's thread", e))?;
    Ok(outcome)
}

/// Waits for the outcome and does what an interrupt asks for.
fn watch(
    host: &Host,
    outcome: &Receiver<Outcome>,
    stop: &AtomicBool,
    feed: &Feed,
    interrupts: &Interrupts,
) -> Result<Outcome, Failure> {
    let asked = || interrupts.count() + u32::from(host.quits());
    let mut seen = 0;
    let mut told = false;
    loop {
        match outcome.recv_timeout(Interrupts::POLL) {
            Ok(outcome) => return Ok(outcome),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::new(
                    Exit::Internal,
                    "the migration's thread ended without an outcome",
                ));
            }
        }
        let now = asked();
        if now == seen {
            continue;
        }
        seen = now;
        let after =
            matches!(host.activity(), Activity::Arriving(phase) if has_switched_over(phase));
        if after && told {
            let message =
                "given up after the switch-over: the VM ran here, and ends here with pages missing";
            return Err(Failure::new(Exit::LinkLost, message));
        } else if after {
            told = true;
            feed.note("the VM runs here and nowhere else: it ends when all of it is here (again: end it now)");
        } else {
            stop.store(true, Ordering::Release);
        }
    }
}

/// For tests: changes a page, and has the host verify before the guest can repair anything.
fn corrupt(host: &Host, vm: &Vm) -> Result<(), Failure> {
    vm.threads().pause(PAUSE_LIMIT)?;
    vm.corrupt_a_page();
    host.set_earlier(Verified::new(&vm.verify_paused()));
    vm.threads().resume();
    Ok(())
}
