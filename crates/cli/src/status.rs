//! `pageferry status`, `pause`, `resume`, `verify`, `quit`: short requests to a VM on this host.

use crate::args::{StatusArgs, VmArgs};
use crate::control::client::ask;
use crate::control::protocol::Request;
use crate::exit::{Exit, Failure};
use crate::output;
use crate::report::{Protection, Verified};
use crate::signals::Interrupts;
use pageferry_harness::size::human;
use serde::Deserialize;
use serde_json::Value;
use std::fmt::Write;
use std::time::Duration;

/// The longest wait for a short answer. A pause may take a while.
const LIMIT: Duration = Duration::from_secs(15);
/// The longest wait for a verification. It checks about 1 GiB a second; this fits the largest VM.
const VERIFY_LIMIT: Duration = Duration::from_secs(3600);

/// Shows the state of the VM.
///
/// # Errors
/// When there is no VM.
pub(crate) fn status(args: &StatusArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let status = ask(&args.vm.path()?, &Request::Status {}, LIMIT, interrupts)?;
    if args.json {
        output::json(&status);
    } else if status["tunnel"].is_object() {
        output::result(&crate::tunnel::table(&status));
    } else {
        output::result(&table(&status));
    }
    Ok(())
}

/// Pauses the VM.
///
/// # Errors
/// When there is no VM, or it cannot be paused now.
pub(crate) fn pause(args: &VmArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    ask(&args.path()?, &Request::Pause {}, LIMIT, interrupts)?;
    output::result("paused\n");
    Ok(())
}

/// Resumes the VM.
///
/// # Errors
/// When there is no VM, or it must not run.
pub(crate) fn resume(args: &VmArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    ask(&args.path()?, &Request::Resume {}, LIMIT, interrupts)?;
    output::result("running\n");
    Ok(())
}

/// Verifies the VM's memory.
///
/// # Errors
/// [`Exit::Verification`] when a page is wrong.
pub(crate) fn verify(args: &VmArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let answer = ask(&args.path()?, &Request::Verify {}, VERIFY_LIMIT, interrupts)?;
    let verified: Verified = serde_json::from_value(answer)
        .map_err(|e| Failure::new(Exit::NoVm, format!("the VM's answer is not readable: {e}")))?;
    if !verified.holds() {
        return Err(Failure::new(
            Exit::Verification,
            format!("verification failed: {}", verified.words),
        ));
    }
    output::result(&format!("both verifications hold: {}\n", verified.words));
    Ok(())
}

/// Ends the VM.
///
/// # Errors
/// When there is no VM.
pub(crate) fn quit(args: &VmArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    ask(&args.path()?, &Request::Quit {}, LIMIT, interrupts)?;
    output::result("ending\n");
    Ok(())
}

/// A session's bytes, its rates and its time left, in one line.
pub(crate) fn progress(session: &Value) -> String {
    let bytes = |key: &str| session[key].as_u64();
    let mut parts = Vec::new();
    if let Some(done) = bytes("page_bytes") {
        parts.push(format!("{} of pages", human(done)));
    }
    if let Some(left) = bytes("bytes_left") {
        parts.push(format!("{} to go", human(left)));
    }
    if let Some(rate) = bytes("page_rate") {
        parts.push(format!("{}/s", human(rate)));
    }
    if let Some(rate) = bytes("dirty_rate") {
        parts.push(format!("{}/s dirtied in pre-copy", human(rate)));
    }
    if let Some(rate) = bytes("link_rate") {
        parts.push(format!("{}/s acknowledged in it", human(rate)));
    }
    if let Some(ms @ 1..) = bytes("time_left_ms") {
        parts.push(format!("{} s left", ms.div_ceil(1000)));
    }
    if let Some(us) = bytes("blackout_forecast_us")
        && session["stage"] == "pre-copy"
    {
        parts.push(format!("blackout of {:.1} ms expected", us as f64 / 1e3));
    }
    parts.join(", ")
}

/// The settings of a migration, in one line.
pub(crate) fn settings(settings: &Value) -> String {
    let mut parts = Vec::new();
    if let Some(switch) = settings["switch"].as_str() {
        parts.push(format!("switch-over: {switch}"));
    }
    if let Some(ms) = settings["max_blackout_ms"].as_u64() {
        parts.push(format!("blackout up to {ms} ms"));
    }
    for (key, name) in [
        ("max_bandwidth", "all pages"),
        ("max_postcopy_bandwidth", "the push in post-copy"),
    ] {
        if let Some(rate) = settings[key].as_u64() {
            parts.push(format!("{name} up to {}/s", human(rate)));
        }
    }
    parts.join(", ")
}

