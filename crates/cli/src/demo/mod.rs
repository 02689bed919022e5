//! `pageferry demo`: moves a VM from this process to a child process, and checks every byte.
//!
//! If the guest is Linux ([`linux`]), nobody knows what its pages hold. Then the guest's own checks
//! count, which its console shows ([`text`], [`view`]).

mod child;
mod linux;
mod text;
mod view;

use crate::args::{DemoArgs, DemoGuest};
use crate::control::protocol::Request;
use crate::exit::{Exit, Failure};
use crate::host::{
    ABANDONED_AT_SOURCE, Answers, FINISHING, StopRequests, has_switched_over, send_away,
    wait_for_outcome,
};
use crate::output;
use crate::progress::{Display, Feed, Rates};
use crate::report::{self, Conditions, Report, Sent};
use crate::run::Kernel;
use crate::sampler::Sampler;
use crate::signals::Interrupts;
use crate::vm::{Devices, GuestDescription, Vm, check_backing, engine_that_receives};
use child::Child;
use pageferry_migration::{
    Limits, Observer, Phase, Settings, SourceConfig, SourceReport, SourceSession, SourceVm,
};
use serde_json::Value;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The longest run of the guest at the source before the move.
const WARM_UP_LIMIT: Duration = Duration::from_secs(30);
/// The shortest run of the guest at the source before the move.
const WARM_UP_LEAST: Duration = Duration::from_millis(500);
/// The longest time without progress before a guest counts as stuck.
const STUCK: Duration = Duration::from_secs(30);
/// The time limit for short requests to the destination.
const ASK_LIMIT: Duration = Duration::from_secs(30);
/// The time after which a destination that does not return is dead: nobody repairs a demo.
const GIVE_UP_AFTER: Duration = Duration::from_secs(10);
/// The time limit for a verification.
const VERIFY_LIMIT: Duration = Duration::from_secs(3600);

/// Shows a migration on this machine.
///
/// # Errors
/// The failure; [`Exit::Verification`] when a page was wrong.
pub(crate) fn demo(args: &DemoArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    if let Some(path) = &args.report {
        check_report_path(path)?;
    }
    let feed = Feed::new();
    let display = Display::start(&feed);
    let outcome = run(args, &feed, interrupts);
    display.finish();
    let report = outcome?;
    if args.json {
        output::json(&report.json());
    } else {
        output::result(&report.table(args.details.verbose));
    }
    // Written after the result, so that a report that cannot be written does not cost the result.
    let written = args.report.as_ref().map_or(Ok(()), |path| {
        report::write(path, report.html())?;
        if !args.json {
            output::result(&format!("\n  report written to {}\n", path.display()));
        }
        Ok(())
    });
    report.check().and(written)
}

fn check_report_path(path: &Path) -> Result<(), Failure> {
    let wrong = |why: &str| {
        Failure::new(
            Exit::Usage,
            format!("cannot write the report to {}: {why}", path.display()),
        )
    };
    if path.is_dir() {
        return Err(wrong("it is a directory; name a file, like report.html"));
    }
    let parent = path
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    if !parent.is_dir() {
        return Err(wrong("its directory does not exist"));
    }
    Ok(())
}

