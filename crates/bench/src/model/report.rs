//! What the model says, and how far it can be believed.

use super::{Check, Curve, Delivery, ModelSetting, Parts, Spread, TALK, Talk};
use crate::demand_paging::{Scheme, cores, short};
use crate::kit::Figure;
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// Inputs, checks and results.
#[derive(Clone, Debug, Serialize)]
pub struct ModelReport {
    /// True: what is in `curves` was modelled.
    pub modelled: bool,
    /// The inputs: measured in this run on the soft engine.
    pub parts: Parts,
    /// How single times vary around them.
    pub spread: Spread,
    /// The sequence of random numbers.
    pub seed: u64,
    /// The model beside real runs of this run.
    pub checks: Vec<Check>,
    /// Bytes for each vCPU.
    pub memory_per_vcpu: u64,
    /// Bytes for all, in the other table.
    pub total_memory: u64,
    /// The results.
    pub curves: Vec<Curve>,
    /// What the talk says, for comparison.
    pub talk: Talk,
    /// Cores this process may run on: those the inputs were measured on.
    pub cores: u32,
    /// How long the run took.
    pub seconds: f64,
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
    pub fn of(&self, delivery: Delivery) -> Option<&Curve> {
        self.curves.iter().find(|curve| curve.delivery == delivery)
    }

    /// The inputs with their names, in the order in which tables show them.
    #[must_use]
    pub fn inputs(&self) -> [(&'static str, Figure); 9] {
        let parts = &self.parts;
        [
            (
                "guest: its instructions, TLB and touch, a page",
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
                "exclusive lock, taken and released, nobody else",
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

/// Seconds with three digits.
fn seconds(value: f64) -> String {
    match value {
        v if v >= 999.5 => format!("{v:.0} s"),
        v if v >= 0.9995 => format!("{} s", short(v)),
        v if v >= 0.999_5e-3 => format!("{} ms", short(v * 1e3)),
        v => format!("{} us", short(v * 1e6)),
    }
}

/// Bytes in the largest unit that divides them.
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
             cores ({:.0} s in all).\nTimes vary {}; seed {}.",
            self.cores,
            self.seconds,
            match self.spread {
                Spread::Constant => "not at all",
                Spread::Uniform => "evenly from a half to one and a half of these",
                Spread::Exponential => "exponentially around these",
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
            "\nThe model beside real runs of this run, ns a page of a vCPU\n  {:<8} {:<11} {:>5} {:>9} {:>8} {:>8} {:>8} {:>8}",
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
                    "  (the guest's time is what is left of this)"
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
            "\nFor comparison, of the talk and not modelled here: {} % of the time waiting for the lock, {} % of the time \
             saved\n({}).\nLeft out: memory bandwidth, sockets, the host's own locks, overlapping touches. Against the parallel MMU: every new \
             table goes\nthrough one cache line of all vCPUs, though most are linked into tables of their own.",
            self.talk.waiting_percent, self.talk.saved_percent, self.talk.source
        )
    }
}

impl ModelReport {
    fn show(&self, curve: &Curve, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match curve.delivery {
            Delivery::None => "no page is missing: faults only",
            Delivery::Exit => "each page is missing, brought by an exit and a copy of 4 KiB",
        };
        writeln!(f, "\nMODELLED: {what}")?;
        writeln!(
            f,
            "  {:>5}  {:^32}  {:^32}  {:>7}  {:^21}",
            "",
            format!(
                "{} for each vCPU: {}",
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
            let side = |side: &super::Side| {
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
