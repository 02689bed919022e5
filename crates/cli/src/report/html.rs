//! The report as one HTML page that needs nothing else.

use super::charts::{self, Backdrop};
use super::timeline::{ms_from, speeds};
use super::{Report, table};
use std::fmt::Write;

/// How much of the time before and after the move is shown, as a share of the move.
const MARGIN: f64 = 0.25;
/// How much is shown around the blackout in the close-up, in nanoseconds.
const CLOSE_UP_NS: u64 = 40_000_000;

pub(super) const STYLE: &str = "
body { font: 16px/1.5 system-ui, sans-serif; color: #282c34; background: #fff; max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .3rem; }
p.sub { color: #5b6270; margin-top: .2rem; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid #e2e5ea; }
th { font-weight: 600; white-space: nowrap; width: 13rem; }
.chart { width: 100%; height: auto; border: 1px solid #e2e5ea; border-radius: 4px; }
.good { color: #00734f; font-weight: 600; } .bad { color: #b3261e; font-weight: 600; }
";

/// The whole page.
pub(super) fn show(report: &Report) -> Result<String, String> {
    let mut page = String::new();
    let verdict = match &report.verified {
        Some(v) if v.holds() => {
            "<span class=\"good\">not a byte was lost: both verifications hold</span>"
        }
        Some(_) => "<span class=\"bad\">verification failed</span>",
        None => "not verified",
    };
    let c = &report.conditions;
    let _ = write!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Pageferry: a migration</title>\n<style>{STYLE}</style>\n</head>\n<body>\n\
         <h1>A running VM moved</h1>\n<p class=\"sub\">{verdict}. Pageferry {} ({} build), Linux {}, {} with {} cores.</p>\n",
        escape(&c.version),
        escape(&c.build),
        escape(&c.kernel),
        escape(&c.arch),
        c.cores
    );
    page.push_str("<h2>Summary</h2>\n<table>\n");
    for (name, value) in table::rows(report) {
        let _ = writeln!(
            page,
            "<tr><th>{}</th><td>{}</td></tr>",
            escape(&name),
            escape(&value)
        );
    }
    page.push_str("</table>\n");
    timelines(report, &mut page)?;
    page.push_str("<h2>How long faults held vCPUs up</h2>\n");
    match report.stalls().filter(|s| s.count() > 0) {
        Some(stalls) => page.push_str(&charts::stalls(stalls)?),
        None => page.push_str("<p>No vCPU touched a page before it was there.</p>"),
    }
    phases(report, &mut page);
    page.push_str("</body>\n</html>\n");
    Ok(page)
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
                   x_desc: &str|
     -> Result<(), String> {
        if to <= from {
            return Ok(());
        }
        let mut series = speeds(
            &samples,
            report.vcpus as usize,
            from,
            to,
            bins,
            charts::MAX_SERIES,
        );
        let shift = ms_from(origin_ns, from);
        series
            .iter_mut()
            .flat_map(|s| &mut s.points)
            .for_each(|point| point.0 += shift);
        let back = Backdrop {
            origin_ns,
            window: (shift, ms_from(origin_ns, to)),
            phases: &sent.phases,
            blackout,
            x_desc,
        };
        let _ = write!(page, "<h2>{title}</h2>\n<p class=\"sub\">{text}</p>\n");
        page.push_str(&charts::timeline(&series, &back)?);
        Ok(())
    };
    let margin = ((end.at_ns - start.at_ns) as f64 * MARGIN).max(50e6) as u64;
    let from = start.at_ns.saturating_sub(margin).max(first.at_ns);
    let to = (end.at_ns + margin).min(last.at_ns);
    add(
        "The guest's progress before, during and after the move",
        "Each line is a vCPU; what it does is rewrite its pages, one after the other. Bands are the phases.",
        from,
        to,
        240,
        start.at_ns,
        "milliseconds since the migration began",
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
        "milliseconds since the last guest instruction at the source",
    )
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
        let length = length.map_or(String::new(), |ms| format!(", for {ms:.2} ms"));
        let _ = writeln!(
            page,
            "<tr><th>{}</th><td>at {at:.2} ms{length}</td></tr>",
            escape(&phase.label)
        );
    }
    page.push_str("</table>\n");
}

/// Text as HTML.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
