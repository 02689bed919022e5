//! `bench demand-paging`: the rate at which vCPUs get memory that all of them touch for the first
//! time.
//!
//! **Guarantee.** Every figure here was measured by the run that prints it. Every run checks that
//! each page holds the value that a vCPU stored. Simulated figures come from [`crate::model`] and
//! are marked as such.
//!
//! **Mechanism.** The test follows `demand_paging_test` of the kernel's selftests. Each vCPU stores
//! to one word of each page of its part of guest memory, in ascending order. With overlap, each
//! vCPU touches all of guest memory. At first no page is mapped in the second-stage tables. Either
//! host memory is allocated, and a touch costs the hypervisor's fault path only. Or each page is
//! missing: its fault is delivered by one of the ways of [`Delivery`], and 4 KiB are copied into it.
//! Each vCPU has a thread, and all start together (`race`). A sample is as many whole passes as
//! [`DemandFlags::sample`] takes, each with a new VM. Times of single faults come from a further
//! pass, because reading the clock costs time.
//!
//! On the soft engine, runs with parallel faults take turns with runs that hold one exclusive lock
//! around each fault ([`Scheme`]). The difference is the gain of the parallel MMU.
//!
//! **Neighbours.** Below: `hypervisor` for the soft engine, `machine` for KVM, `guest` for the
//! program. The command line shows the rows; [`crate::model`] measures its inputs with the
//! same guests.

mod machine;
mod missing;
mod plan;
mod race;
mod report;
mod setting;
mod soft;
#[cfg(test)]
mod tests;
mod way;

pub(crate) use missing::Serving;
pub(crate) use plan::Plan;
pub(crate) use race::{GuestExit, Runner, race};
pub(crate) use setting::DemandFlags;
#[cfg(test)]
pub(crate) use setting::flags;
pub(crate) use soft::{HostRam, exit_and_entry};

use crate::output::Output;
use crate::vm::isa_of;
use crate::watched::{Clock, FaultTimes, OrderedLock, Serialised, Watched};
use crate::{BenchError, Samples, model, rounds};
use pageferry_addr::PAGE_SIZE;
use pageferry_hypervisor::Scalable;
use pageferry_machine::{Delivery, Engine, MachineError};
use race::Race;
use report::{Cell, Found};
use std::fmt;
use std::sync::Arc;
use way::{WaySamples, ways};

/// The MMU's locking of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Scheme {
    /// Faults run in parallel: the hypervisor as it is.
    Parallel,
    /// One exclusive lock is held for each fault, as in KVM before it took faults in parallel. Any
    /// vCPU that finds the lock free takes it, so there are fewer hand-overs than with a lock that
    /// keeps the order of arrival.
    Serialised,
}

impl Scheme {
    /// Both schemes.
    pub(crate) const ALL: [Self; 2] = [Self::Parallel, Self::Serialised];
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Parallel => "parallel",
            Self::Serialised => "serialised",
        })
    }
}

/// Measures all engines, or models more vCPUs than this host has cores.
///
/// # Errors
/// [`BenchError::WrongValue`] if a page does not hold the stored value. [`BenchError::Setting`] if
/// these settings cannot be measured. [`MachineError::NoDelivery`] if no engine has the wanted
/// delivery. Other errors if the host refuses something.
pub(crate) fn demand_paging(flags: &DemandFlags) -> Result<Output, BenchError> {
    match flags.model {
        true => model::model(flags),
        false => Ok(measure(flags)?.output(flags)),
    }
}

