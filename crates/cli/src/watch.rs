//! `pageferry watch`: what a migration of a VM on this host does, again and again.

use crate::args::WatchArgs;
use crate::control::client::ask;
use crate::control::protocol::Request;
use crate::exit::Failure;
use crate::output;
use crate::signals::Interrupts;
use crate::size::human;
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
    let mut before: Option<Look> = None;
    loop {
        let status = match ask(&args.vm.socket, &Request::Status, LIMIT, interrupts) {
            Ok(status) => status,
            // The source's process ends once the VM has left.
            Err(_) if before.is_some() => {
                let over = !interrupts.any() && !args.json;
                end_line(refreshes);
                if over {
                    output::note("the VM's process has ended");
                }
                return Ok(());
            }
            Err(failure) => return Err(failure),
        };
        let look = Look::at(&status);
        if args.json {
            output::json_line(&look.json(&status));
        } else {
            let line = look.line(&status, before.as_ref());
            let (start, end) = if refreshes {
                ("\r\x1b[K", "")
            } else {
                ("", "\n")
            };
            output::result(&format!("{start}{line}{end}"));
        }
        let is_over = !matches!(
            status["state"].as_str(),
            Some("waiting" | "arriving" | "leaving")
        );
        before = Some(look);
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

/// A status, and when it was asked for.
struct Look {
    at: Instant,
    page_bytes: u64,
}

impl Look {
    fn at(status: &Value) -> Self {
        Self {
            at: Instant::now(),
            page_bytes: status["session"]["page_bytes"].as_u64().unwrap_or(0),
        }
    }

    fn json(&self, status: &Value) -> Value {
        json!({
            "at": wall_clock::now(),
            "state": status["state"],
            "phase": status["phase"],
            "missing": status["missing"],
            "session": status["session"],
        })
    }

    /// The essentials in one line.
    fn line(&self, status: &Value, before: Option<&Self>) -> String {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let mut parts = vec![match (text(&status["state"]), text(&status["phase"])) {
            (Some(state), Some(phase)) => format!("{state}: {phase}"),
            (state, _) => state.unwrap_or_default(),
        }];
        let session = &status["session"];
        if let (Some(left), Some(stage)) = (session["pages_left"].as_u64(), text(&session["stage"]))
        {
            parts.push(format!("session {stage}"));
            parts.push(format!("{left} pages to go"));
            parts.push(format!("{} of pages", human(self.page_bytes)));
        }
        if let Some(before) = before {
            let took = (self.at - before.at).as_secs_f64();
            let bytes = self.page_bytes.saturating_sub(before.page_bytes);
            parts.push(format!("{}/s", human((bytes as f64 / took) as u64)));
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
                "page_bytes": 3 << 20,
                "waiting_faults": 2,
                "lost_for_ms": 4321,
                "last_loss": "it broke",
            },
        });
        let look = Look::at(&status);
        let before = Look {
            at: look.at - Duration::from_secs(1),
            page_bytes: 1 << 20,
        };
        let line = look.line(&status, Some(&before));
        assert_eq!(
            line,
            "arriving: post-copy, session running, 12 pages to go, 3 MiB of pages, 2 MiB/s, \
             2 vCPUs wait, no connection for 4 s: it broke"
        );
        assert_eq!(look.line(&json!({"state": "running"}), None), "running");
    }
}
