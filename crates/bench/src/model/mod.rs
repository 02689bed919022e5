//! A MODEL of demand paging with more vCPUs than this host has cores. Not a measurement.
//!
//! **Guarantee.** Its inputs are measured in the same run and shown beside it ([`Parts`]); it is
//! compared with real runs of one and two vCPUs in the same run, and the errors are shown
//! ([`Check`]). Whatever shows its results says that they are modelled.
//!
//! **Mechanism.** Each vCPU has a core of its own and loops: the guest's own work for a page, the
//! look-up of its slot, the work of the fault, and where pages are missing an exit, the copy of a
//! page and the fault once more ([`Delivery`]). The work of a fault is done under the MMU lock:
//! exclusive and handed over in order (serialised), or shared, where all that vCPUs have in common
//! is the line of the table that a new last-level table, one for 512 pages, is linked into
//! (parallel; one line for all vCPUs is the worst case: with 16 MiB and more for each, most have
//! lines of their own). [`System`] simulates this event by event ([`queue`](System)).
//!
//! **What it leaves out**, so what it is not good for: the bandwidth of memory, several sockets (a
//! line takes longer between them), other locks than the MMU's (the talk names those of the host's
//! memory management as what remains), and overlapping touches. It takes the hypervisor here for
//! what it is: KVM's faults and exits take longer, all of them. A hand-over is taken to cost the
//! same however many wait. A clock keeps the processor from overlapping what it stands around with
//! what is beside it: so the parts of a fault are upper bounds, and the guest's own time, which is
//! the rest, a lower one (0 where nothing is left). The other way round, a real lock waits for the
//! guest's last store to memory, which the lock measured alone does not. The checks show what that
//! comes to: most where a fault is all a page takes ([`Delivery::None`], serialised).
//!
//! **Neighbours.** Below: [`crate::demand_paging`], whose guests and locks it measures. The command
//! line shows [`ModelReport`].

mod page;
mod parts;
mod queue;
mod random;
mod report;
#[cfg(test)]
mod tests;

pub use page::{figure, page};
pub use parts::Parts;
pub use queue::{Lock, Outcome, Spread, Step, System};
pub use report::ModelReport;

use crate::demand_paging::{Host, Plan, Scheme, in_order_touch, soft_touch};
use crate::kit::Figure;
use crate::vm::isa_of;
use crate::{BenchError, Samples};
use pageferry_addr::PAGE_SIZE;
use pageferry_machine::Engine;
use parts::{Measured, Rounds};
use serde::Serialize;
use std::time::Instant;

/// Entries of a table: a vCPU that goes through its memory needs a new last-level table for each so
/// many pages.
const TABLE_PAGES: u32 = 512;
/// The most pages a vCPU touches in a simulation. What is beyond goes on at the same rate: the
/// queue has been in its steady state for long.
const MAX_SIMULATED: u32 = 2048;

/// What the talk says of its figure; not measured or modelled here.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Talk {
    /// Its largest VM.
    pub vcpus: u32,
    /// How much of the time was spent waiting for KVM's MMU lock, faults serialised, in percent.
    pub waiting_percent: f64,
    /// How much of the time faults in parallel saved, in percent.
    pub saved_percent: f64,
    /// Where that is from.
    pub source: &'static str,
}

/// The talk.
pub const TALK: Talk = Talk {
    vcpus: 416,
    waiting_percent: 98.0,
    saved_percent: 89.0,
    source: "Ben Gardon, \"Improving MMU Scalability in x86 KVM\", KVM Forum 2019: KVM with a 416-vCPU, 12 TiB VM",
};

/// What to model.
#[derive(Clone, Debug)]
pub struct ModelSetting {
    /// The numbers of vCPUs.
    pub vcpus: Vec<u32>,
    /// Bytes for each vCPU, whole pages: also of the real runs.
    pub memory_per_vcpu: u64,
    /// Bytes that all vCPUs of a VM share out among them, whole pages: for the other table.
    pub total_memory: u64,
    /// How many samples each input is the median of.
    pub repeat: u32,
    /// How single times vary around the measured ones.
    pub spread: Spread,
    /// Names the sequence of random numbers.
    pub seed: u64,
}

impl Default for ModelSetting {
    fn default() -> Self {
        Self {
            vcpus: vec![
                1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, TALK.vcpus,
            ],
            memory_per_vcpu: 16 << 20,
            total_memory: 12 << 40,
            repeat: 21,
            spread: Spread::Uniform,
            seed: 2019,
        }
    }
}

