//! The states and events of tunnels, for people, as JSON and for Prometheus.

use pageferry_bridge::tunnel::{Event, Failure, SessionState};
use pageferry_harness::size::human;
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::Duration;

/// What a cut would cost.
pub(super) const IN_DOUBT: &str = "the VMM here has sent all it had and waits, so the destination \
may run the VM, and with the streams cut it may run here too. See that it runs at one host only, \
then `pageferry cancel --force`";

pub(super) fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A session as JSON.
pub(super) fn json(state: &SessionState) -> Value {
    let (sent, received) = state.bytes();
    let streams: Vec<Value> = state
        .streams
        .iter()
        .map(|stream| {
            json!({
                "number": stream.number,
                "kind": stream.kind.name(),
                "sent_bytes": stream.sent,
                "received_bytes": stream.received,
                "kept_bytes": stream.kept,
                "over": stream.over,
            })
        })
        .collect();
    json!({
        "route": state.route.as_str(),
        "session": state.session,
        "peer": state.peer,
        "streams": streams,
        "sent_bytes": sent,
        "received_bytes": received,
        "rate": state.rate,
        "connections": state.links.0,
        "connections_wanted": state.links.1,
        "kept_bytes": state.kept.0,
        "waiting_bytes": state.kept.1,
        "most_kept_bytes": state.most_kept,
        "lost_for_ms": state.lost_for.map(ms),
        "last_loss": state.last_loss,
        "losses": state.losses,
        "longest_loss_ms": ms(state.longest_loss),
        "in_doubt": state.in_doubt,
        "runs_for_ms": ms(state.runs_for),
    })
}

/// The name of an event and what belongs to it.
pub(super) fn event(event: &Event) -> Value {
    match event {
        Event::Began => json!("began"),
        Event::Opened(stream) => json!({ "opened": { "stream": stream } }),
        Event::Unopened(stream, why) => json!({ "unopened": { "stream": stream, "why": why } }),
        Event::Unreached(why) => json!({ "unreached": { "why": why } }),
        Event::Lost(why) => json!({ "lost": { "why": why } }),
        Event::Back(after) => json!({ "back": { "after_ms": ms(*after) } }),
        Event::Held(why) => json!({ "held": { "why": why.to_string() } }),
        Event::Ended => json!("ended"),
        Event::Failed(why) => json!({ "failed": { "why": why.to_string() } }),
        Event::Stranger(who) => json!({ "stranger": { "who": who } }),
        _ => Value::Null,
    }
}

/// What people are told of an event at once. Results come by themselves.
pub(super) fn told(session: Option<&SessionState>, event: &Event) -> Option<String> {
    let route = session
        .map(|state| state.route.as_str())
        .unwrap_or_default();
    Some(match event {
        Event::Opened(1) => format!("{route}: a migration begins"),
        Event::Unopened(stream, why) => {
            format!("{route}: stream {stream} cannot be opened, and ends: {why}")
        }
        Event::Unreached(why) => format!("{route}: {why}; trying again"),
        Event::Lost(why) => format!("{route}: the connections broke, opening new ones: {why}"),
        Event::Back(after) => format!("{route}: connected again after {} ms", after.as_millis()),
        Event::Held(why) => format!("{route}: {why}; but {IN_DOUBT}"),
        Event::Stranger(who) => format!("refused a stranger: {who}"),
        _ => return None,
    })
}

/// The result of a migration as JSON.
pub(super) fn result(state: &SessionState, failure: Option<&Failure>) -> Value {
    let mut value = json(state);
    value["error"] = failure.map(ToString::to_string).into();
    value
}

/// The result of a migration, for people.
pub(super) fn summary(state: &SessionState, failure: Option<&Failure>) -> String {
    let mut text = about(state);
    let end = match failure {
        None => "all streams have ended".to_owned(),
        Some(why) => format!("failed: {why}"),
    };
    let seconds = state.runs_for.as_secs_f64();
    // Writing to a string cannot fail.
    let _ = write!(text, ", {seconds:.1} s");
    if state.losses > 0 {
        let longest = state.longest_loss.as_secs_f64();
        let _ = write!(
            text,
            ", connections lost {} times, for {longest:.1} s at most",
            state.losses
        );
    }
    format!("{text}: {end}\n")
}

fn about(state: &SessionState) -> String {
    let (sent, received) = state.bytes();
    let count = state.streams.len();
    let s = if count == 1 { "" } else { "s" };
    format!(
        "{}: {count} stream{s}, {} sent, {} received",
        state.route,
        human(sent),
        human(received)
    )
}

/// The status of a tunnel in one line.
pub(crate) fn line(tunnel: &Value) -> String {
    let sessions = tunnel["sessions"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    if sessions.is_empty() {
        return tunnel["about"].as_str().unwrap_or_default().to_owned();
    }
    let lines: Vec<String> = sessions.iter().map(session).collect();
    lines.join("; ")
}

/// A session in one line.
fn session(session: &Value) -> String {
    let number = |key: &str| session[key].as_u64().unwrap_or(0);
    let mut text = format!(
        "{}: {} sent, {} received",
        session["route"].as_str().unwrap_or_default(),
        human(number("sent_bytes")),
        human(number("received_bytes")),
    );
    if number("rate") > 0 {
        let _ = write!(text, ", {}/s", human(number("rate")));
    }
    if session["in_doubt"] == true {
        text.push_str(", the destination may run the VM");
    }
    if let Some(ms) = session["lost_for_ms"].as_u64() {
        let _ = write!(text, ", no connection for {} s", ms / 1000);
        if let Some(why) = session["last_loss"].as_str() {
            let _ = write!(text, ": {why}");
        }
    }
    text
}

/// The status of a tunnel as a table.
pub(crate) fn table(status: &Value) -> String {
    let tunnel = &status["tunnel"];
    let mut text = String::new();
    let mut row = |name: &str, value: &str| {
        let _ = writeln!(text, "  {name:<12}{value}");
    };
    row("tunnel", tunnel["about"].as_str().unwrap_or_default());
    for one in tunnel["sessions"].as_array().into_iter().flatten() {
        row("session", &session(one));
        let peer = one["peer"].as_str().unwrap_or("nobody yet");
        let connections = format!(
            "{} of {} with {peer}, lost {} times",
            one["connections"], one["connections_wanted"], one["losses"]
        );
        row("", &connections);
        for stream in one["streams"].as_array().into_iter().flatten() {
            let number = |key: &str| stream[key].as_u64().unwrap_or(0);
            let end = if stream["over"] == true {
                ", ended"
            } else {
                ""
            };
            let text = format!(
                "{} ({}): {} sent, {} received{end}",
                number("number"),
                stream["kind"].as_str().unwrap_or_default(),
                human(number("sent_bytes")),
                human(number("received_bytes")),
            );
            row("stream", &text);
        }
    }
    let seconds = status["uptime_ms"].as_u64().unwrap_or(0) / 1000;
    row("process", &format!("{}, for {seconds} s", status["pid"]));
    text
}
