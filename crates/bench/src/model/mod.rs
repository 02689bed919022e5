//! A MODEL of demand paging with more vCPUs than this host has cores. Not a measurement.
//!
//! **Guarantee.** The model's inputs are measured in the same run, and printed with its results
//! ([`Parts`]). The model is compared with real runs of one and two vCPUs in the same run, and its
//! errors are printed ([`Check`]). Every output of a result says that it is modelled.
//!
//! **Mechanism.** Each vCPU has its own core. For each page it goes through these steps: the
//! guest's own work, the look-up of the slot, and the fault. If pages are missing, an exit, the
//! copy of a page and a second fault follow ([`PageDelivery`]). The fault works under the MMU lock.
//! If faults are serialised, the lock is exclusive and handed over in the order of arrival. If they
//! are parallel, it is shared. Then vCPUs share only the cache line to which a new last-level table
//! is linked, once per 512 pages. The model uses one such line for all vCPUs, which is the worst
//! case: with 16 MiB and more for each vCPU, most link to different lines. [`System`] simulates
//! this event by event ([`queue`](System)).
//!
//! **Limits.**
//!
//! - It leaves out memory bandwidth, multiple sockets (where a cache line takes longer), and
//!   overlapping touches.
//! - It leaves out locks other than the MMU's. The talk names those of the host's memory management
//!   as the remaining ones.
//! - Its costs are those of our hypervisor. KVM's faults and exits all take longer.
//! - A hand-over costs the same for any number of waiters.
//! - Reading a clock prevents the processor from overlapping the timed work with its surroundings.
//!   So the parts of a fault are upper bounds. The guest's own time is the remainder, so it is a
//!   lower bound (0 if nothing remains).
//! - A real lock waits for the guest's last store to memory. The lock that is measured alone does
//!   not.
//!
//! The checks show the total error. It is largest where the fault is all of a page's cost
//! ([`PageDelivery::None`], serialised).
//!
//! **Neighbours.** Below: [`crate::demand_paging`], whose guests and locks it measures. The command
//! line shows the rows.

mod parts;
mod queue;
mod random;
mod rows;
#[cfg(test)]
mod tests;

pub(crate) use parts::Parts;
pub(crate) use queue::{Lock, QueueTimes, Spread, Step, System};

use crate::demand_paging::{HostRam, Plan, Scheme, Serving, in_order_touch, soft_touch};
use crate::output::Output;
use crate::vm::isa_of;
use crate::{BenchError, Samples, note};
use pageferry_addr::PAGE_SIZE;
use pageferry_machine::Engine;
use parts::Guests;

/// The entries of a table. A vCPU that goes through its memory needs a new last-level table after
/// this many pages.
const TABLE_PAGES: u32 = 512;
/// The largest number of pages per vCPU in a simulation. Further pages continue at the same rate,
/// because the queue has long been in its steady state.
const MAX_SIMULATED: u32 = 2048;

/// The figures of the talk, which are not measured or modelled here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Talk {
    /// The vCPUs of the VM.
    pub(crate) vcpus: u32,
    /// The share of time that vCPUs waited for KVM's MMU lock with serialised faults, in percent.
    pub(crate) waiting_percent: f64,
    /// The share of time that parallel faults saved, in percent.
    pub(crate) saved_percent: f64,
    /// The source of these figures.
    pub(crate) source: &'static str,
}

/// A talk on the same change in KVM.
pub(crate) const TALK: Talk = Talk {
    vcpus: 416,
    waiting_percent: 98.0,
    saved_percent: 89.0,
    source: "Ben Gardon, \"Improving MMU Scalability in x86 KVM\", KVM Forum 2019: KVM with a 416-vCPU, 12 TiB VM",
};

