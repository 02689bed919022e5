//! The HTML page and the figure of the model. Their charts say that they are modelled.

use super::{Curve, ModelReport, PageDelivery, Point};
use crate::kit::charts::{self, Line, Linear};
use crate::kit::{self, escape, scrolling};
use std::fmt::Write;

/// The HTML page with the model's charts and tables.
///
/// # Errors
/// The drawing library's error.
pub fn page(report: &ModelReport) -> Result<String, String> {
    let mut body = String::new();
    for curve in &report.curves {
        let heading = match curve.delivery {
            PageDelivery::Exit => "Pages are missing: each takes an exit and a copy",
            PageDelivery::None => "No page is missing: faults only",
        };
        let _ = writeln!(body, "<h2>{heading}</h2>");
        body.push_str(&scrolling(&draw(report, curve)?));
    }
    let about = "A MODEL, not a measurement, with a core for each vCPU. Its inputs are times that were measured in the same \
                 run. The table at the end has these inputs, and the model's errors compared with real runs.";
    let _ = writeln!(
        body,
        "<h2>All figures</h2>\n<pre>{}</pre>",
        escape(&report.to_string())
    );
    Ok(kit::page("Demand paging, modelled", about, &body, ""))
}

/// The talk's figure, modelled, as an SVG file: pages are missing, and faults on them are delivered
/// as exits.
///
/// # Errors
/// The drawing library's error.
pub fn figure(report: &ModelReport) -> Result<String, String> {
    let curve = report
        .of(PageDelivery::Exit)
        .ok_or("the model has no curve for missing pages")?;
    draw(report, curve)
}

fn draw(report: &ModelReport, curve: &Curve) -> Result<String, String> {
    let line = |name: &str, seconds: &dyn Fn(&Point) -> f64| Line {
        name: name.to_owned(),
        points: curve
            .points
            .iter()
            .map(|point| (f64::from(point.vcpus), seconds(point) * 1e3))
            .collect(),
    };
    let lines = [
        line("parallel", &|point| point.parallel.seconds),
        line("serialised", &|point| point.serialised.seconds),
    ];
    let last = curve.points.last().ok_or("there is nothing to draw")?;
    let subtitle = format!(
        "MODELLED from times measured on {} cores. {} vCPUs: {:.1} % of the time waiting, {:.1} % saved. Talk, on KVM: {} %, {} %",
        report.cores,
        last.vcpus,
        last.serialised.waiting_percent,
        last.saved_percent,
        report.talk.waiting_percent,
        report.talk.saved_percent
    );
    let mib = report.memory_per_vcpu as f64 / f64::from(1 << 20);
    charts::linear(&Linear {
        title: Some((
            &format!(
                "Time to page in {mib} MiB per vCPU, with serialised and with parallel faults"
            ),
            &subtitle,
        )),
        x_desc: "vCPUs, each on its own core",
        y_desc: "milliseconds, modelled",
        lines: &lines,
    })
}
