//! The figures of all rounds, as rows.

use super::moves::{Found, Move};
use super::{TunnelFlags, Way};
use crate::{Bound, Conditions, Row, Samples};
use pageferry_testkit::qemu::Qemu;
use std::collections::BTreeMap;

/// The samples of all rounds.
#[derive(Default)]
pub(super) struct Rows {
    /// By case.
    samples: BTreeMap<(&'static str, Move, Way), Samples>,
    /// Bytes, by the end whose tunnel took them.
    grown: BTreeMap<(Move, Way, &'static str), Samples>,
}

/// The unit of a case, how it is measured, and the way whose figure is the baseline.
fn how(case: &str) -> (&'static str, &'static str, Way) {
    match case {
        "tunnel.push_rate" => ("B/s", "pre-copy of a guest that does not run", Way::Direct),
        "tunnel.blackout" => (
            "ms",
            "from the last progress of a busy guest at the source to the first at the destination; \
             post-copy comes in the first pass of pre-copy",
            Way::Direct,
        ),
        _ => (
            "us",
            "a stall of the guest in post-copy with postcopy-preempt, while all other pages are \
             pushed",
            Way::DirectNoDelay,
        ),
    }
}

fn aim(case: &str, way: Way) -> Option<Bound> {
    match (case, way) {
        ("tunnel.urgent_mean", Way::Tunnel) => Some(Bound::RatioAtMost(0.5)),
        ("tunnel.push_rate", Way::Tunnel) => Some(Bound::RatioAtLeast(0.9)),
        ("tunnel.push_rate", Way::TunnelTls) => Some(Bound::RatioAtLeast(0.8)),
        ("tunnel.blackout", Way::Tunnel) => Some(Bound::RatioAtMost(1.1)),
        _ => None,
    }
}

impl Rows {
    pub(super) fn add(&mut self, what: Move, way: Way, found: Found) {
        let mut push = |case, sample| {
            self.samples
                .entry((case, what, way))
                .or_default()
                .push(sample);
        };
        match found {
            Found::StallsUs(stalls) => {
                push("tunnel.urgent_mean", stalls.mean());
                push("tunnel.urgent_p50", stalls.median());
            }
            Found::Pushed(rate, grown) => {
                push("tunnel.push_rate", rate);
                for (end, bytes) in ["source", "destination"]
                    .into_iter()
                    .zip(grown.into_iter().flatten())
                {
                    let samples = self.grown.entry((what, way, end)).or_default();
                    samples.push(bytes as f64);
                }
            }
            Found::BlackoutMs(ms) => push("tunnel.blackout", ms),
        }
    }

    pub(super) fn rows(&self, flags: &TunnelFlags, qemu: &Qemu) -> Vec<Row> {
        let here = |note: &str| {
            let link = flags
                .link
                .map(|delay| format!(", {delay}"))
                .unwrap_or_default();
            let note = format!("{note}; QEMU {}, {}{link}", qemu.version, flags.rate);
            Conditions::here(1, flags.memory(), note)
        };
        let mut rows = Vec::new();
        for (&(name, what, way), samples) in &self.samples {
            let (unit, note, base) = how(name);
            let subject = match what {
                Move::Push | Move::PushMultifd => format!("{}, {}", what.name(), way.name()),
                Move::Urgent | Move::Blackout => way.name().to_owned(),
            };
            let mut row = samples.row(name, subject, unit, here(note));
            let other = self.samples.get(&(name, what, base));
            if let Some(other) = other.filter(|_| way != base) {
                row = row.against(base.name(), other.median());
            }
            rows.push(match aim(name, way) {
                Some(bound) => row.aiming_at(bound),
                None => row,
            });
        }
        for (&(what, way, end), samples) in &self.grown {
            let subject = format!("{end}: {}, {}", what.name(), way.name());
            let how = here("most memory of the tunnel's process, less that before");
            let row = samples.row("tunnel.memory", subject, "B", how);
            rows.push(row.against("--window", flags.window as f64));
        }
        rows
    }
}
