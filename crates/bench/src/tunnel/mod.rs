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

use crate::args::{Common, Delay};
use crate::vm::check_host_memory;
use crate::{BenchError, Row, is_cancelled, note, stop_on_interrupt};
use ends::Ends;
pub(crate) use ends::TunnelEnd;
use moves::Move;
use pageferry_harness::size;
use pageferry_hosts::{Link, Rate, TwoHosts};
use pageferry_testkit::qemu::{self, Qemu, Streams};
use rows::Rows;
use std::path::PathBuf;

/// `pageferry-bench tunnel`.
#[derive(Debug, clap::Args)]
pub(crate) struct TunnelFlags {
    /// The program of QEMU for RV64
    #[arg(long, value_name = "FILE", default_value = qemu::PROGRAM)]
    peer_program: PathBuf,
    /// The rate of the link in each direction: a number with bit, kbit, mbit or gbit
    #[arg(long, value_name = "RATE", default_value = "1gbit")]
    rate: Rate,
    /// The delay of the link in each direction, and how much longer a packet may take
    #[arg(long, value_name = "DELAY[:JITTER]")]
    link: Option<Delay>,
    /// Guest memory: a whole number and K, M or G (powers of 1024) [default: 256M; with --quick
    /// 32M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,
    /// The bytes that a tunnel keeps at most until they are acknowledged
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = size::parse)]
    window: u64,
    #[command(flatten)]
    tls: Option<ends::TlsFlags>,
    #[command(flatten)]
    pub(crate) common: Common,
}

impl TunnelFlags {
    /// The memory of guests, in bytes.
    fn memory(&self) -> u64 {
        let default = if self.common.quick { 32 } else { 256 };
        self.memory.unwrap_or(default << 20)
    }

    fn check(&self) -> Result<(), BenchError> {
        let (memory, most) = (self.memory(), qemu::MAX_MEMORY);
        if memory.is_multiple_of(8 << 20) && (8 << 20..=most).contains(&memory) {
            return check_host_memory(2 * memory);
        }
        Err(BenchError::Setting(format!(
            "--memory {memory}: expected a multiple of 8 MiB, at most {} MiB",
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
    flags: &'a TunnelFlags,
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
        let ends = Ends::start(self.flags, self.hosts, way == Way::TunnelTls)?;
        let streams = ends.streams();
        Ok((Some(ends), streams))
    }
}

/// Runs `tunnel` and returns its rows. It ends early when the user asks.
///
/// # Errors
/// [`BenchError::Hosts`] if this machine cannot have two hosts. [`BenchError::Setting`] if these
/// settings cannot be measured. [`BenchError::Cancelled`]. Other errors if a process fails.
pub(crate) fn tunnel(flags: &TunnelFlags) -> Result<Vec<Row>, BenchError> {
    flags.check()?;
    // Before the namespaces: an interrupt must not end this process before they are removed.
    stop_on_interrupt()?;
    let rounds = flags.common.rounds(5, 1);
    let qemu = Qemu::find(&flags.peer_program).map_err(BenchError::Setting)?;
    let link = Link::new(flags.rate);
    let link = match flags.link {
        Some(delay) => delay.of(link),
        None => link,
    };
    let hosts = TwoHosts::start(&link)?;
    let conditions = Conditions {
        flags,
        qemu: &qemu,
        hosts: &hosts,
    };
    let mut rows = Rows::default();
    for round in 1..=rounds {
        for what in Move::ALL {
            for way in Way::ALL {
                let lacks_files = way == Way::TunnelTls && flags.tls.is_none();
                if lacks_files || !what.has(way) {
                    continue;
                }
                note(&format!(
                    "{}, {}, round {round} of {rounds}",
                    what.name(),
                    way.name()
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
    Ok(rows.rows(flags, &qemu))
}

#[cfg(test)]
mod tests {
    use crate::args::{Cli, Command};
    use clap::Parser;

    /// Whether these flags measure with TLS. `None`: they are refused.
    fn has_tls(words: &str) -> Option<bool> {
        let words = format!("pageferry-bench tunnel {words}");
        match Cli::try_parse_from(words.split_whitespace()).ok()?.command {
            Command::Tunnel(flags) => Some(flags.tls.is_some()),
            other => panic!("another benchmark: {other:?}"),
        }
    }

    #[test]
    fn tls_needs_all_of_its_files_or_none() {
        assert_eq!(has_tls("--quick"), Some(false));
        let all = "--tls-cert c --tls-key k --tls-ca a --peer-name n";
        assert_eq!(has_tls(all), Some(true));
        assert_eq!(has_tls("--tls-cert c --tls-key k --tls-ca a"), None);
        assert_eq!(has_tls("--peer-name n"), None);
    }
}
