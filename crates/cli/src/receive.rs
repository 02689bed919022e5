//! `pageferry receive`: receives a VM and runs it.

use crate::activation;
use crate::args::{ReceiveArgs, SaveArgs};
use crate::bridge::Vmm;
use crate::console::Shown;
use crate::control::options::{limits, plain};
use crate::control::server::Server;
use crate::exit::{Exit, Failure, of_listen, of_tls};
use crate::host::{
    Activity, Answers, Ended, Host, HostService, Jobs, StopRequests, Watch, catch_defect,
    has_switched_over, wait_for_outcome,
};
use crate::output;
use crate::progress::{Display, Feed, Rates};
use crate::report::{Conditions, Received, Report, Verified};
use crate::sampler::Sampler;
use crate::signals::Interrupts;
use crate::vm::{Disks, GuestDescription, PAUSE_LIMIT, Vm, check_backing, check_host_memory};
use crate::{detach, sockets};
use pageferry_harness::size;
use pageferry_machine::{CpuModel, Delivery, EngineChoice, kvm};
use pageferry_migration::{
    ChannelError, Destination, DestinationConfig, DestinationFailure, DestinationReport,
    DestinationVm, Incoming, Listener, MigrationError, Offer, Resolver, Stranger,
};
use pageferry_transport::Quota;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};

/// Waits for a VM, receives it, and runs it until somebody asks for the end. If a source fails
/// before the switch-over, the command reports that and waits for the next one. When it listens, a
/// `detached` process leaves the command that started it.
///
/// # Errors
/// The reason why no VM came; [`Exit::LinkLost`] when one came in part.
pub(crate) fn receive(
    args: &ReceiveArgs,
    detached: bool,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    if let Some(parent) = args.child_of {
        end_with(parent)?;
    }
    Vmm::check(args.for_vmm.as_ref(), args)?;
    // A host that lacks the backing takes no VM at all.
    args.backing.backing.check(0)?;
    match &args.for_vmm {
        Some(_) => args.devices.check_none("a VM of another VMM")?,
        None => args.devices.check_disks()?,
    }
    let (host, jobs) = Host::new();
    let (control, name) = (args.place.control.as_deref(), args.place.name.as_deref());
    let server = sockets::path_for(control, name).and_then(|path| {
        let server = Server::start(&path, Arc::new(HostService(Arc::clone(&host))))?;
        Ok((server, path))
    });
    let server = match server {
        Ok(server) => Some(server),
        // A process in the background can be reached in no other way.
        Err(why) if control.is_some() || name.is_some() || detached => return Err(why),
        Err(why) => {
            output::note(&format!("no control socket: {why}"));
            None
        }
    };
    let _metrics = crate::metrics::serve(&args.metrics, {
        let host = Arc::clone(&host);
        move || crate::metrics::of(&host)
    })?;
    let destination = listen(args)?;
    host.set_destination(&destination);
    announce(args, &destination);
    if args.delivery.delivery.0.is_none() && args.for_vmm.is_none() {
        try_deliveries();
    }
    if let Some((_, path)) = &server {
        detach::ready(detached, path, control.is_none())?;
    }
    let feed = Feed::new();
    let there = Arc::downgrade(&destination);
    feed.measure(move || Rates::of(&there.upgrade()?.status()));
    let mut console: Option<Shown> = None;
    let notes = Notes::default();
    let left = args.for_vmm.as_ref().map(Vmm::left_behind).transpose()?;
    let mut left = left.flatten();
    loop {
        let incoming = match &left {
            Some(left) => {
                output::note("going on with the VM that an earlier `receive` left behind");
                Some(left.session(&destination)?)
            }
            None => accept(&destination, &host, args, interrupts, &notes)?,
        };
        let Some(incoming) = incoming else {
            // `quit` came over the control socket: this is the requested end.
            return Ok(());
        };
        let display = args.child_of.is_none().then(|| Display::start(&feed));
        let mut stops = StopRequests::new(interrupts, Some(&host));
        if let Some(vmm) = &args.for_vmm {
            let taken = vmm.take_in(left.take(), (&host, incoming, args), &feed, &mut stops);
            if let Some(display) = display {
                display.finish();
            }
            match taken {
                Err(failure)
                    if host.activity() == Activity::Waiting && goes_on(args, &host, interrupts) =>
                {
                    notes.say(&format!("{failure}; still listening"));
                    continue;
                }
                ended => return ended,
            }
        }
        let taken = take_in(&host, incoming, args, &feed, &mut stops, &mut console);
        if let Some(display) = display {
            display.finish();
        }
        let failure = match taken {
            Ok(vm) => {
                host.set_arrived(destination.status(), destination.stalls());
                drop(destination);
                return keep(args, &host, &vm, &jobs, interrupts);
            }
            Err(failure) => failure,
        };
        // No guest needs the terminal's keys any more, and Ctrl-C must end the command.
        console = None;
        match host.activity() {
            Activity::Waiting if goes_on(args, &host, interrupts) => {
                host.set_sampler(None);
                host.set_vm(None);
                notes.say(&format!("{failure}; still listening"));
            }
            Activity::Incomplete { .. }
                if matches!(failure.exit, Exit::LinkLost | Exit::Internal) && server.is_some() =>
            {
                // The command ends with this as its error.
                output::note(&format!(
                    "{failure}; it stays here until `pageferry quit` or Ctrl-C"
                ));
                stops.wait_for_next();
                return Err(failure);
            }
            _ => return Err(failure),
        }
    }
}