/// The settings of the model.
#[derive(Clone, Debug)]
pub(crate) struct ModelSetting {
    /// The numbers of vCPUs to model, each at least 1.
    pub(crate) vcpus: Vec<u32>,
    /// Bytes for each vCPU, a multiple of the page size. The real runs use it as well.
    pub(crate) memory_per_vcpu: u64,
    /// Bytes that all vCPUs touch together, a multiple of the page size.
    pub(crate) total_memory: u64,
    /// The number of samples of each input, at least 1.
    pub(crate) repeat: u32,
    /// The distribution of single times around the measured means.
    pub(crate) spread: Spread,
    /// The seed of the random numbers.
    pub(crate) seed: u64,
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

/// The state of the pages before the touch, and their delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageDelivery {
    /// Host memory is allocated: one fault per page.
    None,
    /// The page is missing: a fault, an exit, a copy of 4 KiB on the vCPU's thread, and a second
    /// fault. This is closer to the talk, whose pages came from user space.
    Exit,
}

impl PageDelivery {
    /// Both deliveries.
    pub(crate) const ALL: [Self; 2] = [Self::None, Self::Exit];

    /// The name in tables and in JSON.
    #[must_use]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Exit => "exit",
        }
    }

    /// The steps for one page.
    fn steps(self, parts: &Parts) -> Vec<Step> {
        let [guest, lookup, map, missing, exit, copy] = [
            &parts.guest,
            &parts.lookup,
            &parts.map,
            &parts.missing,
            &parts.exit,
            &parts.copy,
        ]
        .map(Samples::median);
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
            line_ns: parts.line.median(),
            every: TABLE_PAGES * steps as u32,
        },
        Scheme::Serialised => Lock::Exclusive {
            alone_ns: parts.lock.median(),
            line_ns: parts.line.median(),
            handover_ns: parts.handover.median(),
        },
    }
}

/// The figures of one scheme with one number of vCPUs. Modelled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SchemeFigures {
    /// Seconds until each vCPU has touched [`ModelSetting::memory_per_vcpu`].
    pub(crate) seconds: f64,
    /// Pages per second of all vCPUs together.
    pub(crate) pages_per_s: f64,
    /// The share of the vCPUs' time spent waiting for the MMU lock, in percent.
    pub(crate) waiting_percent: f64,
    /// Seconds until all vCPUs together have touched [`ModelSetting::total_memory`].
    pub(crate) total_memory_seconds: f64,
}

/// The figures of both schemes with one number of vCPUs. Modelled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Point {
    /// The number of vCPUs, on as many cores.
    pub(crate) vcpus: u32,
    /// With parallel faults.
    pub(crate) parallel: SchemeFigures,
    /// With serialised faults.
    pub(crate) serialised: SchemeFigures,
    /// The time that `parallel` saves, in percent of that of `serialised`.
    pub(crate) saved_percent: f64,
}

/// The figures of one delivery with all numbers of vCPUs. Modelled.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Curve {
    /// The delivery.
    pub(crate) delivery: PageDelivery,
    /// The steps for one page, with the measured times.
    pub(crate) steps: Vec<Step>,
    /// The figures, by ascending number of vCPUs.
    pub(crate) points: Vec<Point>,
}

/// The model compared with a real run.
#[derive(Clone, Debug)]
pub(crate) struct Check {
    /// The delivery.
    pub(crate) delivery: PageDelivery,
    /// The MMU's locking of faults. Serialised faults got the lock in the order of arrival, as in
    /// the model.
    pub(crate) scheme: Scheme,
    /// The number of vCPUs.
    pub(crate) vcpus: u32,
    /// Nanoseconds per page of a vCPU, measured.
    pub(crate) measured_ns: Samples,
    /// Nanoseconds per page of a vCPU, modelled.
    pub(crate) modelled_ns: f64,
    /// Whether an input is derived from this run. Then the error is zero by construction.
    pub(crate) by_construction: bool,
}

