//! The results of a run.

use super::setting::{DemandSetting, Paging};
use super::{Plan, Scheme, Way, WaySamples, cores};
use crate::kit::{Figure, Samples};
use crate::{Conditions, Row};
use pageferry_machine::{Delivery, Engine};
use serde::Serialize;
use std::time::Duration;

/// A figure whose samples spread more than this part of the median is called noisy.
pub(super) const NOISY: f64 = 0.30;

/// The figures of one engine, delivery and scheme with one number of vCPUs.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Cell {
    /// The engine: `soft` or `kvm`.
    pub(crate) engine: &'static str,
    /// The delivery of faults on missing pages. `none`: no page was missing.
    pub(crate) delivery: &'static str,
    /// The MMU's locking of faults; unknown on KVM.
    pub(crate) scheme: Option<Scheme>,
    /// Delivery, readers and scheme in words.
    pub(crate) mode: String,
    /// The number of threads that read fault events; none if faults are exits.
    pub(crate) readers: Option<u32>,
    /// The number of vCPUs.
    pub(crate) vcpus: u32,
    /// The number of pages that each vCPU touched.
    pub(crate) pages_each: u64,
    /// The number of different pages that all vCPUs touched. With overlap it is smaller than the
    /// number of touches.
    pub(crate) pages: u64,
    /// Touches per second of all vCPUs together.
    pub(crate) pages_per_s: Figure,
    /// Touches per second of one vCPU over its own time: the median of the vCPUs.
    pub(crate) pages_per_s_vcpu: Figure,
    /// Core time of a touch in nanoseconds. It includes the guest's own instructions.
    pub(crate) ns_per_touch: Figure,
    /// The median time from a fault on a missing page to the vCPU's next, in microseconds, as the
    /// serving threads see both. It contains the installation, the resumption, the repeated store,
    /// and the delivery of the next fault. None if no page was missing, and with overlap.
    pub(crate) fault_us_p50: Option<Figure>,
    /// The 99th percentile of the same times.
    pub(crate) fault_us_p99: Option<Figure>,
    /// The time that the passes of a sample took together, in seconds.
    pub(crate) sample_s: Figure,
    /// The spread of `pages_per_s`: largest less smallest sample, in percent of the median.
    pub(crate) spread_percent: f64,
    /// Whether the spread is above 30 percent.
    pub(crate) noisy: bool,
    /// The median of `pages_per_s` divided by that of the fewest vCPUs, with the same engine,
    /// delivery, readers and scheme.
    pub(crate) scaling: f64,
}

impl Cell {
    /// Touches per second of all vCPUs, divided by their number: the rate of `demand_paging_test`.
    #[must_use]
    pub(crate) fn test_rate(&self) -> f64 {
        self.pages_per_s.median / f64::from(self.vcpus)
    }
}

/// A measurement that this host cannot make.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Unmeasured {
    /// The measurement.
    pub(crate) what: String,
    /// The reason.
    pub(crate) why: String,
}

/// The results of a run. All of them are measured.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DemandReport {
    /// Always `false`: no figure is modelled.
    pub(crate) modelled: bool,
    /// The figures, by engine, number of vCPUs, delivery and scheme.
    pub(crate) cells: Vec<Cell>,
    /// The same figures in the form of the other benchmarks.
    pub(crate) rows: Vec<Row>,
    /// The measurements that this host cannot make.
    pub(crate) unmeasured: Vec<Unmeasured>,
    /// Whether every vCPU touched all pages.
    pub(crate) overlap: bool,
    /// The memory behind the guests.
    pub(crate) backing: &'static str,
    /// The number of pages that were installed at a fault, at most.
    pub(crate) around: u64,
    /// The time that a thread slept before it installed a missing page, in microseconds.
    pub(crate) delay_us: u64,
    /// The number of cores that this process may use.
    pub(crate) cores: u32,
    /// The length of the run, in seconds.
    pub(crate) seconds: f64,
    #[serde(skip)]
    pub(super) tables: bool,
    #[serde(skip)]
    pub(super) selftest_lines: bool,
}

impl DemandReport {
    pub(super) fn new(setting: &DemandSetting) -> Self {
        Self {
            modelled: false,
            cells: Vec::new(),
            rows: Vec::new(),
            unmeasured: Vec::new(),
            overlap: setting.overlap,
            backing: setting.backing.name(),
            around: setting.around,
            delay_us: setting.delay.as_micros() as u64,
            cores: cores(),
            seconds: 0.0,
            tables: setting.paging == Paging::Tables,
            selftest_lines: setting.selftest_lines,
        }
    }

