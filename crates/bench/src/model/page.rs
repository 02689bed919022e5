//! The page and the figure of the model. They say on their charts that they are modelled.

use super::{Curve, Delivery, ModelReport, Point};
use crate::kit::charts::{self, Line, Linear};
use crate::kit::{self, escape, scrolling};
use std::fmt::Write;

/// The model's figures and tables.
///
/// # Errors
/// What the drawing failed at.
pub fn page(report: &ModelReport) -> Result<String, String> {
    let mut body = String::new();
    for curve in &report.curves {
        let heading = match curve.delivery {
            Delivery::Exit => "Pages are missing: each is brought by an exit and a copy",
            Delivery::None => "No page is missing: faults only",
        };
        let _ = writeln!(body, "<h2>{heading}</h2>");
        body.push_str(&scrolling(&draw(report, curve)?));
    }
    let about = "A MODEL, not a measurement: as many cores as vCPUs, driven by times measured in the same run, which stand \
                 below with the model's errors against real runs.";
    let _ = writeln!(
        body,
        "<h2>All figures</h2>\n<pre>{}</pre>",
        escape(&report.to_string())
    );
    Ok(kit::page("Demand paging, modelled", about, &body, ""))
}

/// The talk's figure, modelled, as an SVG file of its own: pages are missing and brought by exits.
///
/// # Errors
/// What the drawing failed at.
pub fn figure(report: &ModelReport) -> Result<String, String> {
    let curve = report
        .of(Delivery::Exit)
        .ok_or("the model has no such curve")?;
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
        "MODELLED from times measured on {} cores. {} vCPUs: {:.1} % of the time waiting, {:.1} % saved; the talk, on KVM: {} %, \
         {} %",
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
            &format!("Time to page in {mib} MiB for each vCPU, faults one by one and in parallel"),
            &subtitle,
        )),
        x_desc: "vCPUs, each on a core of its own",
        y_desc: "milliseconds, modelled",
        lines: &lines,
    })
}