/// Begins the trials that choose a delivery for a VM on KVM, so that none waits for them later.
/// They may take seconds on a busy host, and a source may be here at once: sources of other VMs
/// need not wait at all.
fn try_deliveries() {
    let trials = std::thread::Builder::new().name("trials".into());
    // Without a thread, a VM on KVM makes them when it comes.
    let _ = trials.spawn(|| kvm::probe_vm().map(|()| kvm::delivery_trials()));
}

/// Whether a destination whose source failed waits for the next one. A demo has only one source.
fn goes_on(args: &ReceiveArgs, host: &Host, interrupts: &Interrupts) -> bool {
    args.child_of.is_none() && !is_asked_to_stop(host, interrupts)
}

/// Whether a destination without a VM must not wait for one.
fn is_asked_to_stop(host: &Host, interrupts: &Interrupts) -> bool {
    interrupts.any() || interrupts.hung_up() || host.quits()
}

/// Listens for sources.
fn listen(args: &ReceiveArgs) -> Result<Arc<Destination>, Failure> {
    let config = DestinationConfig {
        delivery: args.delivery.delivery.0,
        userfaultfds: args.delivery.userfaultfds,
        fault_readers: args.delivery.fault_readers,
        allocate: !args.sparse,
        cpus: args.cpus.cpus.clone(),
        limits: limits(args.limits.dead_after, args.limits.give_up_after),
        tls: args.tls.options().as_ref().map(Into::into),
        plain: plain(args.tls.insecure),
    };
    let listener = match &args.listen {
        Some(address) => Listener::bind(address).map_err(|e| of_listen(&e))?,
        None => activation::listener()?,
    };
    Destination::listen(listener, config, turned_away)
        .map(Arc::new)
        .map_err(Failure::from)
}

/// Waits for a source that offers a VM. Returns `None` if `quit` came over the control socket.
fn accept(
    destination: &Arc<Destination>,
    host: &Host,
    args: &ReceiveArgs,
    interrupts: &Interrupts,
    notes: &Notes,
) -> Result<Option<Incoming>, Failure> {
    let stop = || is_asked_to_stop(host, interrupts);
    loop {
        match destination.accept(&stop) {
            Ok(incoming) => return Ok(Some(incoming)),
            Err(MigrationError::Cancelled) if host.quits() => return Ok(None),
            Err(MigrationError::Cancelled) => {
                return Err(Failure::new(
                    Exit::Cancelled,
                    "cancelled while waiting for a source",
                ));
            }
            // A fault of this host would not go away with another source.
            Err(e) if is_of_this_host(&e) => {
                return Err(e.into());
            }
            Err(e) if !goes_on(args, host, interrupts) => {
                return Err(e.into());
            }
            Err(e) => notes.say(&format!("turned away a source: {e}; still listening")),
        }
    }
}

/// Whether this host fails, or the files for TLS do not serve.
fn is_of_this_host(error: &MigrationError) -> bool {
    match error {
        MigrationError::Os { .. } => true,
        MigrationError::Channel(ChannelError::Tls(error)) => of_tls(error) == Exit::Usage,
        _ => false,
    }
}

fn turned_away(stranger: &Stranger) {
    let Stranger { peer, why, .. } = stranger;
    let others = others(stranger.left_out);
    output::note(&format!(
        "turned away {peer}: {why}; still listening{others}"
    ));
}