/// A status as a table.
fn table(status: &Value) -> String {
    let mut out = String::new();
    let mut row = |name: &str, value: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "  {name:<12}{value}");
    };
    let text = |value: &Value| {
        value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned)
    };
    let mut state = text(&status["state"]);
    for (key, before) in [
        ("phase", ": "),
        ("to", " for "),
        ("missing", ", missing pages: "),
    ] {
        if !status[key].is_null() {
            state.push_str(&format!("{before}{}", text(&status[key])));
        }
    }
    if status["paused"] == true && state != "paused" {
        state.push_str(", paused by its owner");
    }
    row("state", state);
    let session = &status["session"];
    if let Some(stage) = session["stage"].as_str() {
        let link = match session["lost_for_ms"].as_u64() {
            Some(ms) => format!("no connection for {} s", ms / 1000),
            None => format!("generation {}", text(&session["generation"])),
        };
        let left = text(&session["pages_left"]);
        let lost = match session["channels_lost"].as_u64() {
            None | Some(0) => String::new(),
            Some(1) => ", 1 channel lost so far".into(),
            Some(lost) => format!(", {lost} channels lost so far"),
        };
        row(
            "session",
            format!("{stage}, {link}, {left} pages to go{lost}"),
        );
        row("pages", progress(session));
        if let Ok(protection) = Protection::deserialize(session) {
            let version = protection.version;
            row(
                "channels",
                format!("{protection}, protocol version {version}"),
            );
        }
        if session["settings"].is_object() {
            row("settings", settings(&session["settings"]));
        }
        if let Some(note) = session["note"].as_str() {
            row("pre-copy", note.to_owned());
        }
        if let Some(why) = session["last_loss"].as_str() {
            row("last loss", why.to_owned());
        }
    }
    if let (Some(engine), Some(memory)) =
        (status["engine"].as_str(), status["memory_bytes"].as_u64())
    {
        row(
            "machine",
            format!(
                "{} vCPUs, {} of {}, on {engine}",
                text(&status["vcpus"]),
                human(memory),
                text(&status["backing"])
            ),
        );
    }
    if let Some(large) = status["engine_large_bytes"].as_u64() {
        row(
            "large pages",
            format!("{} of guest memory, by the engine", human(large)),
        );
    }
    if let (Some(delivery), Some(because)) = (
        status["delivery"].as_str(),
        status["delivery_because"].as_str(),
    ) {
        row("delivery", format!("{delivery} ({because})"));
    }
    let numbers = |value: &Value| -> Option<Vec<u64>> {
        value.as_array()?.iter().map(Value::as_u64).collect()
    };
    if let Some(done) = numbers(&status["guest"]["pages_done"]) {
        let passes = numbers(&status["guest"]["pass"]).unwrap_or_default();
        let least = passes.iter().min().copied().unwrap_or(0);
        row(
            "guest",
            format!(
                "{} pages rewritten, every vCPU in pass {least} or later",
                done.iter().sum::<u64>()
            ),
        );
        row("errors", text(&status["guest"]["errors"]));
    }
    if let Some(total) = status["overhead_bytes"]["total"].as_u64() {
        row("overhead", format!("{} beyond guest memory", human(total)));
    }
    if let Some(failures) = status["failures"].as_array().filter(|f| !f.is_empty()) {
        failures
            .iter()
            .for_each(|failure| row("failure", text(failure)));
    }
    for (key, name, what) in [
        ("lost_lines", "stderr", "lines lost: nobody took them"),
        (
            "lost_console_bytes",
            "console",
            "bytes dropped: its reader took nothing",
        ),
        (
            "defects",
            "defects",
            "panics of the process; please report them",
        ),
    ] {
        if let Some(count @ 1..) = status[key].as_u64() {
            row(name, format!("{count} {what}"));
        }
    }
    row(
        "process",
        format!(
            "{}, for {} s",
            text(&status["pid"]),
            status["uptime_ms"].as_u64().unwrap_or(0) / 1000
        ),
    );
    out
}
