//! QEMU as a peer: its post-copy of the same guest program over the same link.
//!
//! **Mechanism.** Two QEMU processes emulate RV64, one in each host's namespace. The source's guest
//! has not run. It starts at the destination when post-copy starts. Pre-copy is slowed down, so it
//! sends next to nothing; post-copy has no limit. The destination's trace points have the stalls.
//! QEMU leaves TCP's Nagle algorithm on. Where a row wants it off, this process borrows the sockets
//! of both and sets the option.
//!
//! **Source.** The idea to compare in this way: the postcopy-preempt series.

use super::round::{Conditions, Measured};
use super::setting::{Column, HostPage, QemuSwitches};
use super::stalls::Stalls;
use crate::BenchError;
use crate::qemu::Qemu;
use crate::vm::toucher;
use pageferry_guest::TouchOrder;
use pageferry_hosts::Host;
use pageferry_machine::Engine;
use serde_json::json;
use std::time::{Duration, Instant};

/// The port of the destination. Its namespace is its own.
const PORT: u16 = 4444;
/// The rate of pre-copy, in bytes a second.
const PRECOPY_RATE: u64 = 100_000;
/// The time between two looks at a migration.
const POLL: Duration = Duration::from_millis(10);

fn failed(why: impl Into<String>) -> BenchError {
    BenchError::Peer(format!("QEMU: {}", why.into()))
}

impl Qemu {
    /// Whether a column can be measured on QEMU.
    pub(super) fn can(column: &Column) -> bool {
        column.host_page == HostPage::Size4K && !column.tls
    }

    /// Moves a guest.
    pub(super) fn measure(
        &self,
        conditions: Conditions<'_>,
        QemuSwitches { preempt, no_delay }: QemuSwitches,
    ) -> Result<Measured, BenchError> {
        let Conditions {
            setting,
            hosts,
            column,
            stop,
            ..
        } = conditions;
        let program = toucher(
            Engine::Soft,
            column.vcpus,
            setting.memory_bytes,
            u64::MAX,
            TouchOrder::Random,
        )?;
        let mut source = self.source(hosts.name(Host::A), program.program())?;
        let mut destination = self.destination(hosts.name(Host::B), program.program())?;
        let capabilities = ["postcopy-ram", "postcopy-preempt"];
        let on = &capabilities[..if preempt { 2 } else { 1 }];
        source.turn_on(on)?;
        destination.turn_on(on)?;
        let uri = format!("tcp:{}:{PORT}", hosts.address(Host::B));
        destination.call("migrate-incoming", json!({ "uri": uri }))?;
        // A limit of 0 is none.
        let limits = json!({ "max-bandwidth": PRECOPY_RATE, "max-postcopy-bandwidth": 0 });
        source.call("migrate-set-parameters", limits)?;
        let sent_before = hosts.sent_bytes(Host::A)?;
        source.call("migrate", json!({ "uri": uri }))?;
        let deadline = Instant::now() + conditions.limit(setting.memory_bytes);
        let mut asked = false;
        let mut undelayed = 0;
        loop {
            if no_delay {
                // The source listens on none, so all are connections.
                undelayed = undelayed.max(source.set_no_delay()?);
                destination.set_no_delay()?;
            }
            let states = [source.migration()?, destination.migration()?];
            if states.iter().all(|state| state == "completed") {
                break;
            }
            if states[0] == "active" && !asked {
                source.call("migrate-start-postcopy", json!({}))?;
                asked = true;
            }
            if stop() {
                return Err(BenchError::Cancelled);
            }
            if Instant::now() > deadline {
                return Err(failed("its migration does not end"));
            }
            std::thread::sleep(POLL);
        }
        if no_delay && undelayed < if preempt { 2 } else { 1 } {
            return Err(failed("it had no connections to set TCP_NODELAY on"));
        }
        let sent = hosts.sent_bytes(Host::A)? - sent_before;
        let traced = destination.traced(deadline)?;
        if traced.stalls.is_empty() {
            return Err(failed("its trace has no stall: did the guest run?"));
        }
        let total_s = traced.total_s;
        Ok(Measured {
            stalls: Stalls::of(traced.stalls.into_iter().map(|ns| (ns, 1))),
            link_busy_percent: total_s.map(|seconds| conditions.link_busy_percent(sent, seconds)),
            total_s,
            delivery: None,
        })
    }
}