/// Measures the inputs, runs the model, and compares it with real runs.
///
/// # Errors
/// [`BenchError::Setting`] if this process may use only one core, or the settings are empty.
/// Otherwise the errors of [`crate::demand_paging::demand_paging`].
pub(crate) fn model(setting: &ModelSetting) -> Result<Output, BenchError> {
    let pages = setting.memory_per_vcpu / PAGE_SIZE;
    if setting.vcpus.is_empty() || setting.vcpus.contains(&0) || setting.repeat == 0 || pages == 0 {
        return Err(BenchError::Setting(
            "nothing to model: no vCPUs, no samples or no memory".into(),
        ));
    }
    let isa = isa_of(Engine::Soft);
    let on = Guests {
        host: HostRam::new(Plan::memory_bytes(isa, 2, pages)?)?,
        plans: [
            Plan::new(isa, 1, pages, false)?,
            Plan::new(isa, 2, pages, false)?,
        ],
    };
    let (mut parts, mut real) = (Parts::default(), RealRuns::default());
    for round in 1..=setting.repeat {
        note(&format!(
            "measuring the model's inputs, round {round} of {}",
            setting.repeat
        ));
        parts.round(&on)?;
        real.round(&on)?;
    }
    let mut curves = Vec::new();
    for delivery in PageDelivery::ALL {
        note(&format!("modelling, pages missing: {}", delivery.name()));
        curves.push(curve(setting, &parts, delivery));
    }
    let checks = real.checks(setting, &parts);
    Ok(rows::output(setting, &parts, &curves, &checks))
}

/// Simulates one scheme with one number of vCPUs.
fn simulate(
    setting: &ModelSetting,
    parts: &Parts,
    delivery: PageDelivery,
    scheme: Scheme,
    vcpus: u32,
) -> QueueTimes {
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

fn curve(setting: &ModelSetting, parts: &Parts, delivery: PageDelivery) -> Curve {
    let mut vcpus = setting.vcpus.clone();
    vcpus.sort_unstable();
    vcpus.dedup();
    let pages_each = (setting.memory_per_vcpu / PAGE_SIZE) as f64;
    let pages_total = (setting.total_memory / PAGE_SIZE) as f64;
    let point = |vcpus: u32| {
        let side = |scheme| {
            let outcome = simulate(setting, parts, delivery, scheme, vcpus);
            let rate = outcome.pages_per_s();
            SchemeFigures {
                seconds: pages_each * f64::from(vcpus) / rate,
                pages_per_s: rate,
                waiting_percent: outcome.waiting_percent(),
                total_memory_seconds: pages_total / rate,
            }
        };
        let (parallel, serialised) = (side(Scheme::Parallel), side(Scheme::Serialised));
        Point {
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

/// Real runs of one and two vCPUs, in nanoseconds per page of a vCPU.
#[derive(Default)]
struct RealRuns {
    /// In the order of [`RealRuns::cases`].
    samples: [Samples; 8],
}

impl RealRuns {
    fn cases() -> impl Iterator<Item = (PageDelivery, Scheme, u32)> {
        PageDelivery::ALL.into_iter().flat_map(|delivery| {
            Scheme::ALL
                .into_iter()
                .flat_map(move |scheme| [1, 2].map(|vcpus| (delivery, scheme, vcpus)))
        })
    }

    fn round(&mut self, on: &Guests) -> Result<(), BenchError> {
        for ((delivery, scheme, vcpus), samples) in Self::cases().zip(&mut self.samples) {
            let plan = &on.plans[vcpus as usize - 1];
            let exits = delivery == PageDelivery::Exit;
            let race = match scheme {
                Scheme::Parallel => {
                    soft_touch(&on.host, plan, scheme, exits.then(Serving::default))?
                }
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
                let measured_ns = samples.clone();
                let modelled_ns = f64::from(vcpus) * 1e9 / outcome.pages_per_s();
                Check {
                    delivery,
                    scheme,
                    vcpus,
                    measured_ns,
                    modelled_ns,
                    by_construction: (delivery, scheme, vcpus)
                        == (PageDelivery::None, Scheme::Parallel, 1),
                }
            })
            .collect()
    }
}
