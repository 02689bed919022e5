//! QEMU as a peer: its post-copy of the same guest program over the same link.
//!
//! **Mechanism.** Two QEMU processes emulate RV64, one in each host's namespace. The source's guest
//! has not run. It starts at the destination when post-copy starts.
//!
//! **Source.** The idea to compare in this way: the postcopy-preempt series.

use super::round::{Conditions, Measured};
use super::setting::{Column, HostPage, QemuSwitches};
use super::stalls::Stalls;
use crate::BenchError;
use crate::vm::toucher;
use pageferry_guest::TouchOrder;
use pageferry_hosts::Host;
use pageferry_machine::Engine;
use pageferry_testkit::qemu::{Pair, Qemu, Streams};

impl Column {
    /// Whether it can be measured on QEMU.
    pub(super) fn suits_qemu(&self) -> bool {
        self.host_page == HostPage::Size4K
    }
}

impl Conditions<'_> {
    /// Moves a guest on QEMU.
    pub(super) fn measure_qemu(
        self,
        qemu: &Qemu,
        QemuSwitches { preempt, no_delay }: QemuSwitches,
    ) -> Result<Measured, BenchError> {
        let Conditions {
            flags,
            hosts,
            column,
            ..
        } = self;
        let program = toucher(
            Engine::Soft,
            column.vcpus,
            flags.memory(),
            u64::MAX,
            TouchOrder::Random,
        )?;
        let capabilities = ["postcopy-ram", "postcopy-preempt"];
        let on = &capabilities[..if preempt { 2 } else { 1 }];
        let limit = self.limit(flags.memory());
        let pair = Pair::start(
            qemu,
            hosts,
            program.program(),
            on,
            limit,
            &crate::is_cancelled,
        )?;
        let sent_before = hosts.sent_bytes(Host::A)?;
        let traced = pair.postcopy(&Streams::direct(hosts, no_delay))?;
        let sent = hosts.sent_bytes(Host::A)? - sent_before;
        let total_s = traced.total_s;
        Ok(Measured {
            stalls: Stalls::of(traced.stalls.into_iter().map(|ns| (ns, 1))),
            link_busy_percent: total_s.map(|seconds| self.link_busy_percent(sent, seconds)),
            total_s,
            bulk_rate: None,
            delivery: None,
        })
    }
}