/// Runs everything up to the report.
fn run(args: &DemoArgs, feed: &Arc<Feed>, interrupts: &Interrupts) -> Result<Report, Failure> {
    let settings = args.settings();
    let settings = settings.map_err(|why| Failure::new(Exit::Usage, why))?;
    let (guest, kernel, because) = describe(args)?;
    guest.workload()?;
    let engine = guest.engine();
    let backing = args.backing.backing;
    check_backing(&args.backing, &guest, 2)?;
    feed.step(format!("start on {engine}"));
    let vm = Arc::new(Vm::create(&guest, backing, None, Devices::default())?);
    vm.check_delivery(args.delivery.options())?;
    let mut child = Child::start(args, engine, interrupts)?;
    let mut linux = match &kernel {
        None => {
            vm.load(Duration::ZERO)?;
            vm.threads().resume();
            None
        }
        Some(kernel) => {
            let linux = linux::Here::listen(&vm, &mut child)?;
            vm.load_linux(&kernel.linux())?;
            vm.threads().resume();
            Some(linux)
        }
    };
    // The guest has its own copy.
    drop(kernel);
    let sampler = Sampler::start(&vm, || true);
    match &mut linux {
        None => warm_up(&vm, feed, interrupts)?,
        Some(linux) => {
            linux.warm_up(&vm, feed, interrupts)?;
            linux.begin();
        }
    }

    let progress = || match &linux {
        None => pages_written(&vm),
        Some(linux) => linux.lines(),
    };
    let sent = move_away(&vm, &child, settings, &progress, feed, interrupts)?;
    let linux = linux.map(linux::Here::follow);
    let sent = Sent::new(&sent, backing, sampler.samples());
    drop(sampler);

    child.wait_until_here(interrupts)?;
    let guest_view = match linux {
        None => {
            wait_for_guest(&mut child, feed, interrupts)?;
            None
        }
        Some(linux) => Some(linux.hear(&mut child, feed, interrupts)?),
    };
    // Taken before the host pauses the guest to verify, so that the pause is not in the timeline.
    let theirs: Report = read(child.ask(&Request::Report {}, ASK_LIMIT, interrupts)?)?;
    let verified = match guest_view {
        None => {
            feed.step("host verifies");
            Some(read(child.ask(
                &Request::Verify {},
                VERIFY_LIMIT,
                interrupts,
            )?)?)
        }
        Some(_) => None,
    };
    child.end()?;
    Ok(Report {
        engine: engine.name().into(),
        vcpus: vm.vcpus(),
        memory_bytes: vm.memory_bytes(),
        sent: Some(sent),
        received: theirs.received,
        verified,
        guest_view,
        conditions: Conditions {
            engine_because: Some(because),
            ..Conditions::here("TCP on the loopback interface").with(&settings)
        },
    })
}

/// The guest, the kernel if it is Linux, and the reason for its engine.
fn describe(args: &DemoArgs) -> Result<(GuestDescription, Option<Kernel>, String), Failure> {
    let (vcpus, memory) = (args.machine.vcpus, args.machine.memory);
    if args.guest == DemoGuest::Linux {
        let (kernel, engine, because) = linux::kernel(args)?;
        let guest = GuestDescription::linux(engine, vcpus, memory);
        return Ok((guest, Some(kernel), because));
    }
    if args.kernel.is_some() {
        return Err(Failure::new(
            Exit::Usage,
            "--kernel and --initrd are for Linux: add --guest linux",
        ));
    }
    let (engine, because) = match args.delivery.delivery.0 {
        None => engine_that_receives(args.machine.engine)?,
        Some(_) => pageferry_machine::select(args.machine.engine)?,
    };
    Ok((GuestDescription::new(engine, vcpus, memory), None, because))
}

/// The pages that the vCPUs of the test program have written.
fn pages_written(vm: &Vm) -> u64 {
    vm.controls().iter().flatten().map(|c| c.done).sum()
}

fn read<T: serde::de::DeserializeOwned>(answer: Value) -> Result<T, Failure> {
    serde_json::from_value(answer)
        .map_err(|e| Failure::os("the destination's answer is not readable", e))
}

/// Lets the guest run until every vCPU has written each of its pages once.
fn warm_up(vm: &Vm, feed: &Feed, interrupts: &Interrupts) -> Result<(), Failure> {
    feed.step("warm-up");
    let began = Instant::now();
    let workload = vm.workload().expect("a demo's guest");
    let share = workload.memory_map().share_pages();
    let done = interrupts.wait_for(WARM_UP_LIMIT, || {
        vm.check_guest()?;
        let least: Vec<u64> = vm
            .controls()
            .iter()
            .map(|c| c.map_or(0, |c| c.done.min(share)))
            .collect();
        feed.at(least.iter().sum(), share * u64::from(vm.vcpus()));
        let all = least.iter().all(|&done| done >= share);
        Ok((all && began.elapsed() >= WARM_UP_LEAST).then_some(()))
    })?;
    if done.is_some() {
        return Ok(());
    }
    let pages = pages_written(vm);
    if pages == 0 {
        let message = format!(
            "the guest wrote not a single page in {} s",
            WARM_UP_LIMIT.as_secs()
        );
        return Err(Failure::new(Exit::Guest, message));
    }
    feed.note(format!(
        "the guest has written {pages} pages in {} s: moving it as it is",
        WARM_UP_LIMIT.as_secs()
    ));
    Ok(())
}

/// Keeps the phase, which decides what Ctrl-C means.
struct Phases {
    feed: Arc<Feed>,
    now: Arc<Mutex<Phase>>,
}

impl Observer for Phases {
    fn phase(&self, phase: Phase) {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) = phase;
        self.feed.phase(phase);
    }

    fn progress(&self, phase: Phase, done: u64, total: u64) {
        self.feed.progress(phase, done, total);
    }

    fn allocated(&self, done: u64, total: u64) {
        self.feed.allocated(done, total);
    }

    fn note(&self, text: &str) {
        Observer::note(&*self.feed, text);
    }
}

