//! `bench demand-paging`: how fast vCPUs get memory that they touch for the first time, all at
//! once.
//!
//! **Guarantee.** Every figure here was measured by the run that prints it, and every run checks
//! that each page has what a vCPU stored to it. What is simulated is in [`crate::model`] and says
//! so.
//!
//! **Mechanism.** After `demand_paging_test` of the kernel's selftests: each vCPU stores to one
//! word of each page of its part of guest memory (or, overlapping, of all of it) in ascending
//! order; no page is mapped in the second-stage tables at first. Either host memory is all there
//! and a touch costs the hypervisor's fault path only, or each page is missing, is delivered by one
//! of the ways of [`Delivery`], and is brought by copying 4 KiB. One thread a vCPU; all begin
//! together (`race`).
//!
//! On the soft engine faults run in parallel, and in turns with them also with one exclusive lock
//! around each ([`Scheme`]): what the parallel MMU is worth.
//!
//! **Neighbours.** Below: `hypervisor` for the soft engine, `machine` for KVM, `guest` for the
//! program. The command line shows [`DemandReport`]; [`crate::model`] measures its inputs with the
//! same guests.

mod bring;
mod machine;
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
pub(crate) use soft::{Host, exit_and_entry};
pub(crate) use ticket::Ticket;
pub(crate) use watched::{Clock, Timed, Watched};

use crate::serialised::Serialised;
use crate::vm::isa_of;
use crate::{BenchError, Samples};
use pageferry_addr::PAGE_SIZE;
use pageferry_hypervisor::Scalable;
use pageferry_machine::{Delivery, Engine};
use race::Race;
use serde::Serialize;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;
use watched::InOrder;

/// How the MMU lets vCPUs fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scheme {
    /// All at once: the hypervisor as it is.
    Parallel,
    /// One after the other: one exclusive lock is held for each fault, as KVM's MMU had it before
    /// faults ran in parallel. Whoever comes by when the lock is free takes it, which spares
    /// hand-overs that a lock in order has.
    Serialised,
}

impl Scheme {
    /// Both.
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

/// What to measure.
#[derive(Clone, Debug)]
pub struct DemandSetting {
    /// On which engines.
    pub engines: Vec<Engine>,
    /// With how many vCPUs each.
    pub vcpus: Vec<u32>,
    /// Bytes for each vCPU, whole pages. By default 16 MiB on the soft engine, and 1 MiB on KVM,
    /// whose faults take longer.
    pub memory_per_vcpu: Option<u64>,
    /// Whether every vCPU touches the pages of all.
    pub overlap: bool,
    /// How many samples each figure is the median of.
    pub repeat: u32,
}

impl DemandSetting {
    /// The most vCPUs a guest can have.
    pub const MAX_VCPUS: u32 = pageferry_guest::MAX_VCPUS;

    /// The numbers of vCPUs unless others are named.
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

    /// The bytes of guest memory that the largest of its guests needs.
    ///
    /// # Errors
    /// When no guest can have so much.
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
        if let Some(vcpus) = self.vcpus.iter().find(|vcpus| !possible.contains(vcpus)) {
            return Err(BenchError::Setting(format!(
                "cannot measure {vcpus} vCPUs: from 1 to {} it can be",
                Self::MAX_VCPUS
            )));
        }
        let least = self.engines.iter().map(|&engine| self.memory_on(engine));
        if least.min().is_none_or(|bytes| bytes < PAGE_SIZE) {
            return Err(BenchError::Setting(
                "a vCPU without a page has nothing to touch".into(),
            ));
        }
        Ok(())
    }
}

/// The cores this process may run on.
pub(crate) fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, usize::from) as u32
}

/// Measures on all engines.
///
/// # Errors
/// [`BenchError::WrongValue`] where a page has not what a vCPU stored to it;
/// [`BenchError::Setting`] where the setting asks for what cannot be measured; others where the
/// host refuses something.
pub fn demand_paging(
    setting: &DemandSetting,
    tell: &mut dyn FnMut(&str),
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
            let plan = Plan::new(machine::isa(engine), vcpus, pages, setting.overlap)?;
            let mut samples = vec![Taken::default(); ways.len()];
            for round in 1..=setting.repeat {
                tell(&format!(
                    "{engine}: {vcpus} vCPUs, round {round} of {}",
                    setting.repeat
                ));
                // Once for nothing: whoever reads what was told runs now.
                if let Some(first) = ways.first() {
                    first.run(host.as_ref(), &plan)?;
                }
                // In turns, so that what else the host does meets all of them; to and fro, as each
                // leaves its mark in the caches.
                let mut turns: Vec<_> = ways.iter().zip(&mut samples).collect();
                if round % 2 == 0 {
                    turns.reverse();
                }
                for (way, taken) in turns {
                    taken.add(&plan, &way.run(host.as_ref(), &plan)?);
                }
            }
            for (way, taken) in ways.iter().zip(&samples) {
                report.add(way, &plan, taken);
            }
        }
    }
    report.end(began.elapsed());
    Ok(report)
}

/// Host memory for the largest guest of the soft engine.
fn host(setting: &DemandSetting) -> Result<Arc<Host>, BenchError> {
    let pages = setting.memory_on(Engine::Soft) / PAGE_SIZE;
    let most = setting.vcpus.iter().copied().max().unwrap_or(1);
    Host::new(Plan::memory_bytes(isa_of(Engine::Soft), most, pages)?)
}

/// One way to page on demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) engine: Engine,
    /// `None`: no page is missing.
    pub(crate) delivery: Option<Delivery>,
    /// `None`: the kernel's own.
    pub(crate) scheme: Option<Scheme>,
}

impl Way {
    fn run(self, host: Option<&Arc<Host>>, plan: &Plan) -> Result<Race<()>, BenchError> {
        match (self.scheme, host) {
            (Some(scheme), Some(host)) => soft_touch(host, plan, scheme, self.delivery.is_some()),
            _ => machine::touch(self.engine, plan, self.delivery),
        }
    }
}

/// One run on the soft engine.
pub(crate) fn soft_touch(
    host: &Arc<Host>,
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

/// One run on the soft engine with one lock that is handed over in the order in which faults asked
/// for it. With fewer cores than vCPUs the next in the order may have none, and what is measured is
/// the scheduler.
pub(crate) fn in_order_touch(
    host: &Arc<Host>,
    plan: &Plan,
    exits: bool,
) -> Result<Race<()>, BenchError> {
    soft::touch::<Watched<InOrder>, _>(host, plan, exits, &|| {}, &|| ())
}

/// One run of one vCPU on the soft engine with a clock around every fault: what it measured.
pub(crate) fn clocked_touch(
    host: &Arc<Host>,
    plan: &Plan,
    exits: bool,
) -> Result<Vec<Timed>, BenchError> {
    let faults = 2 * plan.each as usize + 1024;
    let before = || Clock::reserve(faults);
    let race = soft::touch::<Watched<Clock>, _>(host, plan, exits, &before, &Clock::take)?;
    Ok(race.said.into_iter().flatten().collect())
}

/// The ways of an engine that this host has; those it has not are noted.
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
            for delivery in [Delivery::Poison, Delivery::Minor, Delivery::Missing] {
                if machine::has(engine, delivery) {
                    deliveries.push(Some(delivery));
                } else {
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

/// Samples of one way with one number of vCPUs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Taken {
    /// Touches a second, all vCPUs together.
    rate: Samples,
    /// Touches a second of a vCPU by itself: the median of the vCPUs.
    per_vcpu: Samples,
    /// Nanoseconds of a core for a touch.
    touch_ns: Samples,
}

impl Taken {
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