/// The messages that were left out before one.
fn others(left_out: u64) -> String {
    match left_out {
        0 => String::new(),
        more => format!(" (and {more} others since the last of these messages)"),
    }
}

/// Notes that sources cause, at a bounded rate.
#[derive(Default)]
struct Notes(Quota);

impl Notes {
    fn say(&self, note: &str) {
        if let Some(left_out) = self.0.take() {
            output::note(&format!("{note}{}", others(left_out)));
        }
    }
}

/// Checks the offered VM against the limits of this destination and the memory of this host, before
/// anything is allocated. All commands that take a VM in call it.
pub(crate) fn check_limits(offer: &Offer, args: &ReceiveArgs) -> Result<(), Failure> {
    let refuse = |message| Err(Failure::new(Exit::Refused, message));
    let max_vcpus = args.max_vcpus.unwrap_or_else(default_max_vcpus);
    if offer.vcpus > max_vcpus {
        return refuse(format!(
            "the VM has {} vCPUs, and this destination takes at most {max_vcpus} (--max-vcpus)",
            offer.vcpus
        ));
    }
    if let Some(max) = args.max_memory
        && offer.memory_bytes > max
    {
        return refuse(format!(
            "the VM has {} of memory, and this destination takes at most {} (--max-memory)",
            size::human(offer.memory_bytes),
            size::human(max)
        ));
    }
    if !args.backing.ignore_limits && !args.backing.backing.is_hugetlb() {
        check_host_memory(offer.memory_bytes, 1).map_err(|why| Failure {
            exit: Exit::Refused,
            ..why
        })?;
    }
    Ok(())
}

/// Eight vCPUs per core, and at least 64. Each has a thread, whose stack and scheduling cost this
/// host.
fn default_max_vcpus() -> u32 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    u32::try_from(cores)
        .unwrap_or(u32::MAX)
        .saturating_mul(8)
        .max(64)
}

/// Runs the received VM until the end, then reports its migration.
fn keep(
    args: &ReceiveArgs,
    host: &Arc<Host>,
    vm: &Vm,
    jobs: &Jobs,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    let large = || Some(vm.large_mappings());
    let mut report = host.received().map(|received| Report {
        engine: vm.engine().name().into(),
        vcpus: vm.vcpus(),
        memory_bytes: vm.memory_bytes(),
        sent: None,
        received: Some(received),
        verified: None,
        guest_view: None,
        conditions: Conditions::here(match &args.listen {
            Some(address) => format!("received at {address}"),
            None => "received at an activated socket".to_owned(),
        }),
    });
    let shown = args.child_of.is_none();
    if shown {
        // Only a demo draws a timeline.
        host.set_sampler(None);
        output::note(match vm.threads().is_paused() {
            true => {
                "all of the VM is here, paused: `pageferry resume` runs it, `pageferry quit` or Ctrl-C ends it"
            }
            false => "all of the VM is here; it runs until `pageferry quit` or Ctrl-C",
        });
    }
    if let Some(received) = report.as_mut().and_then(|report| report.received.as_mut()) {
        received.large_mappings = large();
    }
    if let Some(report) = report.as_ref().filter(|_| shown && !args.json) {
        output::result(&report.table(args.details.verbose));
    }
    let ended = host.keep(jobs, interrupts, &SaveArgs::default())?;
    if let Some(received) = report.as_mut().and_then(|report| report.received.as_mut()) {
        received.large_mappings = large();
    }
    if let Some(report) = report.filter(|_| args.json) {
        output::json(&report.json());
    }
    if let Some(words) = ended.words().filter(|_| shown) {
        output::note(words);
    }
    match &ended {
        Ended::Migrated(arrival) if !args.json => output::result(&format!("{arrival}\n")),
        _ => {}
    }
    ended.check()
}

/// Makes the kernel end this process when its parent ends, for whatever reason.
fn end_with(parent: u32) -> Result<(), Failure> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|e| Failure::os("cannot tie this process to the demo that started it", e))?;
    // The parent may have ended before the call.
    let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    if now != Some(parent) {
        return Err(Failure::new(
            Exit::Cancelled,
            "the demo that started this process has ended",
        ));
    }
    Ok(())
}

fn announce(args: &ReceiveArgs, destination: &Destination) {
    let addresses = destination.local_addrs();
    let Some(address) = addresses.first() else {
        return;
    };
    if args.child_of.is_some() {
        output::result(&format!("{address}\n"));
    } else if args.json {
        output::note(&format!("listening on {address}"));
    } else {
        output::result(&format!("listening on {address}\n"));
    }
}