/// Moves the VM. `progress` grows while its guest runs here.
fn move_away(
    vm: &Arc<Vm>,
    child: &Child,
    settings: Settings,
    progress: &dyn Fn() -> u64,
    feed: &Arc<Feed>,
    interrupts: &Interrupts,
) -> Result<SourceReport, Failure> {
    let session = Arc::new(SourceSession::new().map_err(Failure::from)?);
    let measured = Arc::clone(&session);
    feed.measure(move || Rates::of(&measured.status()));
    let config = SourceConfig {
        settings,
        limits: Limits {
            give_up_after: Some(GIVE_UP_AFTER),
            ..Limits::default()
        },
        ..SourceConfig::default()
    };
    let now = Arc::new(Mutex::new(Phase::Setup));
    let observer = Phases {
        feed: Arc::clone(feed),
        now: Arc::clone(&now),
    };
    let outcome = send_away(vm, child.address(), config, &session, observer)?;
    let answers = Answers {
        switched_over: &|| has_switched_over(*now.lock().unwrap_or_else(PoisonError::into_inner)),
        cancel: &|_| {
            feed.note("cancelling");
            session.cancel();
        },
        finishing: &|| feed.note(FINISHING),
        hangup_cancels: true,
    };
    let mut stops = StopRequests::new(interrupts, None);
    match wait_for_outcome(&outcome, &mut stops, &answers) {
        Ok(Ok(report)) => interrupts.check().map(|()| report),
        Ok(Err((SourceVm::Runs, failure))) => {
            let ran_on = runs_on(progress, interrupts);
            Err(child.explain(failure).and(ran_on))
        }
        Ok(Err((SourceVm::GivenUp | SourceVm::Forced, failure))) => Err(child.explain(failure)),
        Err(none) => Err(none.failure(ABANDONED_AT_SOURCE)),
    }
}

/// Whether the guest makes progress after a failed migration, in words.
fn runs_on(progress: &dyn Fn() -> u64, interrupts: &Interrupts) -> &'static str {
    let before = progress();
    let deadline = Instant::now() + Duration::from_secs(2);
    let seen = interrupts.count();
    while Instant::now() < deadline && interrupts.count() == seen {
        if progress() > before {
            return "seen to run on; the demo ends it";
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    "not seen to run on; the demo ends it"
}

/// Waits until every vCPU has visited, and so checked, all its pages at the destination.
fn wait_for_guest(child: &mut Child, feed: &Feed, interrupts: &Interrupts) -> Result<(), Failure> {
    feed.step("guest verifies");
    let numbers = |status: &Value, key: &str| -> Vec<u64> {
        let list = status["guest"][key].as_array();
        list.map(|l| l.iter().map(|v| v.as_u64().unwrap_or(0)).collect())
            .unwrap_or_default()
    };
    let first = child.ask(&Request::Status {}, ASK_LIMIT, interrupts)?;
    // The pass in which the VM came began elsewhere. The next one runs here from end to end.
    let goals: Vec<u64> = numbers(&first, "pass")
        .iter()
        .map(|pass| pass + 2)
        .collect();
    let start: u64 = numbers(&first, "pages_done").iter().sum();
    let share_pages = first["memory_bytes"].as_u64().unwrap_or(0) / pageferry_addr::PAGE_SIZE;
    let (mut last, mut moved) = (start, Instant::now());
    loop {
        let status = child.ask(&Request::Status {}, ASK_LIMIT, interrupts)?;
        if let Some(why) = status["failures"].as_array().and_then(|f| f.first()) {
            return Err(Failure::new(
                Exit::Guest,
                format!("the guest cannot go on at the destination: {why}"),
            ));
        }
        let done: u64 = numbers(&status, "pages_done").iter().sum();
        feed.at((done - start).min(share_pages * 2), share_pages * 2);
        let passes = numbers(&status, "pass");
        if !passes.is_empty() && passes.iter().zip(&goals).all(|(pass, goal)| pass >= goal) {
            return Ok(());
        }
        if done != last {
            (last, moved) = (done, Instant::now());
        } else if moved.elapsed() > STUCK {
            let message = format!(
                "the guest makes no progress at the destination: still {done} pages after {} s",
                STUCK.as_secs()
            );
            return Err(Failure::new(Exit::Guest, message));
        }
        std::thread::sleep(Interrupts::POLL);
    }
}
