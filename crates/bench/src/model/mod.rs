//! A MODEL of demand paging with more vCPUs than this host has cores. Not a measurement.
//!
//! **Guarantee.** The model's inputs are measured in the same run, and printed with its results
//! ([`Parts`]). The model is compared with real runs of one and two vCPUs in the same run, and its
//! errors are printed. Every output of a result says that it is modelled.
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

use crate::demand_paging::{
    DemandFlags, HostRam, Plan, Scheme, Serving, in_order_touch, soft_touch,
};
use crate::output::Output;
use crate::vm::{check_host_memory, isa_of};
use crate::{BenchError, Samples, note, rounds};
use pageferry_addr::PAGE_SIZE;
use pageferry_machine::Engine;
use parts::{Guests, Parts};
use queue::{Lock, QueueTimes, Spread, Step, System};

/// The entries of a table. A vCPU that goes through its memory needs a new last-level table after
/// this many pages.
const TABLE_PAGES: u32 = 512;
/// The largest number of pages per vCPU in a simulation. Further pages continue at the same rate,
/// because the queue has long been in its steady state.
const MAX_SIMULATED: u32 = 2048;

/// The numbers of vCPUs that are modelled, unless others are named. The last is the talk's.
const VCPUS: [u32; 14] = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 416];

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
    const ALL: [Self; 2] = [Self::None, Self::Exit];

    /// The name in tables and in JSON.
    const fn name(self) -> &'static str {
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

/// The model: its measured inputs, and what it is asked for.
#[derive(Clone, Debug)]
struct Model {
    parts: Parts,
    /// Bytes for each vCPU, a multiple of the page size. The real runs use it as well.
    memory_per_vcpu: u64,
    /// Bytes that all vCPUs touch together, a multiple of the page size.
    total_memory: u64,
    /// The distribution of single times around the measured means.
    spread: Spread,
    /// The seed of the random numbers.
    seed: u64,
}

impl Model {
    /// Simulates one scheme with one number of vCPUs, on as many cores.
    fn simulate(&self, delivery: PageDelivery, scheme: Scheme, vcpus: u32) -> QueueTimes {
        let steps = delivery.steps(&self.parts);
        let pages = self.memory_per_vcpu / PAGE_SIZE;
        System {
            vcpus,
            pages: u32::try_from(pages).map_or(MAX_SIMULATED, |pages| pages.min(MAX_SIMULATED)),
            lock: lock(scheme, &self.parts, steps.len()),
            steps,
            spread: self.spread,
            seed: self.seed,
        }
        .run()
    }
}

/// Measures the inputs, runs the model, and compares it with real runs.
///
/// # Errors
/// [`BenchError::Setting`] if this process may use only one core. Otherwise the errors of
/// [`crate::demand_paging::demand_paging`].
pub(crate) fn model(flags: &DemandFlags) -> Result<Output, BenchError> {
    let mut model = Model {
        parts: Parts::default(),
        memory_per_vcpu: flags.memory_per_vcpu.unwrap_or(16 << 20),
        total_memory: flags.total_memory,
        spread: Spread::Uniform,
        seed: flags.seed,
    };
    let (isa, pages) = (isa_of(Engine::Soft), model.memory_per_vcpu / PAGE_SIZE);
    let bytes = Plan::memory_bytes(isa, 2, pages)?;
    check_host_memory(bytes)?;
    let on = Guests {
        host: HostRam::new(bytes)?,
        plans: [
            Plan::new(isa, 1, pages, false)?,
            Plan::new(isa, 2, pages, false)?,
        ],
    };
    let mut real: Vec<_> = real_runs().map(|run| (run, Samples::default())).collect();
    let repeat = flags.common.rounds(21, 1);
    for _ in rounds(repeat, "measuring the model's inputs") {
        model.parts.round(&on)?;
        for (run, samples) in &mut real {
            samples.push(run.measure(&on)?);
        }
    }
    let mut output = Output {
        rows: model.input_rows(),
        notes: model.notes(),
    };
    let checks = real.iter().map(|(run, ns)| model.check_row(run, ns));
    output.rows.extend(checks);
    for delivery in PageDelivery::ALL {
        note(&format!("modelling, pages missing: {}", delivery.name()));
        for vcpus in flags.vcpus(&VCPUS) {
            output.rows.extend(model.point_rows(delivery, vcpus));
        }
    }
    Ok(output)
}

/// A real run that the model is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RealRun {
    delivery: PageDelivery,
    /// Serialised faults get the lock in the order of arrival, as in the model.
    scheme: Scheme,
    /// One or two.
    vcpus: u32,
}

fn real_runs() -> impl Iterator<Item = RealRun> {
    PageDelivery::ALL.into_iter().flat_map(|delivery| {
        Scheme::ALL.into_iter().flat_map(move |scheme| {
            [1, 2].map(|vcpus| RealRun {
                delivery,
                scheme,
                vcpus,
            })
        })
    })
}

impl RealRun {
    /// Nanoseconds per page of a vCPU.
    fn measure(&self, on: &Guests) -> Result<f64, BenchError> {
        let plan = &on.plans[self.vcpus as usize - 1];
        let exits = self.delivery == PageDelivery::Exit;
        let race = match self.scheme {
            Scheme::Parallel => {
                soft_touch(&on.host, plan, self.scheme, exits.then(Serving::default))?
            }
            Scheme::Serialised => in_order_touch(&on.host, plan, exits)?,
        };
        Ok(race.whole.as_nanos() as f64 / plan.each as f64)
    }
}
