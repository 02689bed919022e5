//! The report as a table.

use super::Report;
use pageferry_charts::time;
use pageferry_harness::size::human;
use std::fmt::Write;

/// Two columns. With `verbose` they have all that is known, and a histogram of the stalls in
/// characters follows.
pub(super) fn show(report: &Report, verbose: bool) -> String {
    let (rows, width) = match verbose {
        true => (rows(report), 22),
        false => (essentials(report), 12),
    };
    let mut out = String::new();
    for (name, value) in rows {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "  {name:<width$}{value}");
    }
    if !verbose {
        return out;
    }
    if let Some(stalls) = report.stalls().filter(|s| s.count() > 0) {
        let _ = write!(out, "\n  stalls, by length\n{}", bars(stalls));
    }
    out
}

/// What most people ask, in rows that fit a narrow terminal.
fn essentials(report: &Report) -> Vec<(String, String)> {
    let mut rows = Vec::new();
    let mut row = |name: &str, value: String| rows.push((name.to_owned(), value));
    let pages = report.pages();
    let all = pages.precopy + pages.urgent + pages.background + pages.zero;
    row(
        "moved",
        format!(
            "{} vCPUs, {} on {}; {all} pages",
            report.vcpus,
            human(report.memory_bytes),
            report.engine
        ),
    );
    if let Some(ms) = report.total_ms() {
        row("took", time(ms * 1e3));
    }
    if report.paused() {
        row("blackout", PAUSED.into());
    }
    if let Some(blackout) = report.blackout() {
        let bound = match blackout.kind {
            super::BlackoutKind::Exact => "",
            _ => "at most ",
        };
        row("blackout", format!("{bound}{}", time(blackout.ms * 1e3)));
    }
    if let Some(pause) = vmm_pause(report) {
        row("its parts", pause);
    }
    if let Some(stalls) = report.stalls() {
        let text = match stalls.count() {
            0 => "none".to_owned(),
            count => format!(
                "{count}: p50 {}, p99 {}, max {}",
                time(stalls.quantile_us(0.5)),
                time(stalls.quantile_us(0.99)),
                time(stalls.max_us())
            ),
        };
        row("stalls", text);
    }
    if let Some(verified) = &report.verified {
        let text = match verified.holds() {
            true => "by guest and host: no wrong page".to_owned(),
            false => format!("FAILED: {}", verified.words),
        };
        row("verified", text);
    }
    if let Some(view) = &report.guest_view {
        let gap = |ns: u64| time(ns as f64 / 1e3);
        let gaps = [view.gap_before_ns, view.gap_during_ns, view.gap_after_ns].map(gap);
        let [before, during, after] = gaps;
        row(
            "timer gaps",
            format!("{before} before, {during} during, {after} after"),
        );
        row("noticed", noticed(view));
    }
    if let Some(protection) = report.protection() {
        row("channels", protection.to_string());
    }
    if report.conditions.build == "debug" {
        row("note", "a debug build: times say nothing".into());
    }
    rows
}

/// The parts of the pause of another VMM's VM.
fn vmm_pause(report: &Report) -> Option<String> {
    let [stop, save, rest] = report.vmm_pause()?.map(|ms| time(ms * 1e3));
    Some(format!(
        "{save} until the VMM had saved the VM, {rest} the rest; it took {stop} to stop it before"
    ))
}

/// The blackout of a paused VM.
const PAUSED: &str = "none: the VM was paused";

/// What a Linux guest has found.
fn noticed(view: &super::GuestView) -> String {
    match view.faults.as_slice() {
        [] => "nothing wrong".to_owned(),
        faults => format!("FAILED: {}", faults.join("; ")),
    }
}

