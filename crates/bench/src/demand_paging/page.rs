//! The HTML page and the figure of `bench demand-paging`: measured figures.

use super::{Cell, DemandReport};
use pageferry_charts::{self as charts, Line, Linear, escape, scrolling};
use std::fmt::Write;

/// Pages per second over numbers of vCPUs: a chart for each engine, and the table.
///
/// # Errors
/// The drawing library's error.
pub(crate) fn page(report: &DemandReport) -> Result<String, String> {
    let mut body = String::new();
    for engine in ["kvm", "soft"] {
        let lines = lines(report, Some(engine));
        if lines.is_empty() {
            continue;
        }
        // Writing to a string cannot fail.
        let _ = writeln!(body, "<h2>{}</h2>", escape(engine));
        body.push_str(&scrolling(&chart(None, &lines)?));
    }
    let about = "Each vCPU touches one word of each page of its memory for the first time. The charts show pages per second, \
                 all vCPUs together. A line's name is the delivery of faults on missing pages (no userfault: no page is \
                 missing), the threads that read fault events, and whether the MMU serialises faults.";
    let _ = writeln!(
        body,
        "<h2>All figures</h2>\n<pre>{}</pre>",
        escape(&report.to_string())
    );
    Ok(charts::page("Demand paging", about, &body, ""))
}

/// One chart of all engines, as SVG.
///
/// # Errors
/// The drawing library's error.
pub(crate) fn figure(report: &DemandReport) -> Result<String, String> {
    let title = (
        "First touches of memory: pages per second, all vCPUs together",
        "Medians, measured. A line's name is the engine and the delivery of faults on missing pages.",
    );
    chart(Some(title), &lines(report, None))
}

fn chart(title: Option<(&str, &str)>, lines: &[Line]) -> Result<String, String> {
    charts::linear(&Linear {
        title,
        x_desc: "vCPUs",
        y_desc: "pages per second",
        lines,
    })
}

/// The lines of one engine, or of all with the engine in their names.
fn lines(report: &DemandReport, only: Option<&str>) -> Vec<Line> {
    report
        .modes()
        .into_iter()
        .filter(|(engine, _)| only.is_none_or(|only| only == *engine))
        .map(|(engine, mode)| Line {
            name: match only {
                Some(_) => mode.to_owned(),
                None => format!("{engine}, {mode}"),
            },
            points: report.of(engine, mode).map(rate).collect(),
        })
        .collect()
}

fn rate(cell: &Cell) -> (f64, f64) {
    (f64::from(cell.vcpus), cell.pages_per_s.median)
}
