//! `pageferry pager watch`: what the restores of a pager do, again and again.

use super::args::{ReportArgs, WatchArgs};
use super::http::{self, Got};
use crate::exit::{Exit, Failure};
use crate::output;
use crate::signals::Interrupts;
use pageferry_charts::time;
use pageferry_harness::size::human;
use serde_json::Value;
use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

/// The interval between two tables.
const INTERVAL: Duration = Duration::from_secs(1);

/// Shows the restores until Ctrl-C, or until nobody reads any more. With `--json` it shows events
/// instead.
///
/// # Errors
/// When the pager cannot be reached, or ends.
pub(super) fn watch(args: &WatchArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let api = args.api.path();
    if args.json {
        return events(&api, interrupts);
    }
    let refreshes = std::io::stdout().is_terminal();
    let mut before: Option<(Instant, Value)> = None;
    loop {
        let now = http::ask(&api, "GET", "/restores", String::new(), interrupts);
        let now = match now {
            Err(why) if why.exit == Exit::Cancelled => return Ok(()),
            answer => answer?,
        };
        let at = Instant::now();
        let since = before
            .as_ref()
            .map(|(then, old)| (at.duration_since(*then), old));
        let clear = if refreshes { "\x1b[H\x1b[2J" } else { "" };
        output::result(&format!("{clear}{}", table(&now, since)));
        before = Some((at, now));
        while at.elapsed() < INTERVAL {
            if interrupts.any() || output::is_lost() {
                return Ok(());
            }
            std::thread::sleep(Interrupts::POLL);
        }
    }
}

/// Shows events as they come, one JSON object a line.
fn events(api: &Path, interrupts: &Interrupts) -> Result<(), Failure> {
    let mut after = 0;
    loop {
        let target = format!("/events?after={after}");
        let got = match http::get(api, &target, interrupts) {
            Err(why) if why.exit == Exit::Cancelled => return Ok(()),
            answer => answer?,
        };
        let Got::Text(lines) = got else {
            return Err(Failure::new(
                Exit::Protocol,
                "the pager's events are not readable",
            ));
        };
        for line in lines.lines() {
            let event: Value = serde_json::from_str(line)
                .map_err(|why| Failure::new(Exit::Protocol, format!("an event: {why}")))?;
            after = event["number"].as_u64().unwrap_or(after);
            output::json_line(&event);
        }
        if output::is_lost() {
            return Ok(());
        }
    }
}

/// `pageferry pager report`.
///
/// # Errors
/// When the pager cannot be reached, has no such restore, or the file cannot be written.
pub(super) fn report(args: &ReportArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let target = format!("/restores/{}/report", args.name);
    let Got::Text(page) = http::get(&args.api.path(), &target, interrupts)? else {
        return Err(Failure::new(
            Exit::Protocol,
            "the pager's report is not readable",
        ));
    };
    match &args.output {
        None => output::result(&page),
        Some(file) => std::fs::write(file, page).map_err(|why| {
            let file = file.display();
            Failure::new(
                Exit::Usage,
                format!("cannot write the report to {file}: {why}"),
            )
        })?,
    }
    Ok(())
}

/// One line a restore. `before` are the restores some time ago.
fn table(now: &Value, before: Option<(Duration, &Value)>) -> String {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let heads = [
        "there", "missing", "ahead", "waits", "faults/s", "p99", "errors",
    ];
    let mut lines = row("restore", "phase", &heads.map(str::to_owned));
    for restore in list(now) {
        let vm = &restore["vm"];
        let number = |key: &str| vm[key].as_u64().unwrap_or(0);
        let bytes = |pages: u64| human(pages * number("page_bytes"));
        let old = before.and_then(|(took, old)| {
            let old = list(old)
                .into_iter()
                .find(|old| old["id"] == restore["id"])?;
            Some((took, faults(&old["vm"])))
        });
        let rate = old.map_or_else(String::new, |(took, old)| {
            let new = faults(vm).saturating_sub(old);
            format!("{:.0}", new as f64 / took.as_secs_f64())
        });
        let p99 = WAYS.iter().filter_map(|way| vm[way]["p99"].as_u64()).max();
        let text = |key: &str| restore[key].as_str().unwrap_or_default().to_owned();
        let figures = [
            bytes(number("resident")),
            bytes(number("missing")),
            bytes(number("replayed") + number("background")),
            number("waiting").to_string(),
            rate,
            p99.map_or_else(String::new, |ns| time(ns as f64 / 1e3)),
            number("source_errors").to_string(),
        ];
        lines += &row(&text("id"), &text("phase"), &figures);
    }
    lines
}

/// A line of at most 80 columns. A long name has one of its own.
fn row(name: &str, phase: &str, figures: &[String; 7]) -> String {
    let name = match name.len() > NAME {
        true => format!("{name}\n{:NAME$}", ""),
        false => format!("{name:<NAME$}"),
    };
    let [there, missing, ahead, waiting, rate, p99, errors] = figures;
    format!(
        "{name} {phase:<7} {there:>8} {missing:>8} {ahead:>8} {waiting:>5} {rate:>8} {p99:>8} \
         {errors:>6}\n"
    )
}

/// The columns of a name.
const NAME: usize = 14;
const WAYS: [&str; 3] = ["zero_faults", "at_hand_faults", "read_faults"];

fn faults(vm: &Value) -> u64 {
    WAYS.iter()
        .filter_map(|way| vm[way]["faults"].as_u64())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_line_has_at_most_80_columns_and_all_of_its_name() {
        let vm = |faults: u64| {
            let times = json!({ "faults": faults, "p99": 999_940_000 });
            json!({
                "page_bytes": 1 << 20, "resident": 1023, "missing": 1023, "replayed": 1023,
                "background": 0, "waiting": 65536, "source_errors": 999_999,
                "zero_faults": times, "at_hand_faults": times, "read_faults": times,
            })
        };
        let long = "x".repeat(64);
        let list = |faults| {
            let status = |id: &str| json!({ "id": id, "phase": "serving", "vm": vm(faults) });
            Value::from(vec![status("a-name-of-14.c"), status(&long)])
        };
        let lines = table(&list(9_999_999), Some((Duration::from_secs(1), &list(0))));
        assert_eq!(lines.lines().count(), 4, "{lines}");
        for line in lines.lines() {
            assert!(line.len() <= 80, "{} columns: {line}", line.len());
        }
        assert!(
            lines.contains("\na-name-of-14.c serving 1023 MiB"),
            "{lines}"
        );
        assert!(lines.contains(&format!("\n{long}\n")), "{lines}");
    }
}
