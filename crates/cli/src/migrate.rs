//! `pageferry migrate`: asks a VM on this host to move.

use crate::args::MigrateArgs;
use crate::bridge::Vmm;
use crate::control::client::{Client, ask};
use crate::control::options::MigrateOptions;
use crate::control::protocol::{ErrorLine, Event, Request, SessionEvent};
use crate::exit::{Exit, Failure};
use crate::output;
use crate::progress::{Display, Feed, Rates, Update};
use crate::report::{Protection, Report};
use crate::signals::Interrupts;
use crate::wall_clock;
use serde::Deserialize;
use serde_json::json;
use std::cell::Cell;
use std::time::Duration;

/// The longest migration that this command watches to the end.
const LIMIT: Duration = Duration::from_secs(24 * 3600);
/// The longest wait for the answer to a request to cancel.
const CANCEL_LIMIT: Duration = Duration::from_secs(5);
/// The longest wait for the answer to a check. A name that does not resolve takes the longest.
const CHECK_LIMIT: Duration = Duration::from_secs(60);

/// Requests the migration, then shows its progress and its result.
///
/// # Errors
/// The failure that the VM's process reports.
pub(crate) fn migrate(args: &MigrateArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    if let Some(vmm) = Vmm::of(args.vm.vm.as_deref())? {
        return vmm.migrate(args, interrupts);
    }
    if args.preserve_source {
        let why = "--preserve-source is for VMs of Cloud Hypervisor: give --vm ch:API_SOCKET";
        return Err(Failure::new(Exit::Usage, why));
    }
    if args.check {
        return check(args, interrupts);
    }
    let path = &args.vm.path()?;
    let mut client = Client::connect(path)?;
    let request = Request::Migrate {
        to: args.to.to_string(),
        precopy_passes: args.source.precopy_passes,
        options: Box::new(options(args)),
    };
    let feed = Feed::new();
    let display = Display::start(&feed);
    let (served, stopped_watching) = (Cell::new(0), Cell::new(false));
    let stop = || {
        if interrupts.count() == served.get() {
            return false;
        }
        // Two that came at once are answered one after the other: the first cancels.
        served.set(served.get() + 1);
        if served.get() > 1 {
            stopped_watching.set(true);
            return true;
        }
        match ask(
            path,
            &Request::cancel(),
            CANCEL_LIMIT,
            &Interrupts::default(),
        ) {
            Ok(_) => feed.note("cancelling"),
            Err(why) => feed.note(format!(
                "{why}; waiting for the rest (again: stop watching)"
            )),
        }
        false
    };
    let mut show = |event| {
        if args.events {
            output::json_line(&json!({"at": wall_clock::now(), "event": event}));
        }
        show_on(&feed, event);
    };
    let answer = client.call(&request, LIMIT, &stop, &mut show);
    display.finish();
    if stopped_watching.get() {
        let message = format!(
            "stopped watching; the migration may still be under way: `pageferry status --vm {}` shows its state",
            path.display()
        );
        return Err(Failure::new(Exit::Cancelled, message));
    }
    if let Err(failure) = &answer
        && args.events
    {
        let error = ErrorLine::from(failure);
        output::json_line(&json!({"at": wall_clock::now(), "error": error}));
    }
    let report: Report = serde_json::from_value(answer?)
        .map_err(|e| Failure::new(Exit::NoVm, format!("the VM's report is not readable: {e}")))?;
    show_report(&report, args);
    Ok(())
}

/// Shows the record of a migration that has succeeded.
pub(crate) fn show_report(report: &Report, args: &MigrateArgs) {
    if args.events {
        output::json_line(&json!({"at": wall_clock::now(), "result": report.json()}));
    } else if args.json {
        output::json(&report.json());
    } else {
        output::result(&format!(
            "{}\n{}",
            report.arrival(&args.to),
            report.table(args.details.verbose)
        ));
    }
}

/// Checks the way to the destination, and says what was checked.
fn check(args: &MigrateArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let request = Request::Check {
        to: args.to.to_string(),
        options: Box::new(options(args)),
    };
    let answer = ask(&args.vm.path()?, &request, CHECK_LIMIT, interrupts)?;
    if args.json {
        output::json(&answer);
        return Ok(());
    }
    let protection = Protection::deserialize(&answer)
        .map_err(|e| Failure::new(Exit::NoVm, format!("the VM's answer is not readable: {e}")))?;
    output::result(&format!(
        "{} can take the VM: protocol version {}, {protection}; nothing was moved\n",
        answer["peer"].as_str().unwrap_or_default(),
        protection.version
    ));
    Ok(())
}

/// Shows an event to people.
fn show_on(feed: &Feed, event: Event) {
    match event {
        Event::Phase(phase) => feed.put(Update::Phase(phase.into())),
        Event::Progress { done, total } => feed.at(done, total),
        Event::Allocated { done, total } => feed.put(Update::Allocated { done, total }),
        Event::Session(SessionEvent::Rates {
            page_rate,
            time_left_ms,
            ..
        }) => {
            let rates = (page_rate > 0).then(|| Rates {
                bytes: page_rate,
                left: time_left_ms.map(Duration::from_millis),
            });
            feed.measure(move || rates);
        }
        Event::Session(SessionEvent::Stage(_) | SessionEvent::PassEnded { .. }) => {}
        Event::Session(SessionEvent::Lost { why, .. }) => {
            let why = why.unwrap_or_default();
            feed.note(format!("the connections broke, opening new ones: {why}"));
        }
        Event::Session(SessionEvent::Reconnected { .. }) => feed.note("connected again"),
        Event::Note(text) => feed.note(text),
    }
}

/// The options of the request, beside its destination.
pub(crate) fn options(args: &MigrateArgs) -> MigrateOptions {
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    MigrateOptions {
        channels: Some(args.channels.channels),
        urgent_channels: Some(args.channels.urgent_channels),
        queue_us: Some(args.channels.queue.as_micros() as u64),
        track: Some(args.channels.track.clone()),
        dead_after_ms: args.limits.dead_after.map(ms),
        give_up_after_ms: args.limits.give_up_after.map(ms),
        tls: args.tls.options(),
        insecure: args.tls.insecure,
        cpus: args.cpus.cpus.as_ref().map(ToString::to_string),
        settings: crate::set::change(&args.change),
    }
}