/// How a vCPU gets its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Delivery {
    /// Host memory is there: one fault a page.
    None,
    /// The page is missing: a fault, an exit, a copy of 4 KiB on the vCPU's thread, and a fault
    /// again. The nearer to the talk's, whose pages came from user space.
    Exit,
}

impl Delivery {
    /// Both.
    pub const ALL: [Self; 2] = [Self::None, Self::Exit];

    /// The name in tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Exit => "exit",
        }
    }

    /// What a page takes.
    fn steps(self, parts: &Parts) -> Vec<Step> {
        let [guest, lookup, map, missing, exit, copy] = [
            parts.guest_ns,
            parts.lookup_ns,
            parts.map_ns,
            parts.missing_ns,
            parts.exit_ns,
            parts.copy_ns,
        ]
        .map(|figure| figure.median);
        match self {
            Self::None => vec![Step {
                own_ns: guest + lookup,
                held_ns: map,
            }],
            Self::Exit => vec![
                Step {
                    own_ns: guest + lookup,
                    held_ns: missing,
                },
                Step {
                    own_ns: exit + copy + lookup,
                    held_ns: map,
                },
            ],
        }
    }
}

/// The MMU lock of a scheme.
fn lock(scheme: Scheme, parts: &Parts, steps: usize) -> Lock {
    match scheme {
        Scheme::Parallel => Lock::Shared {
            line_ns: parts.line_ns.median,
            every: TABLE_PAGES * steps as u32,
        },
        Scheme::Serialised => Lock::Exclusive {
            alone_ns: parts.lock_ns.median,
            line_ns: parts.line_ns.median,
            handover_ns: parts.handover_ns.median,
        },
    }
}

/// One scheme with one number of vCPUs. Modelled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Side {
    /// Seconds until each vCPU has touched its memory, the same for every number of vCPUs.
    pub seconds: f64,
    /// Pages a second, all vCPUs together.
    pub pages_per_s: f64,
    /// How much of the vCPUs' time is waiting for the MMU lock, in percent.
    pub waiting_percent: f64,
    /// Seconds until all vCPUs together have touched the total memory.
    pub total_memory_seconds: f64,
}

/// Both schemes with one number of vCPUs. Modelled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Point {
    /// True: nothing here was measured.
    pub modelled: bool,
    /// How many vCPUs, on as many cores.
    pub vcpus: u32,
    /// Faults in parallel.
    pub parallel: Side,
    /// Faults one after the other.
    pub serialised: Side,
    /// How much less time `parallel` takes than `serialised`, in percent.
    pub saved_percent: f64,
}

/// One delivery with all numbers of vCPUs. Modelled.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Curve {
    /// How pages come.
    pub delivery: Delivery,
    /// What a page takes, by the measured parts.
    pub steps: Vec<Step>,
    /// By ascending number of vCPUs.
    pub points: Vec<Point>,
}

/// The model beside a real run.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Check {
    /// How pages came.
    pub delivery: Delivery,
    /// How the MMU let vCPUs fault. Serialised ones had the lock in the order in which they asked,
    /// as in the model.
    pub scheme: Scheme,
    /// How many vCPUs.
    pub vcpus: u32,
    /// Nanoseconds a page of a vCPU, measured.
    pub measured_ns: Figure,
    /// Nanoseconds a page of a vCPU, modelled.
    pub modelled_ns: f64,
    /// How much more `modelled_ns` is than the median of `measured_ns`, in percent.
    pub error_percent: f64,
    /// How much more it is than the least of `measured_ns`, in percent: on a host with other work
    /// the fastest run is the one in which each vCPU had a core, as the model supposes.
    pub error_to_fastest_percent: f64,
    /// Whether inputs were derived from this very run: then the error is none by construction.
    pub by_construction: bool,
}

/// Measures the inputs, compares the model with real runs, and models.
///
/// # Errors
/// [`BenchError::Setting`] where this process may use one core only, or the setting asks for
/// nothing; those of [`crate::demand_paging::demand_paging`] otherwise.
pub fn model(
    setting: &ModelSetting,
    tell: &mut dyn FnMut(&str),
) -> Result<ModelReport, BenchError> {
    let began = Instant::now();
    let pages = setting.memory_per_vcpu / PAGE_SIZE;
    if setting.vcpus.is_empty() || setting.vcpus.contains(&0) || setting.repeat == 0 || pages == 0 {
        return Err(BenchError::Setting(
            "nothing to model: no vCPUs, no samples or no memory".into(),
        ));
    }
    let isa = isa_of(Engine::Soft);
    let on = Measured {
        host: Host::new(Plan::memory_bytes(isa, 2, pages)?)?,
        plans: [
            Plan::new(isa, 1, pages, false)?,
            Plan::new(isa, 2, pages, false)?,
        ],
    };
    let (mut rounds, mut real) = (Rounds::default(), Real::default());
    for round in 1..=setting.repeat {
        tell(&format!(
            "measuring the model's inputs, round {round} of {}",
            setting.repeat
        ));
        rounds.round(&on)?;
        real.round(&on)?;
    }
    let parts = rounds.parts();
    let mut curves = Vec::new();
    for delivery in Delivery::ALL {
        tell(&format!("modelling, pages missing: {}", delivery.name()));
        curves.push(curve(setting, &parts, delivery));
    }
    let checks = real.checks(setting, &parts);
    Ok(ModelReport::new(
        setting,
        parts,
        curves,
        checks,
        began.elapsed(),
    ))
}