fn measure(flags: &DemandFlags) -> Result<Found, BenchError> {
    flags.check()?;
    let repeat = flags.common.rounds(5, 5);
    let mut found = Found::default();
    for engine in flags.engines()? {
        let ways = ways(engine, flags, &mut found);
        let host = match engine {
            Engine::Soft => Some(host(flags)?),
            Engine::Kvm => None,
        };
        for vcpus in flags.measured_vcpus() {
            let pages = flags.memory_on(engine) / PAGE_SIZE;
            let plan = Plan::new(isa_of(engine), vcpus, pages, flags.overlap)?.on(flags.backing());
            let mut samples = vec![WaySamples::default(); ways.len()];
            for round in rounds(repeat, format!("{engine}: {vcpus} vCPUs")) {
                // This run does not count: meanwhile the reader of the progress message has the
                // core.
                if let Some(first) = ways.first() {
                    first.run(host.as_ref(), &plan, flags.delay(), false)?;
                }
                // The ways take turns, so that other work on the host affects all of them. The
                // order alternates, because each way leaves its state in the caches.
                let mut turns: Vec<_> = ways.iter().zip(&mut samples).collect();
                if round % 2 == 0 {
                    turns.reverse();
                }
                for (way, samples) in turns {
                    let run = |clock| way.run(host.as_ref(), &plan, flags.delay(), clock);
                    samples.measure(&plan, flags.sample(), || run(false))?;
                    if way.delivery.is_some() {
                        samples.add_faults(&run(true)?);
                    }
                }
            }
            found
                .cells
                .extend(ways.iter().zip(samples).map(|(&way, samples)| Cell {
                    way,
                    vcpus,
                    pages_each: plan.each,
                    memory_bytes: plan.toucher.memory_map().memory_bytes(),
                    samples,
                }));
        }
    }
    if let (true, Some(delivery)) = (found.cells.is_empty(), flags.wanted()) {
        return Err(MachineError::NoDelivery(delivery).into());
    }
    Ok(found)
}

/// Host memory for the largest guest on the soft engine.
fn host(flags: &DemandFlags) -> Result<Arc<HostRam>, BenchError> {
    let pages = flags.memory_on(Engine::Soft) / PAGE_SIZE;
    let most = *flags.measured_vcpus().last().unwrap_or(&1);
    let bytes = Plan::memory_bytes(isa_of(Engine::Soft), most, pages)?;
    HostRam::on(flags.backing(), bytes)
}

/// One run on the soft engine. Without `exits` no page is missing.
pub(crate) fn soft_touch(
    host: &Arc<HostRam>,
    plan: &Plan,
    scheme: Scheme,
    exits: Option<Serving>,
) -> Result<Race<()>, BenchError> {
    let (before, end) = (|| {}, || ());
    match scheme {
        Scheme::Parallel => soft::touch::<Scalable, _>(host, plan, exits, &before, &end),
        Scheme::Serialised => soft::touch::<Serialised, _>(host, plan, exits, &before, &end),
    }
}

/// One run on the soft engine with a lock that is handed over in the order of arrival. If there are
/// fewer cores than vCPUs, the next vCPU in the order may have no core, and the run measures the
/// scheduler.
pub(crate) fn in_order_touch(
    host: &Arc<HostRam>,
    plan: &Plan,
    exits: bool,
) -> Result<Race<()>, BenchError> {
    soft::touch::<Watched<OrderedLock>, _>(host, plan, exits.then(Serving::default), &|| {}, &|| ())
}

/// One run of one vCPU on the soft engine with a clock around every fault. Returns the times.
pub(crate) fn clocked_touch(
    host: &Arc<HostRam>,
    plan: &Plan,
    exits: bool,
) -> Result<Vec<FaultTimes>, BenchError> {
    let faults = 2 * plan.each as usize + 1024;
    let before = || Clock::reserve(faults);
    let exits = exits.then(Serving::default);
    let race = soft::touch::<Watched<Clock>, _>(host, plan, exits, &before, &Clock::take)?;
    Ok(race.ended_with.into_iter().flatten().collect())
}

/// Microseconds from a vCPU's fault to its next, without a network. The vCPU only touches missing
/// pages of `bytes` bytes, and each is installed at once.
pub(crate) fn exit_and_resume(
    engine: Engine,
    delivery: Delivery,
    bytes: u64,
) -> Result<Samples, BenchError> {
    let plan = Plan::new(isa_of(engine), 1, bytes / PAGE_SIZE, false)?;
    let serving = Serving {
        clock: true,
        ..Serving::default()
    };
    let race = machine::touch(engine, &plan, Some(delivery), serving)?;
    Ok(race.fault_ns.iter().map(|&ns| ns as f64 / 1e3).collect())
}
