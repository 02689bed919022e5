//! The HTML page of `bench demand-paging`: measured figures.

use super::{Cell, DemandReport, Scheme};
use crate::kit::charts::{self, Line, Linear};
use crate::kit::{self, escape, scrolling};
use std::fmt::Write;

/// Pages per second over numbers of vCPUs: a chart for each engine, and the table.
///
/// # Errors
/// The drawing library's error.
pub fn page(report: &DemandReport) -> Result<String, String> {
    let mut body = String::new();
    for engine in ["kvm", "soft"] {
        let mut ways: Vec<(&str, Option<Scheme>)> = Vec::new();
        for cell in report.cells.iter().filter(|cell| cell.engine == engine) {
            if !ways.contains(&(cell.delivery, cell.scheme)) {
                ways.push((cell.delivery, cell.scheme));
            }
        }
        let lines: Vec<Line> = ways
            .into_iter()
            .map(|(delivery, scheme)| Line {
                name: match scheme {
                    Some(scheme) => format!("{delivery}, {scheme}"),
                    None => delivery.to_owned(),
                },
                points: report.of(engine, delivery, scheme).map(rate).collect(),
            })
            .collect();
        if lines.is_empty() {
            continue;
        }
        // Writing to a string cannot fail.
        let _ = writeln!(body, "<h2>{}</h2>", escape(engine));
        let chart = charts::linear(&Linear {
            title: None,
            x_desc: "vCPUs",
            y_desc: "pages per second",
            lines: &lines,
        })?;
        body.push_str(&scrolling(&chart));
    }
    let about = "Each vCPU touches one word of each page of its memory for the first time. The charts show pages per second, \
                 all vCPUs together. A line's name is the delivery of faults on missing pages (none: no page is missing), and \
                 whether the MMU takes faults in parallel or serialised.";
    let _ = writeln!(
        body,
        "<h2>All figures</h2>\n<pre>{}</pre>",
        escape(&report.to_string())
    );
    Ok(kit::page("Demand paging", about, &body, ""))
}

fn rate(cell: &Cell) -> (f64, f64) {
    (f64::from(cell.vcpus), cell.pages_per_s.median)
}
