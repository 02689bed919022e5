//! The report as one self-contained HTML page.

use super::timeline::{ms_from, speeds};
use super::{PhaseAt, Report, Stalls, table};
use pageferry_charts::{self as charts, Band, Timeline, escape, scrolling, time};
use std::fmt::Write;

/// The shown time before and after the move, as a share of the move.
const MARGIN: f64 = 0.25;
/// The shown time around the blackout in the close-up, in nanoseconds.
const CLOSE_UP_NS: u64 = 40_000_000;

/// The whole page.
pub(super) fn show(report: &Report) -> Result<String, String> {
    let mut body = String::new();
    let verdict = match (&report.verified, &report.guest_view) {
        (Some(v), _) if v.holds() => {
            "<span class=\"good\">not a byte was lost: both verifications hold</span>"
        }
        (None, Some(view)) if view.holds() => {
            "<span class=\"good\">the guest noticed nothing wrong</span>"
        }
        (None, None) => "not verified",
        _ => "<span class=\"bad\">verification failed</span>",
    };
    let c = &report.conditions;
    let about = format!(
        "{verdict}. Pageferry {} ({} build), Linux {}, {} with {} cores.",
        escape(&c.version),
        escape(&c.build),
        escape(&c.kernel),
        escape(&c.arch),
        c.cores
    );
    body.push_str("<h2>Summary</h2>\n<table>\n");
    for (name, value) in table::rows(report) {
        // Writing to a string cannot fail.
        let _ = writeln!(
            body,
            "<tr><th>{}</th><td>{}</td></tr>",
            escape(&name),
            escape(&value)
        );
    }
    body.push_str("</table>\n");
    timelines(report, &mut body)?;
    body.push_str("<h2>How long faults held vCPUs up</h2>\n");
    match report.stalls().filter(|s| s.count() > 0) {
        Some(stalls) => body.push_str(&scrolling(&histogram(stalls)?)),
        None => body.push_str("<p>No vCPU touched a page before it was there.</p>\n"),
    }
    phases(report, &mut body);
    Ok(charts::page("A running VM moved", &about, &body, ""))
}

/// The histogram of stalls, with quantiles marked.
fn histogram(stalls: &Stalls) -> Result<String, String> {
    let marks =
        [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)].map(|(name, share)| {
            let us = stalls.quantile_us(share);
            (format!("{name} {}", time(us)), us)
        });
    charts::histogram(
        &stalls.buckets(),
        &marks,
        "stall: from the fault to the vCPU running again (logarithmic)",
        "faults (logarithmic)",
    )
}

fn timelines(report: &Report, page: &mut String) -> Result<(), String> {
    let samples = report.samples();
    let (Some(sent), Some(first), Some(last)) = (&report.sent, samples.first(), samples.last())
    else {
        return Ok(());
    };
    let (Some(start), Some(end)) = (sent.phases.first(), sent.phases.last()) else {
        return Ok(());
    };
    let blackout = report.blackout().map(|b| {
        (
            sent.last_stop_ns,
            sent.last_stop_ns + (b.ms * super::MS) as u64,
        )
    });
    let mut add = |title: &str,
                   text: &str,
                   from: u64,
                   to: u64,
                   bins: u64,
                   origin_ns: u64,
                   since: &str|
     -> Result<(), String> {
        if to <= from {
            return Ok(());
        }
        let mut lines = speeds(
            &samples,
            report.vcpus as usize,
            from,
            to,
            bins,
            charts::MAX_SERIES,
        );
        let shift = ms_from(origin_ns, from);
        lines
            .iter_mut()
            .flat_map(|s| &mut s.points)
            .for_each(|point| point.0 += shift);
        let window = (shift, ms_from(origin_ns, to));
        let chart = charts::timeline(&Timeline {
            window,
            bands: &bands(&sent.phases, origin_ns, window),
            marked: blackout.map(|(from, to)| Band {
                from_ms: ms_from(origin_ns, from),
                to_ms: ms_from(origin_ns, to),
                name: "blackout".into(),
            }),
            since,
            y_desc: "pages rewritten a second",
            lines: &lines,
        })?;
        let _ = write!(page, "<h2>{title}</h2>\n<p class=\"sub\">{text}</p>\n");
        page.push_str(&scrolling(&chart));
        Ok(())
    };
    let margin = ((end.at_ns - start.at_ns) as f64 * MARGIN).max(50e6) as u64;
    let from = start.at_ns.saturating_sub(margin).max(first.at_ns);
    let to = (end.at_ns + margin).min(last.at_ns);
    add(
        "The guest's progress before, during and after the move",
        "Each line is a vCPU that rewrites its pages, one after the other. Bands are the phases.",
        from,
        to,
        240,
        start.at_ns,
        "since the migration began",
    )?;
    let from = sent
        .last_stop_ns
        .saturating_sub(CLOSE_UP_NS)
        .max(first.at_ns);
    let to = (sent.last_stop_ns + 2 * CLOSE_UP_NS).min(last.at_ns);
    add(
        "Close-up of the switch-over",
        "The blackout is when no guest instruction runs anywhere. Each vCPU's speed is an average over 2 ms.",
        from,
        to,
        (to.saturating_sub(from) / 2_000_000).max(1),
        sent.last_stop_ns,
        "since the last guest instruction at the source",
    )
}

/// The phases within the window, as bands of the time axis.
fn bands(phases: &[PhaseAt], origin_ns: u64, (left, right): (f64, f64)) -> Vec<Band> {
    let starts = phases.iter().map(|phase| ms_from(origin_ns, phase.at_ns));
    let ends = starts.clone().skip(1).chain([right]);
    let bands = starts
        .zip(ends)
        .zip(phases)
        .map(|((from_ms, to_ms), phase)| Band {
            from_ms,
            to_ms,
            name: phase.label.clone(),
        });
    let shown =
        |band: &Band| band.to_ms > band.from_ms && band.from_ms < right && band.to_ms > left;
    let named = |band: &Band| band.name != "completed";
    bands.filter(|band| shown(band) && named(band)).collect()
}

fn phases(report: &Report, page: &mut String) {
    let Some(sent) = &report.sent else { return };
    let Some(start) = sent.phases.first() else {
        return;
    };
    page.push_str("<h2>Phases at the source</h2>\n<table>\n");
    for (index, phase) in sent.phases.iter().enumerate() {
        let at = ms_from(start.at_ns, phase.at_ns);
        let length = sent
            .phases
            .get(index + 1)
            .map(|next| ms_from(phase.at_ns, next.at_ns));
        let length = length.map_or(String::new(), |ms| format!(", for {}", time(ms * 1e3)));
        let _ = writeln!(
            page,
            "<tr><th>{}</th><td>at {}{length}</td></tr>",
            escape(&phase.label),
            time(at * 1e3)
        );
    }
    page.push_str("</table>\n");
}
