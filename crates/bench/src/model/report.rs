//! The results of the model, with its inputs and its errors: as text, as an HTML page, and as a
//! figure. All of them say that they are modelled.

use super::{Check, Curve, ModelSetting, PageDelivery, Parts, Point, Spread, TALK, Talk};
use crate::demand_paging::{Scheme, cores, short};
use crate::kit::Figure;
use pageferry_charts::{self as charts, Line, Linear, escape, scrolling};
use serde::Serialize;
use std::fmt::{self, Write};
use std::time::Duration;

/// Inputs, checks and results.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ModelReport {
    /// Always `true`: `curves` are modelled.
    pub(crate) modelled: bool,
    /// The inputs, measured in this run on the soft engine.
    pub(crate) parts: Parts,
    /// The distribution of single times around the inputs.
    pub(crate) spread: Spread,
    /// The seed of the random numbers.
    pub(crate) seed: u64,
    /// The model compared with real runs in this run.
    pub(crate) checks: Vec<Check>,
    /// Bytes for each vCPU.
    pub(crate) memory_per_vcpu: u64,
    /// Bytes for all vCPUs together.
    pub(crate) total_memory: u64,
    /// The results.
    pub(crate) curves: Vec<Curve>,
    /// The talk's figures, for comparison.
    pub(crate) talk: Talk,
    /// The number of cores that this process may use.
    pub(crate) cores: u32,
    /// The length of the run, in seconds.
    pub(crate) seconds: f64,
}

impl ModelReport {
    pub(super) fn new(
        setting: &ModelSetting,
        parts: Parts,
        curves: Vec<Curve>,
        checks: Vec<Check>,
        took: Duration,
    ) -> Self {
        Self {
            modelled: true,
            parts,
            spread: setting.spread,
            seed: setting.seed,
            checks,
            memory_per_vcpu: setting.memory_per_vcpu,
            total_memory: setting.total_memory,
            curves,
            talk: TALK,
            cores: cores(),
            seconds: took.as_secs_f64(),
        }
    }

    /// The curve of a delivery.
    #[must_use]
    pub(crate) fn of(&self, delivery: PageDelivery) -> Option<&Curve> {
        self.curves.iter().find(|curve| curve.delivery == delivery)
    }

