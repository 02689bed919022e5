//! `pageferry watch`: what a migration of a VM on this host does, again and again.

use crate::args::WatchArgs;
use crate::control::client::ask;
use crate::control::protocol::Request;
use crate::exit::Failure;
use crate::output;
use crate::signals::Interrupts;
use crate::status::progress;
use crate::wall_clock;
use serde_json::{Value, json};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// The longest wait for an answer.
const LIMIT: Duration = Duration::from_secs(15);
/// The interval between two lines.
const LINE_EVERY: Duration = Duration::from_secs(1);
/// The interval at which a line on a terminal is refreshed.
const REFRESH_EVERY: Duration = Duration::from_millis(250);

/// Shows the migration until it ends, the time is over, or Ctrl-C.
///
/// # Errors
/// When there is no VM at the socket.
pub(crate) fn watch(args: &WatchArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let refreshes = !args.json && std::io::stdout().is_terminal();
    let interval = if refreshes { REFRESH_EVERY } else { LINE_EVERY };
    let until = args.for_time.map(|time| Instant::now() + time);
    let mut seen = false;
    loop {
        let status = match ask(&args.vm.path()?, &Request::Status {}, LIMIT, interrupts) {
            Ok(status) => status,
            // The source's process ends once the VM has left.
            Err(_) if seen => {
                let over = !interrupts.any() && !args.json;
                end_line(refreshes);
                if over {
                    output::note("the VM's process has ended");
                }
                return Ok(());
            }
            Err(failure) => return Err(failure),
        };
        if args.json {
            output::json_line(&json_line(&status));
        } else {
            let line = line(&status);
            let (start, end) = if refreshes {
                ("\r\x1b[K", "")
            } else {
                ("", "\n")
            };
            output::result(&format!("{start}{line}{end}"));
        }
        // Nobody sees the rest.
        if output::is_lost() {
            return Ok(());
        }
        let is_over = !matches!(
            status["state"].as_str(),
            Some("waiting" | "arriving" | "leaving" | "carrying")
        );
        seen = true;
        let next = Instant::now() + interval;
        let late = until.is_some_and(|until| next > until);
        if is_over || late || !pause_until(next, interrupts) {
            end_line(refreshes);
            return Ok(());
        }
    }
}

fn end_line(refreshes: bool) {
    if refreshes {
        output::result("\n");
    }
}

/// Returns false on Ctrl-C.
fn pause_until(next: Instant, interrupts: &Interrupts) -> bool {
    while Instant::now() < next {
        if interrupts.any() {
            return false;
        }
        std::thread::sleep(Interrupts::POLL);
    }
    true
}

fn json_line(status: &Value) -> Value {
    json!({
        "at": wall_clock::now(),
        "state": status["state"],
        "phase": status["phase"],
        "missing": status["missing"],
        "session": status["session"],
        "tunnel": status["tunnel"],
    })
}

/// The essentials in one line.
fn line(status: &Value) -> String {
    if status["tunnel"].is_object() {
        return crate::tunnel::line(&status["tunnel"]);
    }
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let mut parts = vec![match (text(&status["state"]), text(&status["phase"])) {
        (Some(state), Some(phase)) => format!("{state}: {phase}"),
        (state, _) => state.unwrap_or_default(),
    }];
    let session = &status["session"];
    if let (Some(left), Some(stage)) = (session["pages_left"].as_u64(), text(&session["stage"])) {
        parts.push(format!("session {stage}"));
        parts.push(format!("{left} pages to go"));
        parts.push(progress(session));
    }
    if let Some(note) = text(&session["note"]) {
        parts.push(note);
    }
    if let Some(waiting @ 1..) = session["waiting_faults"].as_u64() {
        parts.push(format!("{waiting} vCPUs wait"));
    }
    if let Some(ms) = session["lost_for_ms"].as_u64() {
        let why = text(&session["last_loss"]).unwrap_or_default();
        parts.push(format!("no connection for {} s: {why}", ms / 1000));
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_what_matters() {
        let status = json!({
            "state": "arriving",
            "phase": "post-copy",
            "session": {
                "stage": "running",
                "pages_left": 12,
                "bytes_left": 12 << 12,
                "page_bytes": 3 << 20,
                "page_rate": 2 << 20,
                "dirty_rate": null,
                "time_left_ms": 1200,
                "waiting_faults": 2,
                "lost_for_ms": 4321,
                "last_loss": "it broke",
            },
        });
        assert_eq!(
            line(&status),
            "arriving: post-copy, session running, 12 pages to go, 3 MiB of pages, 48 KiB to go, \
             2 MiB/s, 2 s left, 2 vCPUs wait, no connection for 4 s: it broke"
        );
        assert_eq!(line(&json!({"state": "running"})), "running");
    }
}