/// Simulates one scheme with one number of vCPUs.
fn simulate(
    setting: &ModelSetting,
    parts: &Parts,
    delivery: Delivery,
    scheme: Scheme,
    vcpus: u32,
) -> Outcome {
    let steps = delivery.steps(parts);
    let pages = setting.memory_per_vcpu / PAGE_SIZE;
    System {
        vcpus,
        pages: u32::try_from(pages).map_or(MAX_SIMULATED, |pages| pages.min(MAX_SIMULATED)),
        lock: lock(scheme, parts, steps.len()),
        steps,
        spread: setting.spread,
        seed: setting.seed,
    }
    .run()
}

fn curve(setting: &ModelSetting, parts: &Parts, delivery: Delivery) -> Curve {
    let mut vcpus = setting.vcpus.clone();
    vcpus.sort_unstable();
    vcpus.dedup();
    let pages_each = (setting.memory_per_vcpu / PAGE_SIZE) as f64;
    let pages_total = (setting.total_memory / PAGE_SIZE) as f64;
    let point = |vcpus: u32| {
        let side = |scheme| {
            let outcome = simulate(setting, parts, delivery, scheme, vcpus);
            let rate = outcome.pages_per_s();
            Side {
                seconds: pages_each * f64::from(vcpus) / rate,
                pages_per_s: rate,
                waiting_percent: outcome.waiting_percent(),
                total_memory_seconds: pages_total / rate,
            }
        };
        let (parallel, serialised) = (side(Scheme::Parallel), side(Scheme::Serialised));
        Point {
            modelled: true,
            vcpus,
            parallel,
            serialised,
            saved_percent: 100.0 * (1.0 - parallel.seconds / serialised.seconds),
        }
    };
    Curve {
        delivery,
        steps: delivery.steps(parts),
        points: vcpus.into_iter().map(point).collect(),
    }
}

/// Real runs of one and two vCPUs: nanoseconds a page of a vCPU.
#[derive(Default)]
struct Real {
    /// In the order of [`Real::cases`].
    samples: [Samples; 8],
}

impl Real {
    fn cases() -> impl Iterator<Item = (Delivery, Scheme, u32)> {
        Delivery::ALL.into_iter().flat_map(|delivery| {
            Scheme::ALL
                .into_iter()
                .flat_map(move |scheme| [1, 2].map(|vcpus| (delivery, scheme, vcpus)))
        })
    }

    fn round(&mut self, on: &Measured) -> Result<(), BenchError> {
        for ((delivery, scheme, vcpus), samples) in Self::cases().zip(&mut self.samples) {
            let plan = &on.plans[vcpus as usize - 1];
            let exits = delivery == Delivery::Exit;
            let race = match scheme {
                Scheme::Parallel => soft_touch(&on.host, plan, scheme, exits)?,
                Scheme::Serialised => in_order_touch(&on.host, plan, exits)?,
            };
            samples.push(race.whole.as_nanos() as f64 / plan.each as f64);
        }
        Ok(())
    }

    fn checks(&self, setting: &ModelSetting, parts: &Parts) -> Vec<Check> {
        Self::cases()
            .zip(&self.samples)
            .map(|((delivery, scheme, vcpus), samples)| {
                let outcome = simulate(setting, parts, delivery, scheme, vcpus);
                let measured_ns = Figure::of(samples);
                let modelled_ns = f64::from(vcpus) * 1e9 / outcome.pages_per_s();
                Check {
                    delivery,
                    scheme,
                    vcpus,
                    measured_ns,
                    modelled_ns,
                    error_percent: 100.0 * (modelled_ns / measured_ns.median - 1.0),
                    error_to_fastest_percent: 100.0 * (modelled_ns / measured_ns.min - 1.0),
                    by_construction: (delivery, scheme, vcpus)
                        == (Delivery::None, Scheme::Parallel, 1),
                }
            })
            .collect()
    }
}