    pub(super) fn lacks(&mut self, engine: Engine, delivery: Delivery) {
        self.unmeasured.push(Unmeasured {
            what: format!("{engine} by {delivery}"),
            why: "not available on this host; `pageferry probe` prints the reason".into(),
        });
    }

    pub(super) fn add(&mut self, way: &Way, plan: &Plan, samples: &WaySamples) {
        let (engine, mode) = (way.engine.name(), way.name());
        let rate = Figure::of(&samples.rate);
        let first = self.of(engine, &mode).next();
        let scaling = first.map_or(1.0, |first| rate.median / first.pages_per_s.median);
        let fault = |us: &Samples| (!us.is_empty()).then(|| Figure::of(us));
        let cell = Cell {
            engine,
            delivery: way.delivery.map_or("none", Delivery::name),
            scheme: way.scheme,
            mode,
            readers: way.readers(plan.vcpus()),
            vcpus: plan.vcpus(),
            pages_each: plan.each,
            pages: plan.touched.end - plan.touched.start,
            pages_per_s: rate,
            pages_per_s_vcpu: Figure::of(&samples.per_vcpu),
            ns_per_touch: Figure::of(&samples.touch_ns),
            fault_us_p50: fault(&samples.fault_us_p50),
            fault_us_p99: fault(&samples.fault_us_p99),
            sample_s: Figure::of(&samples.sample_s),
            spread_percent: rate.spread() * 100.0,
            noisy: rate.spread() > NOISY,
            scaling,
        };
        self.add_rows(way, plan, samples, &cell);
        self.cells.push(cell);
    }

    /// Adds the figures of `cell` as rows. The ratio is to the plain loop, if readers are compared,
    /// and else to the run without missing pages.
    fn add_rows(&mut self, way: &Way, plan: &Plan, samples: &WaySamples, cell: &Cell) {
        let bytes = plan.toucher.memory_map().memory_bytes();
        let conditions = |note: String| {
            let here = Conditions::here(cell.vcpus, bytes, note);
            way.delivery
                .map_or(here.clone(), |delivery| here.with_delivery(delivery))
        };
        let subject = format!("{}, {}, {} vCPUs", cell.engine, cell.mode, cell.vcpus);
        let mut note = format!("{}, spread {:.0} %", self.backing, cell.spread_percent);
        if cell.noisy {
            note.push_str(": other work disturbed this run");
        }
        let row = samples.rate.row(
            "demand_paging.rate",
            subject.clone(),
            "pages/s",
            conditions(note),
        );
        let present = self.cells.iter().find(|other| {
            (other.engine, other.delivery, other.scheme, other.vcpus)
                == (cell.engine, "none", cell.scheme, cell.vcpus)
        });
        self.rows.push(match self.plain_loop(cell).or(present) {
            Some(other) if way.delivery.is_some() => {
                row.against(other.mode.clone(), other.pages_per_s.median)
            }
            _ => row,
        });
        if cell.fault_us_p50.is_some() {
            for (case, us) in [
                ("demand_paging.fault_p50", &samples.fault_us_p50),
                ("demand_paging.fault_p99", &samples.fault_us_p99),
            ] {
                let note = "from a fault to the same vCPU's next, as the serving threads see both";
                let row = us.row(case, subject.clone(), "us", conditions(note.into()));
                self.rows.push(row);
            }
        }
    }

    /// The cell of the plain loop that `cell` is compared with.
    pub(super) fn plain_loop(&self, cell: &Cell) -> Option<&Cell> {
        let mode = Way::plain_name(cell.delivery);
        self.of(cell.engine, &mode)
            .find(|plain| plain.vcpus == cell.vcpus && cell.readers.is_some())
    }

    pub(super) fn end(&mut self, took: Duration) {
        self.seconds = took.as_secs_f64();
    }

    /// The engines and modes of the report, each once, in the order of their measurement.
    pub(super) fn modes(&self) -> Vec<(&'static str, &str)> {
        let mut modes = Vec::new();
        for cell in &self.cells {
            let mode = (cell.engine, cell.mode.as_str());
            if !modes.contains(&mode) {
                modes.push(mode);
            }
        }
        modes
    }

    /// The cells of one engine and mode, by ascending number of vCPUs.
    pub(crate) fn of(&self, engine: &str, mode: &str) -> impl Iterator<Item = &Cell> {
        self.cells
            .iter()
            .filter(move |cell| cell.engine == engine && cell.mode == mode)
    }
}
