//! `pageferry-bench postcopy-latency`: stalls on a link that the push saturates.

use super::check_host_memory;
use crate::BenchError;
use crate::args::{LatencyFlags, PageFlag};
use crate::postcopy_latency::{HostPage, LatencySetting};

/// Measures, prints the figures, and writes the requested page.
pub(super) fn postcopy_latency(flags: &LatencyFlags) -> Result<(), BenchError> {
    let setting = setting(flags)?;
    check_host_memory(setting.memory_bytes, 2)?;
    // Before the namespaces: an interrupt must not end this process before they are removed.
    crate::stop_on_interrupt()?;
    let output = crate::postcopy_latency::postcopy_latency(&setting)?;
    output.show(flags.json, flags.report.as_deref())
}

fn setting(flags: &LatencyFlags) -> Result<LatencySetting, BenchError> {
    let (memory_bytes, rounds, host_pages) = if flags.quick {
        (LatencySetting::QUICK_MEMORY, 1, vec![HostPage::Size4K])
    } else {
        let both = vec![HostPage::Size4K, HostPage::Size2M];
        (LatencySetting::MEMORY, LatencySetting::ROUNDS, both)
    };
    let named = once(&flags.pages).into_iter().map(|page| match page {
        PageFlag::Size4K => HostPage::Size4K,
        PageFlag::Size2M => HostPage::Size2M,
    });
    let host_pages = if flags.pages.is_empty() {
        host_pages
    } else {
        named.collect()
    };
    let tls = flags.tls.given();
    let protections: &[bool] = if tls.is_some() {
        &[false, true]
    } else {
        &[false]
    };
    Ok(LatencySetting {
        engine: pageferry_machine::select(flags.engine)?.0,
        columns: LatencySetting::columns(
            &host_pages,
            &once(&flags.vcpus),
            protections,
            &once(&flags.congestion),
        ),
        rate: flags.rate,
        memory_bytes: flags.memory.unwrap_or(memory_bytes),
        rounds: flags.repeat.unwrap_or(rounds),
        tls,
        qemu: flags.peer.map(|_| flags.peer_program.clone()),
    })
}

/// The values without repetitions, in their order.
fn once<T: Clone + PartialEq>(values: &[T]) -> Vec<T> {
    let mut kept: Vec<T> = Vec::new();
    for value in values {
        if !kept.contains(value) {
            kept.push(value.clone());
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn setting(more: &[&str]) -> LatencySetting {
        let words = [&["pageferry-bench", "postcopy-latency"], more].concat();
        let Command::PostcopyLatency(flags) = Cli::parse_from(words).command else {
            panic!("another benchmark");
        };
        super::setting(&flags).unwrap_or_else(|_| panic!("soft runs everywhere"))
    }

    #[test]
    fn a_full_run_has_both_page_sizes_and_nine_rounds() {
        let full = setting(&[]);
        assert_eq!((full.columns.len(), full.rounds), (4, 9));
        assert_eq!(full.memory_bytes, 256 << 20);
        assert_eq!(full.rate.bytes_per_second(), 125_000_000);
    }

    #[test]
    fn a_quick_run_is_small_unless_more_is_named() {
        let quick = setting(&["--quick"]);
        assert_eq!((quick.columns.len(), quick.rounds), (2, 1));
        let more = setting(&[
            "--quick",
            "--pages",
            "4k,2M,4k",
            "--congestion",
            "cubic,bbr",
        ]);
        assert_eq!(more.columns.len(), 8);
        assert_eq!(setting(&["--quick", "--repeat", "3"]).rounds, 3);
    }

    #[test]
    fn a_peer_is_measured_only_if_it_is_named() {
        assert_eq!(setting(&[]).qemu, None);
        let peer = |more: &[&str]| setting(&[&["--peer", "qemu"], more].concat()).qemu;
        assert_eq!(peer(&[]), Some("qemu-system-riscv64".into()));
        assert_eq!(peer(&["--peer-program", "q"]), Some("q".into()));
    }

    #[test]
    fn files_for_tls_add_columns() {
        let files = [
            "--tls-cert",
            "c",
            "--tls-key",
            "k",
            "--tls-ca",
            "a",
            "--peer-name",
            "n",
        ];
        let setting = setting(&files);
        assert_eq!(setting.columns.len(), 8);
        assert_eq!(
            setting.columns.iter().filter(|column| column.tls).count(),
            4
        );
    }
}
