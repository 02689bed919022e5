//! `bench postcopy-latency`: how long faults on missing pages delay vCPUs while the push saturates
//! a link.
//!
//! **Guarantee.** Every figure was measured by the run that prints it. No verdict comes from a
//! busy machine: a round counts by the rule of [`Noise`] only. Namespaces, processes and huge pages
//! are given back, also when the run fails or is cancelled.
//!
//! **Mechanism.** Source and destination are two processes, whose sockets are in two network
//! namespaces. `tc` shapes the link between them ([`TwoHosts`]). This process is the destination.
//! Each round measures all rows ([`Mode`]) of all columns ([`Column`]), so the ratio of two rows
//! is taken within seconds. The guest starts when it has moved. Its vCPUs store to all pages in
//! random orders, and nothing is sent in pre-copy. The kernel's queue counts the bytes on the link,
//! headers included.
//!
//! **Neighbours.** Below: `hosts` for the link, `migration` for the histograms of stalls. The
//! command line shows [`LatencyReport`].

mod aims;
mod noise;
mod page;
mod qemu;
mod report;
mod round;
mod setting;
mod stalls;
#[cfg(test)]
mod tests;
mod text;

pub(crate) use page::page;
pub(crate) use pageferry_hosts::Rate;
pub(crate) use report::LatencyReport;
pub(crate) use setting::{HostPage, LatencySetting};

use crate::BenchError;
use pageferry_hosts::{HugePages, Link, TwoHosts};
use pageferry_machine::{Backing, Engine, EngineChoice};
use pageferry_testkit::qemu::Qemu;
use round::{Conditions, Round};
use setting::Column;
use std::collections::BTreeMap;
use std::time::Instant;

/// Measures all columns. It ends early when `stop` returns true.
///
/// # Errors
/// [`BenchError::Hosts`] if this machine cannot have two hosts. [`BenchError::Setting`] if these
/// settings cannot be measured. [`BenchError::Cancelled`]. Other errors if the host refuses
/// something.
pub(crate) fn postcopy_latency(
    setting: &LatencySetting,
    stop: &(dyn Fn() -> bool + Sync),
    progress: &mut dyn FnMut(&str),
) -> Result<LatencyReport, BenchError> {
    setting.check()?;
    let began = Instant::now();
    let qemu = setting.qemu.as_deref().map(Qemu::find).transpose();
    let qemu = qemu.map_err(BenchError::Setting)?;
    let mut report = LatencyReport::new(setting, qemu.as_ref());
    let mut columns = setting.columns.clone();
    let hosts = hosts(setting, &mut columns, &mut report)?;
    let _pages = huge_pages(setting, &mut columns, &mut report);
    let mut rounds: Vec<Vec<Round>> = vec![Vec::new(); columns.len()];
    for number in 1..=setting.rounds {
        for (column, rounds) in columns.iter().zip(&mut rounds) {
            progress(&format!(
                "{}, round {number} of {}",
                column.name(),
                setting.rounds
            ));
            let conditions = Conditions {
                setting,
                hosts: &hosts[&column.congestion],
                column,
                qemu: qemu.as_ref(),
                stop,
            };
            let round = conditions.round();
            // An interrupt of the terminal ends the source too, so the row fails first.
            if stop() {
                return Err(BenchError::Cancelled);
            }
            rounds.push(round?);
        }
    }
    for (column, rounds) in columns.iter().zip(&rounds) {
        report.add(setting, column, rounds);
    }
    report.end(began.elapsed());
    Ok(report)
}

/// Two hosts for each congestion control. Columns without them are dropped.
fn hosts(
    setting: &LatencySetting,
    columns: &mut Vec<Column>,
    report: &mut LatencyReport,
) -> Result<BTreeMap<String, TwoHosts>, BenchError> {
    let mut hosts = BTreeMap::new();
    let mut refused: BTreeMap<String, pageferry_hosts::Error> = BTreeMap::new();
    for Column { congestion, .. } in columns.iter() {
        if hosts.contains_key(congestion) || refused.contains_key(congestion) {
            continue;
        }
        let link = Link {
            congestion: Some(congestion.clone()),
            ..Link::new(setting.rate)
        };
        match TwoHosts::start(&link) {
            Ok(two) => drop(hosts.insert(congestion.clone(), two)),
            Err(why) => drop(refused.insert(congestion.clone(), why)),
        }
    }
    if hosts.is_empty()
        && let Some((_, why)) = refused.pop_first()
    {
        return Err(why.into());
    }
    for (congestion, why) in refused {
        report.lacks(congestion, why.to_string());
    }
    columns.retain(|column| hosts.contains_key(&column.congestion));
    Ok(hosts)
}

/// Huge pages for both ends, for as long as the result lives. Without them, their columns are
/// dropped.
fn huge_pages(
    setting: &LatencySetting,
    columns: &mut Vec<Column>,
    report: &mut LatencyReport,
) -> Option<HugePages> {
    if !columns
        .iter()
        .any(|column| column.host_page == HostPage::Size2M)
    {
        return None;
    }
    let pages = 2 * setting.memory_bytes / HostPage::Size2M.bytes();
    let taken = kvm_on_huge_pages().and_then(|()| HugePages::of_2_mib(pages));
    match taken {
        Ok(pages) => Some(pages),
        Err(why) => {
            report.lacks("pages of 2 MiB", why);
            columns.retain(|column| column.host_page != HostPage::Size2M);
            None
        }
    }
}

/// Whether KVM delivers faults on huge pages here. The soft engine maps pages of 4 KiB, on any
/// memory, so a fault there never waits for a whole huge page.
fn kvm_on_huge_pages() -> Result<(), String> {
    pageferry_machine::select(EngineChoice::Only(Engine::Kvm))
        .map_err(|why| format!("only KVM maps such a page whole, and {why}"))?;
    let backing = Backing::Hugetlb2M;
    backing.check(0).map_err(|why| why.to_string())
}