    /// The inputs with their names, in the order of the table.
    #[must_use]
    pub(crate) fn inputs(&self) -> [(&'static str, Figure); 9] {
        let parts = &self.parts;
        [
            (
                "guest: instructions, TLB and touch of a page",
                parts.guest_ns,
            ),
            ("look-up of the memory slot", parts.lookup_ns),
            (
                "fault that maps: walk and change, under the lock",
                parts.map_ns,
            ),
            (
                "fault on a missing page: walk and test, under the lock",
                parts.missing_ns,
            ),
            ("exit and entry", parts.exit_ns),
            ("copy of 4 KiB and clearing of its bit", parts.copy_ns),
            (
                "exclusive lock, taken and released without contention",
                parts.lock_ns,
            ),
            (
                "exclusive lock, handed over between two cores",
                parts.handover_ns,
            ),
            ("cache line between two cores", parts.line_ns),
        ]
    }
}

/// Formats seconds with three digits and a suitable unit.
fn seconds(value: f64) -> String {
    match value {
        v if v >= 999.5 => format!("{v:.0} s"),
        v if v >= 0.9995 => format!("{} s", short(v)),
        v if v >= 0.999_5e-3 => format!("{} ms", short(v * 1e3)),
        v => format!("{} us", short(v * 1e6)),
    }
}

/// Formats bytes in the largest unit that divides them.
fn bytes(value: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let fits = |shift: &u32| value >= 1 << shift && value.is_multiple_of(1 << shift);
    match units.iter().find(|(shift, _)| fits(shift)) {
        Some((shift, unit)) => format!("{} {unit}", value >> shift),
        None => format!("{value} B"),
    }
}

impl fmt::Display for ModelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "MODEL, not a measurement: demand paging with a core for each vCPU, from times measured in this run on {} \
             cores ({:.0} s in all).\nDistribution of times: {}. Seed: {}.",
            self.cores,
            self.seconds,
            match self.spread {
                Spread::Constant => "constant",
                Spread::Uniform => "uniform from half to one and a half of the mean",
                Spread::Exponential => "exponential",
            },
            self.seed
        )?;
        writeln!(
            f,
            "\nMeasured inputs, soft engine {:>32} {:>19} {:>3}",
            "ns", "min .. max", "n"
        )?;
        for (name, figure) in self.inputs() {
            let range = format!("{} .. {}", short(figure.min), short(figure.max));
            writeln!(
                f,
                "  {name:<56} {:>5} {range:>19} {:>3}",
                short(figure.median),
                figure.samples
            )?;
        }
        writeln!(
            f,
            "\nThe model compared with real runs, ns per page of a vCPU\n  {:<8} {:<11} {:>5} {:>9} {:>8} {:>8} {:>8} {:>8}",
            "missing", "MMU", "vCPUs", "measured", "modelled", "error", "fastest", "error"
        )?;
        for check in &self.checks {
            writeln!(
                f,
                "  {:<8} {:<11} {:>5} {:>9} {:>8} {:>+6.1} % {:>8} {:>+6.1} %{}",
                check.delivery.name(),
                check.scheme.name(),
                check.vcpus,
                short(check.measured_ns.median),
                short(check.modelled_ns),
                check.error_percent,
                short(check.measured_ns.min),
                check.error_to_fastest_percent,
                if check.by_construction {
                    "  (the guest's time is derived from this run)"
                } else {
                    ""
                }
            )?;
        }
        for curve in &self.curves {
            self.show(curve, f)?;
        }
        writeln!(
            f,
            "\nThe talk's figures, not modelled here: {} % of the time waiting for the lock, {} % of the time saved\n({}).\n\
             Left out: memory bandwidth, sockets, the host's own locks, overlapping touches. To the parallel MMU's \
             disadvantage,\nall vCPUs link new tables through one cache line; in reality most vCPUs use different lines.",
            self.talk.waiting_percent, self.talk.saved_percent, self.talk.source
        )
    }
}

impl ModelReport {
    fn show(&self, curve: &Curve, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match curve.delivery {
            PageDelivery::None => "no page is missing: faults only",
            PageDelivery::Exit => "each page is missing, and takes an exit and a copy of 4 KiB",
        };
        writeln!(f, "\nMODELLED: {what}")?;
        writeln!(
            f,
            "  {:>5}  {:^32}  {:^32}  {:>7}  {:^21}",
            "",
            format!(
                "{} per vCPU: {}",
                bytes(self.memory_per_vcpu),
                Scheme::Serialised
            ),
            Scheme::Parallel.name(),
            "",
            format!("{} for all", bytes(self.total_memory))
        )?;
        writeln!(
            f,
            "  {:>5}  {:>10} {:>10} {:>10}  {:>10} {:>10} {:>10}  {:>7}  {:>10} {:>10}",
            "vCPUs",
            "time",
            "pages/s",
            "waiting",
            "time",
            "pages/s",
            "waiting",
            "saved",
            "serialised",
            "parallel"
        )?;
        for point in &curve.points {
            let side = |side: &super::SchemeFigures| {
                format!(
                    "{:>10} {:>10} {:>8.1} %",
                    seconds(side.seconds),
                    short(side.pages_per_s),
                    side.waiting_percent
                )
            };
            writeln!(
                f,
                "  {:>5}  {}  {}  {:>5.1} %  {:>10} {:>10}",
                point.vcpus,
                side(&point.serialised),
                side(&point.parallel),
                point.saved_percent,
                seconds(point.serialised.total_memory_seconds),
                seconds(point.parallel.total_memory_seconds)
            )?;
        }
        Ok(())
    }
}

/// The HTML page with the model's charts and tables.
///
/// # Errors
/// The drawing library's error.
pub(crate) fn page(report: &ModelReport) -> Result<String, String> {
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
    Ok(charts::page("Demand paging, modelled", about, &body, ""))
}

/// The talk's figure, modelled, as an SVG file: pages are missing, and faults on them are delivered
/// as exits.
///
/// # Errors
/// The drawing library's error.
pub(crate) fn figure(report: &ModelReport) -> Result<String, String> {
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
