//! What a run found.

use super::{DemandSetting, Plan, Scheme, Taken, Way, cores};
use crate::kit::Figure;
use pageferry_machine::{Delivery, Engine};
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// One way with one number of vCPUs.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// Whose guest: `soft` or `kvm`.
    pub engine: &'static str,
    /// How touches of missing pages were delivered; `none` where no page was missing.
    pub delivery: &'static str,
    /// How the MMU let vCPUs fault; of KVM it is not known.
    pub scheme: Option<Scheme>,
    /// How many vCPUs touched at once.
    pub vcpus: u32,
    /// How many pages each of them touched.
    pub pages_each: u64,
    /// How many pages all touched together; fewer than the touches where they overlap.
    pub pages: u64,
    /// Touches a second, all vCPUs together.
    pub pages_per_s: Figure,
    /// Touches a second of one vCPU in its own time: the median of the vCPUs.
    pub pages_per_s_vcpu: Figure,
    /// Core time a touch, nanoseconds: what the guest's own instructions take included.
    pub ns_per_touch: Figure,
    /// `pages_per_s` to that of the fewest vCPUs measured in this way.
    pub scaling: f64,
}

/// What is not in the figures, and why.
#[derive(Clone, Debug, Serialize)]
pub struct Unmeasured {
    /// What.
    pub what: String,
    /// Why.
    pub why: String,
}

/// Everything a run found. Nothing in it is modelled.
#[derive(Clone, Debug, Serialize)]
pub struct DemandReport {
    /// False: all figures were measured.
    pub modelled: bool,
    /// By engine, number of vCPUs, and way.
    pub cells: Vec<Cell>,
    /// What this host cannot do.
    pub unmeasured: Vec<Unmeasured>,
    /// Whether every vCPU touched the pages of all.
    pub overlap: bool,
    /// Cores this process may run on.
    pub cores: u32,
    /// How long the run took.
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
            cores: cores(),
            seconds: 0.0,
        }
    }

    pub(super) fn lacks(&mut self, engine: Engine, delivery: Delivery) {
        self.unmeasured.push(Unmeasured {
            what: format!("{engine} by {delivery}"),
            why: "this host does not have it; `pageferry probe` says why".into(),
        });
    }

    pub(super) fn add(&mut self, way: &Way, plan: &Plan, taken: &Taken) {
        let (engine, delivery) = (way.engine.name(), delivery_name(way.delivery));
        let rate = Figure::of(&taken.rate);
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
            pages_per_s_vcpu: Figure::of(&taken.per_vcpu),
            ns_per_touch: Figure::of(&taken.touch_ns),
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

/// Three digits and a power of a thousand.
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
            "of all of guest memory"
        } else {
            "of a part of its own"
        };
        writeln!(
            f,
            "Each vCPU stores to one word of each page {which}; medians (min .. max); {} cores, {:.0} s in all.\n\
             Host memory is there before; a missing page is brought by copying 4 KiB. ns a touch: core time, with the \
             guest's own instructions. With a core for each vCPU, each stays on its own.",
            self.cores, self.seconds
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
            "a vCPU",
            "ns a touch",
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
