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

/// What all rows of a case have.
struct Case {
    unit: &'static str,
    note: &'static str,
    /// Whose figure is the baseline.
    base: Way,
    aim: fn(Way) -> Option<Bound>,
}

fn case(name: &str) -> Case {
    let stall = "a stall of the guest in post-copy with postcopy-preempt, while all other pages are \
                 pushed";
    match name {
        "tunnel.urgent_mean" | "tunnel.urgent_p50" => Case {
            unit: "us",
            note: stall,
            base: Way::DirectNoDelay,
            aim: match name {
                "tunnel.urgent_mean" => {
                    |way| (way == Way::Tunnel).then_some(Bound::RatioAtMost(0.5))
                }
                _ => |_| None,
            },
        },
        "tunnel.push_rate" => Case {
            unit: "B/s",
            note: "pre-copy of a guest that does not run",
            base: Way::Direct,
            aim: |way| match way {
                Way::Tunnel => Some(Bound::RatioAtLeast(0.9)),
                Way::TunnelTls => Some(Bound::RatioAtLeast(0.8)),
                Way::Direct | Way::DirectNoDelay => None,
            },
        },
        _ => Case {
            unit: "ms",
            note: "from the last progress of a busy guest at the source to the first at the \
                   destination; post-copy comes in the first pass of pre-copy",
            base: Way::Direct,
            aim: |way| (way == Way::Tunnel).then_some(Bound::RatioAtMost(1.1)),
        },
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
            let note = format!("{note}; QEMU {}, {}", qemu.version, flags.rate);
            Conditions::here(1, flags.memory(), note)
        };
        let mut rows = Vec::new();
        for (&(name, what, way), samples) in &self.samples {
            let Case {
                unit,
                note,
                base,
                aim,
            } = case(name);
            let subject = match what {
                Move::Push | Move::PushMultifd => format!("{}, {}", what.name(), way.name()),
                Move::Urgent | Move::Blackout => way.name().to_owned(),
            };
            let mut row = samples.row(name, subject, unit, here(note));
            let other = self.samples.get(&(name, what, base));
            if let Some(other) = other.filter(|_| way != base) {
                row = row.against(base.name(), other.median());
            }
            rows.push(match aim(way) {
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
