//! `bench postcopy-latency`: how long faults on missing pages delay vCPUs while the push saturates
//! a link.
//!
//! **Guarantee.** Every figure was measured by the run that prints it. No verdict comes from a
//! busy machine: a round counts by the rule of [`noise`] only. Namespaces, processes and huge pages
//! are given back, also when the run fails or is cancelled.
//!
//! **Mechanism.** Source and destination are two processes, whose sockets are in two network
//! namespaces. `tc` shapes the link between them ([`TwoHosts`]). This process is the destination.
//! Each round measures all modes ([`setting::Mode`]) of all columns ([`Column`]), so the ratio of
//! two rows is taken within seconds. The guest starts when it has moved. Its vCPUs store to all
//! pages in random orders, and nothing is sent in pre-copy. The kernel's queue counts the bytes on
//! the link, headers included.
//!
//! **Neighbours.** Below: `hosts` for the link, `migration` for the histograms of stalls. The
//! command line shows the rows.

mod noise;
mod qemu;
mod round;
mod rows;
mod setting;
mod stalls;
#[cfg(test)]
mod tests;

pub(crate) use noise::Ticks;
pub(crate) use setting::LatencyFlags;

use crate::output::Output;
use crate::{BenchError, is_cancelled, note, stop_on_interrupt};
use pageferry_hosts::{HugePages, Link, TwoHosts};
use pageferry_machine::{Backing, Engine, EngineChoice};
use pageferry_testkit::qemu::Qemu;
use round::{Conditions, Round};
use setting::{Column, HostPage, Hosts};
use std::collections::BTreeMap;

/// The differences in method between QEMU's figures and ours.
const QEMU: &str = "It emulates RV64 with the same guest program; nodelay: with TCP_NODELAY, which it does not set. Its \
                    stalls begin when its fault thread has read the fault, ours when the vCPU faults. Its guest has 4 MiB \
                    more, and runs translated code, ours an interpreter's.";

/// Measures all columns. It ends early when the user asks.
///
/// # Errors
/// [`BenchError::Hosts`] if this machine cannot have two hosts. [`BenchError::Setting`] if these
/// settings cannot be measured. [`BenchError::Cancelled`]. Other errors if the host refuses
/// something.
pub(crate) fn postcopy_latency(flags: &LatencyFlags) -> Result<Output, BenchError> {
    flags.check()?;
    // Before the namespaces: an interrupt must not end this process before they are removed.
    stop_on_interrupt()?;
    let qemu = flags.qemu().map(Qemu::find).transpose();
    let qemu = qemu.map_err(BenchError::Setting)?;
    let mut output = Output::default();
    if let Some(Qemu { version, .. }) = &qemu {
        output.notes.push(format!("qemu: QEMU {version}. {QEMU}"));
    }
    let (mut columns, count) = (flags.columns(), flags.rounds());
    let hosts = hosts(flags, &mut columns, &mut output)?;
    let _pages = huge_pages(flags, &mut columns, &mut output);
    let mut rounds: Vec<Vec<Round>> = vec![Vec::new(); columns.len()];
    for number in 1..=count {
        for (column, rounds) in columns.iter().zip(&mut rounds) {
            note(&format!("{}, round {number} of {count}", column.name()));
            let conditions = Conditions {
                flags,
                hosts: &hosts[&column.hosts()],
                column,
                qemu: qemu.as_ref(),
            };
            let round = conditions.round();
            // An interrupt of the terminal ends the source too, so the row fails first.
            if is_cancelled() {
                return Err(BenchError::Cancelled);
            }
            rounds.push(round?);
        }
    }
    for (column, rounds) in columns.iter().zip(&rounds) {
        rows::add(&mut output, flags, column, rounds);
    }
    Ok(output)
}

/// Two hosts for each congestion control and delay. Columns without them are dropped.
fn hosts(
    flags: &LatencyFlags,
    columns: &mut Vec<Column>,
    output: &mut Output,
) -> Result<BTreeMap<Hosts, TwoHosts>, BenchError> {
    let mut hosts = BTreeMap::new();
    let mut refused: BTreeMap<Hosts, pageferry_hosts::Error> = BTreeMap::new();
    for of in columns.iter().map(Column::hosts) {
        if hosts.contains_key(&of) || refused.contains_key(&of) {
            continue;
        }
        let mut link = Link {
            congestion: Some(of.0.clone()),
            ..Link::new(flags.rate)
        };
        if let Some(delay) = of.1 {
            link = delay.of(link);
        }
        match TwoHosts::start(&link) {
            Ok(two) => drop(hosts.insert(of, two)),
            Err(why) => drop(refused.insert(of, why)),
        }
    }
    if hosts.is_empty()
        && let Some((_, why)) = refused.pop_first()
    {
        return Err(why.into());
    }
    for ((congestion, _), why) in refused {
        output
            .notes
            .push(format!("Not measured: {congestion}: {why}"));
    }
    columns.retain(|column| hosts.contains_key(&column.hosts()));
    Ok(hosts)
}

/// Huge pages for both ends, for as long as the result lives. Without them, their columns are
/// dropped.
fn huge_pages(
    flags: &LatencyFlags,
    columns: &mut Vec<Column>,
    output: &mut Output,
) -> Option<HugePages> {
    if !columns
        .iter()
        .any(|column| column.host_page == HostPage::Size2M)
    {
        return None;
    }
    let pages = 2 * flags.memory() / HostPage::Size2M.bytes();
    let taken = kvm_on_huge_pages().and_then(|()| HugePages::of_2_mib(pages));
    match taken {
        Ok(pages) => Some(pages),
        Err(why) => {
            output
                .notes
                .push(format!("Not measured: pages of 2 MiB: {why}"));
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
