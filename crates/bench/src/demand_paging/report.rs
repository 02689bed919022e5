//! The results of a run.

use super::{DemandSetting, Plan, Scheme, Way, WaySamples, cores};
use crate::kit::Figure;
use pageferry_machine::{Delivery, Engine};
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// The figures of one engine, delivery and scheme with one number of vCPUs.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// The engine: `soft` or `kvm`.
    pub engine: &'static str,
    /// The delivery of faults on missing pages. `none`: no page was missing.
    pub delivery: &'static str,
    /// The MMU's locking of faults; unknown on KVM.
    pub scheme: Option<Scheme>,
    /// The number of vCPUs.
    pub vcpus: u32,
    /// The number of pages that each vCPU touched.
    pub pages_each: u64,
    /// The number of different pages that all vCPUs touched. With overlap it is smaller than the
    /// number of touches.
    pub pages: u64,
    /// Touches per second of all vCPUs together.
    pub pages_per_s: Figure,
    /// Touches per second of one vCPU over its own time: the median of the vCPUs.
    pub pages_per_s_vcpu: Figure,
    /// Core time of a touch in nanoseconds. It includes the guest's own instructions.
    pub ns_per_touch: Figure,
    /// The median of `pages_per_s` divided by that of the fewest vCPUs, with the same engine,
    /// delivery and scheme.
    pub scaling: f64,
}

/// A measurement that this host cannot make.
#[derive(Clone, Debug, Serialize)]
pub struct Unmeasured {
    /// The measurement.
    pub what: String,
    /// The reason.
    pub why: String,
}

/// The results of a run. All of them are measured.
#[derive(Clone, Debug, Serialize)]
pub struct DemandReport {
    /// Always `false`: no figure is modelled.
    pub modelled: bool,
    /// The figures, by engine, number of vCPUs, delivery and scheme.
    pub cells: Vec<Cell>,
    /// The measurements that this host cannot make.
    pub unmeasured: Vec<Unmeasured>,
    /// Whether every vCPU touched all pages.
    pub overlap: bool,
    /// The number of pages that were installed at a fault, at most.
    pub around: u64,
    /// The number of cores that this process may use.
    pub cores: u32,
    /// The length of the run, in seconds.
    pub seconds: f64,
}

fn delivery_name(delivery: Option<Delivery>) -> &'static str {
    delivery.map_or("none", Delivery::name)
}

impl DemandReport {
    pub(super) fn new(setting: &DemandSetting) -> Self {
        Self {
            modelled: false,
            cells: Vec::new(),
            unmeasured: Vec::new(),
            overlap: setting.overlap,
            around: setting.around,
            cores: cores(),
            seconds: 0.0,
        }
    }

    pub(super) fn lacks(&mut self, engine: Engine, delivery: Delivery) {
        self.unmeasured.push(Unmeasured {
            what: format!("{engine} by {delivery}"),
            why: "not available on this host; `pageferry probe` prints the reason".into(),
        });
    }

    pub(super) fn add(&mut self, way: &Way, plan: &Plan, samples: &WaySamples) {
        let (engine, delivery) = (way.engine.name(), delivery_name(way.delivery));
        let rate = Figure::of(&samples.rate);
        let first = self.cells.iter().find(|cell| {
            (cell.engine, cell.delivery, cell.scheme) == (engine, delivery, way.scheme)
        });
        let scaling = first.map_or(1.0, |first| rate.median / first.pages_per_s.median);
        self.cells.push(Cell {
            engine,
            delivery,
            scheme: way.scheme,
            vcpus: plan.vcpus(),
            pages_each: plan.each,
            pages: plan.touched.end - plan.touched.start,
            pages_per_s: rate,
            pages_per_s_vcpu: Figure::of(&samples.per_vcpu),
            ns_per_touch: Figure::of(&samples.touch_ns),
            scaling,
        });
    }

    pub(super) fn end(&mut self, took: Duration) {
        self.seconds = took.as_secs_f64();
    }

    /// The cells of one engine, delivery and scheme, by ascending number of vCPUs.
    pub fn of(
        &self,
        engine: &str,
        delivery: &str,
        scheme: Option<Scheme>,
    ) -> impl Iterator<Item = &Cell> {
        self.cells.iter().filter(move |cell| {
            cell.engine == engine && cell.delivery == delivery && cell.scheme == scheme
        })
    }
}

/// Formats a number with three digits and a prefix.
pub(crate) fn short(value: f64) -> String {
    let (scaled, unit) = match value {
        v if v >= 999.5e6 => (value / 1e9, " G"),
        v if v >= 999.5e3 => (value / 1e6, " M"),
        v if v >= 999.5 => (value / 1e3, " k"),
        _ => (value, ""),
    };
    let digits = match scaled {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    format!("{scaled:.digits$}{unit}")
}

impl fmt::Display for DemandReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let which = if self.overlap {
            "of guest memory"
        } else {
            "of its own part of guest memory"
        };
        writeln!(
            f,
            "Each vCPU stores to one word of each page {which}. Medians (min .. max). {} cores, {:.0} s in all.\n\
             Host memory is allocated before. A missing page is installed by copying 4 KiB, up to {} page(s) at a fault. \
             ns/touch: core time,\nincluding the guest's instructions. If there is a core for each vCPU, each is pinned to \
             its own.",
            self.cores, self.seconds, self.around
        )?;
        writeln!(
            f,
            "\n{:<6} {:<9} {:<11} {:>5} {:>10} {:>10} {:>21} {:>12} {:>10} {:>19} {:>7} {:>3}",
            "engine",
            "missing",
            "MMU",
            "vCPUs",
            "pages each",
            "pages/s",
            "",
            "per vCPU",
            "ns/touch",
            "",
            "scaling",
            "n"
        )?;
        for cell in &self.cells {
            let range =
                |figure: &Figure| format!("({} .. {})", short(figure.min), short(figure.max));
            writeln!(
                f,
                "{:<6} {:<9} {:<11} {:>5} {:>10} {:>10} {:>21} {:>12} {:>10} {:>19} {:>7} {:>3}",
                cell.engine,
                cell.delivery,
                cell.scheme.map_or("kernel's", Scheme::name),
                cell.vcpus,
                cell.pages_each,
                short(cell.pages_per_s.median),
                range(&cell.pages_per_s),
                short(cell.pages_per_s_vcpu.median),
                short(cell.ns_per_touch.median),
                range(&cell.ns_per_touch),
                format!("{:.2} x", cell.scaling),
                cell.pages_per_s.samples
            )?;
        }
        for unmeasured in &self.unmeasured {
            writeln!(f, "Not measured: {}: {}.", unmeasured.what, unmeasured.why)?;
        }
        Ok(())
    }
}
