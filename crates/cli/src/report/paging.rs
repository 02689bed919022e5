//! The pages of `bench demand-paging`: measured figures, or the model's, which say on their charts that they are modelled.

use super::charts::{self, Line, Linear};
use super::html::{STYLE, escape};
use pageferry_bench::demand_paging::{Cell, DemandReport, Scheme};
use pageferry_bench::model::{Curve, Delivery, ModelReport, Point};
use std::fmt::Write;

/// Pages a second over vCPUs, measured: a chart for each engine, and the table.
///
/// # Errors
/// What the drawing failed at.
pub(crate) fn paging_page(report: &DemandReport) -> Result<String, String> {
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
        body.push_str(&charts::linear(&Linear {
            title: None,
            x_desc: "vCPUs",
            y_desc: "pages a second",
            lines: &lines,
        })?);
    }
    let about = "Each vCPU touches one word of each page of its memory for the first time; all of them together, pages a \
                 second. Lines: how missing pages come (none: no page is missing), and how the MMU lets vCPUs fault.";
    Ok(page("Demand paging", about, &body, &report.to_string()))
}

fn rate(cell: &Cell) -> (f64, f64) {
    (f64::from(cell.vcpus), cell.pages_per_s.median)
}

/// The model's figures and tables.
///
/// # Errors
/// What the drawing failed at.
pub(crate) fn model_page(report: &ModelReport) -> Result<String, String> {
    let mut body = String::new();
    for curve in &report.curves {
        let heading = match curve.delivery {
            Delivery::Exit => "Pages are missing: each is brought by an exit and a copy",
            Delivery::None => "No page is missing: faults only",
        };
        let _ = writeln!(body, "<h2>{heading}</h2>");
        body.push_str(&figure(report, curve)?);
    }
    let about = "A MODEL, not a measurement: as many cores as vCPUs, driven by times measured in the same run, which stand \
                 below with the model's errors against real runs.";
    Ok(page(
        "Demand paging, modelled",
        about,
        &body,
        &report.to_string(),
    ))
}

/// The talk's figure, modelled, as an SVG file of its own: pages are missing and brought by exits.
///
/// # Errors
/// What the drawing failed at.
pub(crate) fn model_figure(report: &ModelReport) -> Result<String, String> {
    let curve = report
        .of(Delivery::Exit)
        .ok_or("the model has no such curve")?;
    figure(report, curve)
}

fn figure(report: &ModelReport, curve: &Curve) -> Result<String, String> {
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

fn page(title: &str, about: &str, body: &str, table: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Pageferry: {title}</title>\n<style>{STYLE}\npre {{ font-size: 11px; overflow-x: auto; }}</style>\n\
         </head>\n<body>\n<h1>{title}</h1>\n<p class=\"sub\">{about}</p>\n{body}\
         <h2>All figures</h2>\n<pre>{}</pre>\n</body>\n</html>\n",
        escape(table)
    )
}
