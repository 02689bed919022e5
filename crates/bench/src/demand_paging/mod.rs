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
//! missing: its fault is delivered by one of the ways of [`Delivery`], and 4 KiB are copied into
//! it. Each vCPU has a thread, and all start together (`race`).
//!
//! On the soft engine, runs with parallel faults take turns with runs that hold one exclusive lock
//! around each fault ([`Scheme`]). The difference is the gain of the parallel MMU.
//!
//! **Neighbours.** Below: `hypervisor` for the soft engine, `machine` for KVM, `guest` for the
//! program. The command line shows [`DemandReport`]; [`crate::model`] measures its inputs with the
//! same guests.

mod machine;
mod missing;
mod page;
mod plan;
mod race;
mod report;
mod soft;
#[cfg(test)]
mod tests;
mod ticket;
mod watched;

pub use page::page;
pub use report::{Cell, DemandReport, Unmeasured};

pub(crate) use plan::Plan;
pub(crate) use report::short;
pub(crate) use soft::{HostRam, exit_and_entry};
pub(crate) use ticket::TicketLock;
pub(crate) use watched::{Clock, FaultTimes, Watched};

use crate::serialised::Serialised;
use crate::vm::isa_of;
use crate::{BenchError, Samples};
use pageferry_addr::{PAGE_SIZE, PageSize};
use pageferry_hypervisor::Scalable;
use pageferry_machine::{Delivery, Engine};
use race::Race;
use serde::Serialize;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;
use watched::OrderedLock;

/// The MMU's locking of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scheme {
    /// Faults run in parallel: the hypervisor as it is.
    Parallel,
    /// One exclusive lock is held for each fault, as in KVM before it took faults in parallel. Any
    /// vCPU that finds the lock free takes it, so there are fewer hand-overs than with a lock that
    /// keeps the order of arrival.
    Serialised,
}

impl Scheme {
    /// Both schemes.
    pub const ALL: [Self; 2] = [Self::Parallel, Self::Serialised];

    /// The name in tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parallel => "parallel",
            Self::Serialised => "serialised",
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The settings of the benchmark.
#[derive(Clone, Debug)]
pub struct DemandSetting {
    /// The engines to measure.
    pub engines: Vec<Engine>,
    /// The numbers of vCPUs, each from 1 to [`Self::MAX_VCPUS`].
    pub vcpus: Vec<u32>,
    /// Bytes for each vCPU, a multiple of the page size. By default 16 MiB on the soft engine, and
    /// 1 MiB on KVM, because its faults take longer.
    pub memory_per_vcpu: Option<u64>,
    /// Whether every vCPU touches all pages.
    pub overlap: bool,
    /// The number of pages that are installed at a fault: the aligned block of this size around the
    /// page, as far as it is missing. From 1 to [`Self::MAX_AROUND`].
    pub around: u64,
    /// The number of samples of each figure, at least 1.
    pub repeat: u32,
}

impl DemandSetting {
    /// The largest number of vCPUs in a guest.
    pub const MAX_VCPUS: u32 = pageferry_guest::MAX_VCPUS;

    /// The largest block of pages that are installed together: 2 MiB.
    pub const MAX_AROUND: u64 = PageSize::Size2M.pages();

    /// The default numbers of vCPUs.
    #[must_use]
    pub fn default_vcpus() -> Vec<u32> {
        vec![1, 2, 4, 8, 16, 32, 64]
    }

    /// Bytes for each vCPU on `engine`.
    #[must_use]
    pub fn memory_on(&self, engine: Engine) -> u64 {
        self.memory_per_vcpu.unwrap_or(match engine {
            Engine::Soft => 16 << 20,
            Engine::Kvm => 1 << 20,
        })
    }

    /// The size of the largest guest, in bytes.
    ///
    /// # Errors
    /// If that is more than a guest can address.
    pub fn largest_bytes(&self) -> Result<u64, BenchError> {
        let mut largest = 0;
        for &engine in &self.engines {
            for &vcpus in &self.vcpus {
                let pages = self.memory_on(engine) / PAGE_SIZE;
                largest = largest.max(Plan::memory_bytes(isa_of(engine), vcpus, pages)?);
            }
        }
        Ok(largest)
    }

    pub(crate) fn check(&self) -> Result<(), BenchError> {
        let possible = 1..=Self::MAX_VCPUS;
        if self.repeat == 0 || self.vcpus.is_empty() || self.engines.is_empty() {
            return Err(BenchError::Setting(
                "nothing to measure: no engine, no vCPUs or no samples".into(),
            ));
        }
        if !(1..=Self::MAX_AROUND).contains(&self.around) {
            return Err(BenchError::Setting(format!(
                "cannot install {} pages at a fault: expected 1 to {}",
                self.around,
                Self::MAX_AROUND
            )));
        }
        if let Some(vcpus) = self.vcpus.iter().find(|vcpus| !possible.contains(vcpus)) {
            return Err(BenchError::Setting(format!(
                "cannot measure {vcpus} vCPUs: expected 1 to {}",
                Self::MAX_VCPUS
            )));
        }
        let least = self.engines.iter().map(|&engine| self.memory_on(engine));
        if least.min().is_none_or(|bytes| bytes < PAGE_SIZE) {
            return Err(BenchError::Setting(
                "nothing to touch: a vCPU needs at least one page".into(),
            ));
        }
        Ok(())
    }
}

/// The number of cores that this process may use.
pub(crate) fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, usize::from) as u32
}