/// The names and values of the long table and of the HTML page.
pub(super) fn rows(report: &Report) -> Vec<(String, String)> {
    let mut rows = Vec::new();
    let mut row = |name: &str, value: String| rows.push((name.to_owned(), value));
    let because = report
        .conditions
        .engine_because
        .as_ref()
        .map(|why| format!(" ({why})"));
    row(
        "engine",
        format!("{}{}", report.engine, because.unwrap_or_default()),
    );
    if let Some(received) = &report.received {
        row(
            "fault delivery",
            format!("{} ({})", received.delivery, received.delivery_because),
        );
    }
    row(
        "machine",
        format!("{} vCPUs, {}", report.vcpus, human(report.memory_bytes)),
    );
    let backings: Vec<String> = [
        report
            .sent
            .as_ref()
            .map(|s| format!("source {}", s.backing)),
        report
            .received
            .as_ref()
            .map(|r| format!("destination {}", r.backing)),
    ]
    .into_iter()
    .flatten()
    .collect();
    if !backings.is_empty() {
        row("backing", backings.join(", "));
    }
    row("link", report.conditions.link.clone());
    if let Some(protection) = report.protection() {
        let version = protection.version;
        row(
            "channels",
            format!("{protection}, protocol version {version}"),
        );
    }
    if let Some(ms) = report.total_ms() {
        row("total time", time(ms * 1e3));
    }
    if report.paused() {
        row("blackout", PAUSED.into());
    }
    if let Some(blackout) = report.blackout() {
        let bound = if blackout.kind == super::BlackoutKind::Exact {
            ""
        } else {
            "at most "
        };
        row(
            "blackout",
            format!(
                "{bound}{} ({})",
                time(blackout.ms * 1e3),
                blackout.kind.words()
            ),
        );
    }
    if let Some(pause) = vmm_pause(report) {
        row("its parts", pause);
    }
    if let Some(ns) = report.sent.as_ref().and_then(|s| s.blackout_forecast_ns) {
        let forecast = time(ns as f64 / 1e3);
        row("blackout forecast", format!("{forecast} expected"));
    }
    let pages = report.pages();
    let all = pages.precopy + pages.urgent + pages.background + pages.zero;
    row(
        "pages sent",
        format!(
            "{all}: {} pre-copy, {} urgent, {} background, {} zero",
            pages.precopy, pages.urgent, pages.background, pages.zero
        ),
    );
    if let Some(sent) = &report.sent {
        for (index, pass) in sent.passes.iter().enumerate() {
            row(
                &format!("pre-copy pass {}", index + 1),
                format!(
                    "{} pages in {}, {} left",
                    pass.pages,
                    time(pass.ns as f64 / 1e3),
                    pass.left
                ),
            );
        }
        for note in &sent.notes {
            row("pre-copy", note.clone());
        }
        let prefetch = sent.prefetch;
        row(
            "prefetch",
            format!(
                "{} pages in time, {} unconfirmed; {} requests for pages that were sent already",
                prefetch.in_time, prefetch.unconfirmed, prefetch.late
            ),
        );
        if pages.confirmed > 0 {
            row(
                "confirmed",
                format!(
                    "{} pages, {} not sent again; {} pages had changed",
                    pages.confirmed,
                    human(sent.bytes_saved),
                    sent.pages_resent
                ),
            );
        }
        row(
            "missing at the start",
            format!("{} pages", sent.missing_at_start),
        );
    }
    if let Some(rate) = report.throughput() {
        let background = report
            .background_throughput()
            .map(|b| format!(", background push {}/s", human(b as u64)));
        row(
            "throughput",
            format!("{}/s{}", human(rate as u64), background.unwrap_or_default()),
        );
    }
    if let Some(stalls) = report.stalls() {
        let text = if stalls.count() == 0 {
            "none: no vCPU touched a page before it was there".into()
        } else {
            format!(
                "{} faults: mean {}, p50 {}, p90 {}, p99 {}, p99.9 {}, max {}; {} over 2 ms",
                stalls.count(),
                time(stalls.mean_us()),
                time(stalls.quantile_us(0.5)),
                time(stalls.quantile_us(0.9)),
                time(stalls.quantile_us(0.99)),
                time(stalls.quantile_us(0.999)),
                time(stalls.max_us()),
                stalls.over_2ms()
            )
        };
        row("stalls", text);
    }
    let stages = report.received.iter().flat_map(|r| &r.stall_stages);
    for (name, stalls) in stages.filter(|(_, stalls)| stalls.count() > 0) {
        row(
            &format!("stage {name}"),
            format!(
                "p50 {}, p99 {}, max {}",
                time(stalls.quantile_us(0.5)),
                time(stalls.quantile_us(0.99)),
                time(stalls.max_us())
            ),
        );
    }
    if let Some(large) = report.received.as_ref().and_then(|r| r.large_mappings) {
        let bytes = |bytes: Option<u64>| bytes.map_or("unknown".into(), human);
        row(
            "large mappings",
            format!(
                "{} by the host, {} by {}",
                bytes(large.host_bytes),
                bytes(large.engine_bytes),
                report.engine
            ),
        );
    }
    let overhead = [
        report
            .sent
            .as_ref()
            .and_then(|s| s.overhead_bytes)
            .map(|bytes| format!("source {}", human(bytes))),
        report
            .received
            .as_ref()
            .and_then(|r| r.overhead_bytes)
            .map(|bytes| format!("destination {}", human(bytes))),
    ];
    let overhead: Vec<String> = overhead.into_iter().flatten().collect();
    if !overhead.is_empty() {
        row("memory overhead", overhead.join(", "));
    }
    if let Some(verified) = &report.verified {
        let word = |holds| if holds { "holds" } else { "FAILED" };
        row("verified by the guest", word(verified.guest).into());
        row("verified by the host", word(verified.host).into());
        row("verification", verified.words.clone());
    }
    if let Some(view) = &report.guest_view {
        let gap = |ns: u64| time(ns as f64 / 1e3);
        row(
            "the guest's own view",
            format!(
                "largest gap of its 1 ms timer: {} before the move, {} during it, {} after it",
                gap(view.gap_before_ns),
                gap(view.gap_during_ns),
                gap(view.gap_after_ns)
            ),
        );
        row(
            "the guest's checks",
            format!(
                "{} pages, {} of them at the destination: {} wrong; {} sums of files: {} wrong",
                view.pages_checked,
                view.pages_checked_there,
                view.pages_wrong,
                view.md5_rounds,
                view.md5_wrong
            ),
        );
        row("the guest noticed", noticed(view));
    }
    if report.conditions.build == "debug" {
        row(
            "note",
            "a debug build: its times say nothing about speed (build with --release)".into(),
        );
    }
    rows
}

/// The histogram with about three buckets per decade: neighbours are joined until at most 16 rows
/// remain.
fn bars(stalls: &super::Stalls) -> String {
    const ROWS: usize = 16;
    const WIDTH: f64 = 40.0;
    let buckets = stalls.buckets();
    let join = buckets.len().div_ceil(ROWS).max(1);
    let joined: Vec<_> = buckets
        .chunks(join)
        .map(|group| {
            let count: u64 = group.iter().map(|b| b.count).sum();
            (group[0].from_us, group[group.len() - 1].to_us, count)
        })
        .collect();
    let most = joined.iter().map(|row| row.2).max().unwrap_or(1).max(1);
    let mut out = String::new();
    for (from, to, count) in joined {
        let bar = "#".repeat((count as f64 / most as f64 * WIDTH).ceil() as usize);
        let _ = writeln!(
            out,
            "  {:>9} to {:>9}  {count:>8}  {bar}",
            time(from),
            time(to)
        );
    }
    out
}
