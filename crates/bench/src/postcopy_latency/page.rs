//! The HTML page of `bench postcopy-latency`.

use super::report::{LatencyReport, LatencyRow};
use pageferry_charts::{self as charts, Bucket, escape, scrolling};
use std::fmt::Write;

/// A histogram for each row of each column, the verdicts, and all figures.
///
/// # Errors
/// The drawing library's error.
pub(crate) fn page(report: &LatencyReport) -> Result<String, String> {
    let mut body = String::new();
    // Writing to a string cannot fail.
    for column in &report.columns {
        let _ = writeln!(body, "<h2>{}</h2>", escape(&column.column.name()));
        if !column.verdicts.is_empty() {
            body.push_str("<ul>\n");
        }
        for aim in &column.verdicts {
            let class = match aim.met {
                Some(true) => "good",
                Some(false) => "bad",
                None => "sub",
            };
            let bound = if aim.at_least { "at least" } else { "at most" };
            let measured = aim.measured.map_or_else(String::new, |measured| {
                format!(", {measured:.2} {}", aim.unit)
            });
            let _ = writeln!(
                body,
                "<li><span class=\"{class}\">{}</span>: {}{measured} ({bound} {} {})</li>",
                aim.verdict(),
                escape(aim.name),
                aim.limit,
                aim.unit
            );
        }
        if !column.verdicts.is_empty() {
            body.push_str("</ul>\n");
        }
        for row in column.rows.iter().filter(|row| !row.histogram.is_empty()) {
            let _ = writeln!(body, "<h3>{}</h3>", row.mode.name());
            body.push_str(&scrolling(&chart(row)?));
        }
    }
    let about = "How long faults on missing pages delay a vCPU while its VM moves in post-copy over a shaped link.";
    let _ = writeln!(
        body,
        "<h2>All figures</h2>\n<pre>{}</pre>",
        escape(&report.to_string())
    );
    Ok(charts::page("Post-copy latency", about, &body, ""))
}

/// The histogram of a row, with its quantiles.
fn chart(row: &LatencyRow) -> Result<String, String> {
    let buckets: Vec<Bucket> = row
        .histogram
        .iter()
        .map(|bar| Bucket {
            // A logarithmic axis has no 0.
            from_us: (bar.from_us as f64).max(0.5),
            to_us: bar.to_us as f64,
            count: bar.count,
        })
        .collect();
    let marks = [
        ("mean", row.mean_us.median),
        ("p50", row.p50_us.median),
        ("p99", row.p99_us.median),
    ];
    let marks = marks.map(|(name, us)| (format!("{name} {}", charts::time(us)), us));
    charts::histogram(
        &buckets,
        &marks,
        "stall (logarithmic)",
        "stalls (logarithmic)",
    )
}