/// Measures all engines.
///
/// # Errors
/// [`BenchError::WrongValue`] if a page does not hold the stored value. [`BenchError::Setting`] if
/// these settings cannot be measured. Other errors if the host refuses something.
pub fn demand_paging(
    setting: &DemandSetting,
    progress: &mut dyn FnMut(&str),
) -> Result<DemandReport, BenchError> {
    setting.check()?;
    let began = Instant::now();
    let mut report = DemandReport::new(setting);
    for &engine in &setting.engines {
        let ways = ways(engine, &mut report)?;
        let host = match engine {
            Engine::Soft => Some(host(setting)?),
            Engine::Kvm => None,
        };
        for &vcpus in &setting.vcpus {
            let pages = setting.memory_on(engine) / PAGE_SIZE;
            let plan = Plan::new(machine::isa(engine), vcpus, pages, setting.overlap)?
                .with_around(setting.around);
            let mut samples = vec![WaySamples::default(); ways.len()];
            for round in 1..=setting.repeat {
                progress(&format!(
                    "{engine}: {vcpus} vCPUs, round {round} of {}",
                    setting.repeat
                ));
                // This run does not count: meanwhile the reader of the progress message has the
                // core.
                if let Some(first) = ways.first() {
                    first.run(host.as_ref(), &plan)?;
                }
                // The ways take turns, so that other work on the host affects all of them. The
                // order alternates, because each way leaves its state in the caches.
                let mut turns: Vec<_> = ways.iter().zip(&mut samples).collect();
                if round % 2 == 0 {
                    turns.reverse();
                }
                for (way, samples) in turns {
                    samples.add(&plan, &way.run(host.as_ref(), &plan)?);
                }
            }
            for (way, samples) in ways.iter().zip(&samples) {
                report.add(way, &plan, samples);
            }
        }
    }
    report.end(began.elapsed());
    Ok(report)
}

/// Host memory for the largest guest on the soft engine.
fn host(setting: &DemandSetting) -> Result<Arc<HostRam>, BenchError> {
    let pages = setting.memory_on(Engine::Soft) / PAGE_SIZE;
    let most = setting.vcpus.iter().copied().max().unwrap_or(1);
    HostRam::new(Plan::memory_bytes(isa_of(Engine::Soft), most, pages)?)
}

/// One combination of engine, delivery and locking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) engine: Engine,
    /// `None`: no page is missing.
    pub(crate) delivery: Option<Delivery>,
    /// `None`: the kernel's own locking.
    pub(crate) scheme: Option<Scheme>,
}

impl Way {
    fn run(self, host: Option<&Arc<HostRam>>, plan: &Plan) -> Result<Race<()>, BenchError> {
        match (self.scheme, host) {
            (Some(scheme), Some(host)) => soft_touch(host, plan, scheme, self.delivery.is_some()),
            _ => machine::touch(self.engine, plan, self.delivery),
        }
    }
}

/// One run on the soft engine.
pub(crate) fn soft_touch(
    host: &Arc<HostRam>,
    plan: &Plan,
    scheme: Scheme,
    exits: bool,
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
    soft::touch::<Watched<OrderedLock>, _>(host, plan, exits, &|| {}, &|| ())
}

/// One run of one vCPU on the soft engine with a clock around every fault. Returns the times.
pub(crate) fn clocked_touch(
    host: &Arc<HostRam>,
    plan: &Plan,
    exits: bool,
) -> Result<Vec<FaultTimes>, BenchError> {
    let faults = 2 * plan.each as usize + 1024;
    let before = || Clock::reserve(faults);
    let race = soft::touch::<Watched<Clock>, _>(host, plan, exits, &before, &Clock::take)?;
    Ok(race.ended_with.into_iter().flatten().collect())
}

/// The ways of an engine that this host has. The report gets those that it lacks.
fn ways(engine: Engine, report: &mut DemandReport) -> Result<Vec<Way>, BenchError> {
    match engine {
        Engine::Soft => Ok([None, Some(Delivery::Exit)]
            .into_iter()
            .flat_map(|delivery| {
                Scheme::ALL.map(|scheme| Way {
                    engine,
                    delivery,
                    scheme: Some(scheme),
                })
            })
            .collect()),
        Engine::Kvm => {
            let mut deliveries = vec![None];
            for delivery in [
                Delivery::Userfault,
                Delivery::Poison,
                Delivery::Minor,
                Delivery::Missing,
            ] {
                if machine::has(engine, delivery) {
                    deliveries.push(Some(delivery));
                } else if delivery != Delivery::Userfault {
                    // No released kernel has that one.
                    report.lacks(engine, delivery);
                }
            }
            let way = |delivery| Way {
                engine,
                delivery,
                scheme: None,
            };
            Ok(deliveries.into_iter().map(way).collect())
        }
    }
}

/// The samples of one way with one number of vCPUs.
#[derive(Clone, Debug, Default)]
pub(crate) struct WaySamples {
    /// Touches per second of all vCPUs together.
    rate: Samples,
    /// Touches per second of one vCPU over its own time: the median of the vCPUs.
    per_vcpu: Samples,
    /// Core time of a touch, in nanoseconds.
    touch_ns: Samples,
}

impl WaySamples {
    fn add(&mut self, plan: &Plan, race: &Race<()>) {
        let whole = race.whole.as_secs_f64();
        let busy = f64::from(plan.vcpus().min(cores()));
        self.rate.push(plan.touches() as f64 / whole);
        let each: Samples = race
            .each
            .iter()
            .map(|one| plan.each as f64 / one.as_secs_f64())
            .collect();
        self.per_vcpu.push(each.median());
        self.touch_ns
            .push(whole * 1e9 * busy / plan.touches() as f64);
    }
}
