//! `bench tunnel`: QEMU's migrations through a pair of tunnels, next to the same ones without.
//!
//! **Guarantee.** Every figure was measured by the run that prints it, and each round measures all
//! rows. Namespaces, processes and sockets are gone at the end, also when the run fails or is
//! cancelled.
//!
//! **Mechanism.** Two QEMU processes emulate RV64, one in each of two network namespaces
//! ([`TwoHosts`]), with a shaped link between them. The tunnels are two more processes: this
//! executable again. There are three measurements (`moves`). A guest in
//! post-copy touches all its pages, for the stalls. A paused guest moves in pre-copy, for the rate
//! and the memory of the tunnels. A guest that works all the time moves, for its blackout.
//!
//! **Neighbours.** Below: `qemu` and `hosts`. The command line shows the rows.

mod ends;
mod moves;
mod rows;

pub(crate) use pageferry_hosts::Rate;

use crate::channels::TlsFlags;
use crate::{BenchError, Row, is_cancelled, note};
use ends::Ends;
pub(crate) use ends::TunnelEnd;
use moves::Move;
use pageferry_hosts::{Link, TwoHosts};
use pageferry_testkit::qemu::{Qemu, Streams};
use rows::Rows;
use std::path::PathBuf;

/// The settings of a run.
#[derive(Clone, Debug)]
pub(crate) struct TunnelSetting {
    /// The file of QEMU.
    pub(crate) qemu: PathBuf,
    /// The rate of the link, in each direction.
    pub(crate) rate: Rate,
    /// The memory of guests, in bytes.
    pub(crate) memory_bytes: u64,
    /// The bytes that a tunnel keeps at most until they are acknowledged.
    pub(crate) window_bytes: u64,
    /// The number of rounds. Each measures all rows once.
    pub(crate) rounds: u32,
    /// The files for tunnels with TLS, the same at both ends.
    pub(crate) tls: Option<TlsFlags>,
}

impl TunnelSetting {
    /// QEMU's name in the search path.
    pub(crate) const QEMU: &str = pageferry_testkit::qemu::PROGRAM;
    /// The rounds of a full run.
    pub(crate) const ROUNDS: u32 = 5;
    /// Guest memory of a full run, in bytes.
    pub(crate) const MEMORY: u64 = 256 << 20;
    /// Guest memory of a quick run, in bytes.
    pub(crate) const QUICK_MEMORY: u64 = 32 << 20;

    fn check(&self) -> Result<(), BenchError> {
        let most = pageferry_testkit::qemu::MAX_MEMORY;
        if self.memory_bytes.is_multiple_of(8 << 20)
            && (8 << 20..=most).contains(&self.memory_bytes)
        {
            return Ok(());
        }
        Err(BenchError::Setting(format!(
            "--memory {}: expected a multiple of 8 MiB, at most {} MiB",
            self.memory_bytes,
            most >> 20
        )))
    }
}

/// The way of the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    /// From QEMU to QEMU.
    Direct,
    /// The same, with TCP_NODELAY.
    DirectNoDelay,
    /// Through tunnels.
    Tunnel,
    /// Through tunnels with TLS.
    TunnelTls,
}

impl Way {
    const ALL: [Self; 4] = [
        Self::Direct,
        Self::DirectNoDelay,
        Self::Tunnel,
        Self::TunnelTls,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::DirectNoDelay => "direct, TCP_NODELAY",
            Self::Tunnel => "tunnel",
            Self::TunnelTls => "tunnel, TLS",
        }
    }
}

/// The conditions of all measurements of a run.
struct Conditions<'a> {
    setting: &'a TunnelSetting,
    qemu: &'a Qemu,
    hosts: &'a TwoHosts,
}

impl Conditions<'_> {
    /// The tunnels of a way, if it has them, and where QEMU's streams go.
    fn streams(&self, way: Way) -> Result<(Option<Ends>, Streams), BenchError> {
        if matches!(way, Way::Direct | Way::DirectNoDelay) {
            let no_delay = way == Way::DirectNoDelay;
            return Ok((None, Streams::direct(self.hosts, no_delay)));
        }
        let tls = self.setting.tls.as_ref().filter(|_| way == Way::TunnelTls);
        let ends = Ends::start(self.setting, self.hosts, tls)?;
        let streams = ends.streams();
        Ok((Some(ends), streams))
    }
}

/// Runs `tunnel` and returns its rows. It ends early when the user asks.
///
/// # Errors
/// [`BenchError::Hosts`] if this machine cannot have two hosts. [`BenchError::Setting`] if these
/// settings cannot be measured. [`BenchError::Cancelled`]. Other errors if a process fails.
pub(crate) fn tunnel(setting: &TunnelSetting) -> Result<Vec<Row>, BenchError> {
    setting.check()?;
    let qemu = Qemu::find(&setting.qemu).map_err(BenchError::Setting)?;
    let hosts = TwoHosts::start(&Link::new(setting.rate))?;
    let conditions = Conditions {
        setting,
        qemu: &qemu,
        hosts: &hosts,
    };
    let mut rows = Rows::default();
    for round in 1..=setting.rounds {
        for what in Move::ALL {
            for way in Way::ALL {
                let lacks_files = way == Way::TunnelTls && setting.tls.is_none();
                if lacks_files || !what.has(way) {
                    continue;
                }
                let name = (what.name(), way.name(), setting.rounds);
                note(&format!(
                    "{}, {}, round {round} of {}",
                    name.0, name.1, name.2
                ));
                let measured = conditions.measure(what, way);
                // An interrupt of the terminal ends the other processes too.
                if is_cancelled() {
                    return Err(BenchError::Cancelled);
                }
                rows.add(what, way, measured?);
            }
        }
    }
    Ok(rows.rows(setting, &qemu))
}