/// Builds the offered machine, or refuses the offer.
fn build(incoming: &Incoming, args: &ReceiveArgs) -> Result<(Arc<Vm>, Arc<Resolver>), Failure> {
    let refused = |e: Failure| match e.exit {
        // The flags of this command are valid: the offer does not fit.
        Exit::Usage => Failure::new(Exit::Refused, e.message),
        _ => e,
    };
    check_limits(incoming.offer(), args)?;
    let guest = GuestDescription::of_offer(incoming.offer())?;
    if let Some(cpuid) = &guest.cpuid {
        kvm::check_cpuid(cpuid, guest.vcpus).map_err(|e| refused(e.into()))?;
    }
    if guest.is_pc() && args.delivery.options().delivery == Some(Delivery::Poison) {
        let of_host = || kvm::cpuid_of(&CpuModel::default(), guest.vcpus);
        let cpuid = guest.cpuid.clone().map_or_else(of_host, Ok);
        let fits = cpuid.and_then(|cpuid| kvm::check_forced_poison(&cpuid));
        fits.map_err(|e| refused(e.into()))?;
    }
    if guest.is_pc() {
        // It would crawl here, and not even boot.
        kvm::probe_kernels()?;
    }
    check_backing(&args.backing, &guest, 1).map_err(refused)?;
    let backing = args.backing.backing;
    let resolver = Resolver::new();
    // No probe VM is run first: beside a busy source on the same host it could exceed its time
    // limit.
    let devices = guest
        .open_devices(&args.devices, Disks::Elsewhere)
        .map_err(refused)?;
    let vm =
        Vm::create(&guest, backing, Some(Arc::clone(&resolver)), devices).map_err(|failure| {
            let why = pageferry_machine::select(EngineChoice::Only(guest.engine())).err();
            match why.map(Failure::from) {
                Some(why) if why.exit == Exit::Engine => {
                    why.and("the source can run its VM with --engine soft")
                }
                _ => refused(failure),
            }
        })?;
    vm.check_delivery(args.delivery.options())
        .map_err(refused)?;
    Ok((Arc::new(vm), resolver))
}

/// Receives the VM.
fn take_in(
    host: &Arc<Host>,
    incoming: Incoming,
    args: &ReceiveArgs,
    feed: &Arc<Feed>,
    stops: &mut StopRequests<'_>,
    console: &mut Option<Shown>,
) -> Result<Arc<Vm>, Failure> {
    if args.child_of.is_none() {
        let offer = incoming.offer();
        let size = size::human(offer.memory_bytes);
        feed.note(format!(
            "receiving a VM with {} vCPUs and {size} for {}",
            offer.vcpus, offer.kind.engine
        ));
    }
    let (vm, resolver) = match build(&incoming, args) {
        Ok(built) => built,
        Err(failure) => {
            incoming.refuse(&failure.message);
            return Err(failure);
        }
    };
    host.set_vm(Some(&vm));
    *console = match (vm.console(), &args.console) {
        (Some(from), Some(target)) => match Shown::start(from, target, stops.interrupts()) {
            Ok(shown) => Some(shown),
            Err(failure) => {
                incoming.refuse(&failure.message);
                return Err(failure);
            }
        },
        _ => None,
    };
    let watched = Arc::clone(host);
    let runs = move || match watched.activity() {
        Activity::Arriving(phase) => has_switched_over(phase),
        activity => activity == Activity::Here,
    };
    host.set_sampler(Some(Sampler::start(&vm, runs)));
    let stop = Arc::new(AtomicBool::new(false));
    let outcome = start(host, incoming, &vm, resolver, &stop, feed)?;
    let outcome = match wait(host, &outcome, &stop, feed, stops)? {
        Ok(outcome) => outcome,
        Err(defect) => return after_defect(host, vm, defect),
    };
    match outcome {
        Ok(report) => {
            let workload = vm.workload();
            host.set_received(Received::new(&report, vm.backing(), |page| {
                workload.is_none_or(|workload| workload.is_data(page))
            }));
            if args.corrupt_page {
                corrupt(host, &vm)?;
            }
            host.set_activity(Activity::Here);
            Ok(vm)
        }
        Err(failure) => {
            match failure.vm {
                DestinationVm::PausedIncomplete { missing, .. } => {
                    // The user sent these requests before it was possible to know of this end. They
                    // must not drop the pages that are here.
                    stops.forget();
                    host.set_activity(Activity::Incomplete { missing });
                }
                DestinationVm::Discarded | DestinationVm::Gone => {
                    host.set_activity(Activity::Waiting);
                }
            }
            Err(failure.into())
        }
    }
}

type Outcome = Result<DestinationReport, DestinationFailure>;

/// Decides about a VM whose migration a defect ended. A VM that is whole here goes on.
fn after_defect(host: &Host, vm: Arc<Vm>, defect: Failure) -> Result<Arc<Vm>, Failure> {
    let status = host.destination().map(|there| there.status());
    let status = status.unwrap_or_default();
    match status.stage {
        "none" | "receiving" => {
            host.set_activity(Activity::Waiting);
            Err(defect.and("the VM runs on at the source"))
        }
        "running" | "complete" if status.pages_left == 0 => {
            let stays = match vm.threads().is_paused() {
                true => "stays paused",
                false => "runs on",
            };
            output::note(&format!("{defect}; all of the VM is here, and it {stays}"));
            host.set_activity(Activity::Here);
            Ok(vm)
        }
        _ => {
            // A vCPU that waits for a page may not leave the guest.
            let _ = vm.threads().pause(PAUSE_LIMIT);
            let missing = status.pages_left;
            host.set_activity(Activity::Incomplete { missing });
            Err(defect.and(&format!("{missing} pages of the VM are missing here")))
        }
    }
}

/// Receives on a separate thread, so that the user can give it up.
fn start(
    host: &Arc<Host>,
    incoming: Incoming,
    vm: &Arc<Vm>,
    resolver: Arc<Resolver>,
    stop: &Arc<AtomicBool>,
    feed: &Arc<Feed>,
) -> Result<Receiver<Result<Outcome, Failure>>, Failure> {
    let (sender, outcome) = channel();
    let (vm, stop) = (Arc::clone(vm), Arc::clone(stop));
    let watch = Watch {
        host: Arc::clone(host),
        activity: Activity::Arriving,
        feed: Arc::clone(feed),
    };
    // The thread takes the offer when it runs: if there is none, the source has to hear why.
    let (offer, taken) = channel::<Incoming>();
    let spawned = std::thread::Builder::new()
        .name("migration".into())
        .spawn(move || {
            let Ok(incoming) = taken.recv() else {
                return;
            };
            let stop = || stop.load(Ordering::Acquire);
            let result = catch_defect(|| incoming.receive(&vm.running(), &resolver, &stop, &watch));
            // The receiver is gone only if the process is ending.
            let _ = sender.send(result);
        });
    if let Err(e) = spawned {
        let failure = Failure::os("cannot start the migration's thread", e);
        incoming.refuse(&failure.message);
        return Err(failure);
    }
    if let Err(unsent) = offer.send(incoming) {
        unsent.0.refuse("the migration's thread has ended");
    }
    Ok(outcome)
}

/// Waits for the outcome and answers requests to stop.
fn wait(
    host: &Host,
    outcome: &Receiver<Result<Outcome, Failure>>,
    stop: &AtomicBool,
    feed: &Feed,
    stops: &mut StopRequests<'_>,
) -> Result<Result<Outcome, Failure>, Failure> {
    let answers = Answers {
        switched_over: &|| matches!(host.activity(), Activity::Arriving(phase) if has_switched_over(phase)),
        cancel: &|_| {
            // A copy that was ready is kept until the source has heard that it is discarded. The
            // second request waits no longer.
            if stop.swap(true, Ordering::AcqRel)
                && let Some(there) = host.destination()
            {
                there.give_up();
            }
        },
        finishing: &|| {
            feed.note("the VM is here and nowhere else: it ends when all of it is here (again: end it now)");
        },
        hangup_cancels: true,
    };
    wait_for_outcome(outcome, stops, &answers)
        .map_err(|none| none.failure("the VM ran here, and ends here with pages missing"))
}

/// For tests: changes a page, and has the host verify before the guest can repair anything.
fn corrupt(host: &Host, vm: &Vm) -> Result<(), Failure> {
    let paused = vm.threads().pause(PAUSE_LIMIT)?;
    vm.corrupt_a_page()?;
    host.set_earlier(Verified::new(&vm.verify_paused()?));
    if paused.was_running {
        vm.threads().resume();
    }
    Ok(())
}
