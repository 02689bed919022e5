//! The figures of all rounds, as rows.

use super::moves::{Found, Move};
use super::{TunnelSetting, Way};
use crate::{Bound, Conditions, Row, Samples};
use pageferry_testkit::qemu::Qemu;
use std::collections::BTreeMap;

/// The samples of all rounds.
#[derive(Default)]
pub(super) struct Rows {
    mean_us: BTreeMap<Way, Samples>,
    p50_us: BTreeMap<Way, Samples>,
    /// Bytes a second.
    rates: BTreeMap<(Move, Way), Samples>,
    /// Bytes, of the source's and the destination's tunnel.
    grown: BTreeMap<(Move, Way), [Samples; 2]>,
    blackouts_ms: BTreeMap<Way, Samples>,
}

impl Rows {
    pub(super) fn add(&mut self, what: Move, way: Way, found: Found) {
        match found {
            Found::StallsUs(stalls) => {
                self.mean_us.entry(way).or_default().push(stalls.mean());
                self.p50_us.entry(way).or_default().push(stalls.median());
            }
            Found::Pushed(rate, grown) => {
                self.rates.entry((what, way)).or_default().push(rate);
                if let Some(grown) = grown {
                    let all = self.grown.entry((what, way)).or_default();
                    for (samples, bytes) in all.iter_mut().zip(grown) {
                        samples.push(bytes as f64);
                    }
                }
            }
            Found::BlackoutMs(ms) => self.blackouts_ms.entry(way).or_default().push(ms),
        }
    }

    pub(super) fn rows(&self, setting: &TunnelSetting, qemu: &Qemu) -> Vec<Row> {
        let link = format!("QEMU {}, {}", qemu.version, setting.rate);
        let here = |bytes, note: &str| Conditions::here(1, bytes, format!("{note}; {link}"));
        let bytes = setting.memory_bytes;
        let mut rows = Vec::new();
        let note = "a stall of the guest in post-copy with postcopy-preempt, while all other pages \
                    are pushed";
        let half = |way| (way == Way::Tunnel).then_some(("ratio <= 0.5", Bound::RatioAtMost(0.5)));
        let ways =
            |case, unit, of: &BTreeMap<Way, Samples>, base, aim: Aim<'_>, how: &Conditions| {
                rows_of(
                    case,
                    unit,
                    of.iter()
                        .map(|(way, all)| (*way, way.name().to_owned(), all)),
                    base,
                    aim,
                    how,
                )
            };
        let how = here(bytes, note);
        let none: Aim<'_> = &|_| None;
        rows.extend(ways(
            "tunnel.urgent_mean",
            "us",
            &self.mean_us,
            Way::DirectNoDelay,
            &half,
            &how,
        ));
        rows.extend(ways(
            "tunnel.urgent_p50",
            "us",
            &self.p50_us,
            Way::DirectNoDelay,
            none,
            &how,
        ));
        for what in [Move::Push, Move::PushMultifd] {
            let how = here(bytes, "pre-copy of a guest that does not run");
            let of = self.rates.iter().filter(|((of, _), _)| *of == what);
            let of =
                of.map(|((_, way), all)| (*way, format!("{}, {}", what.name(), way.name()), all));
            let aim = |way| match way {
                Way::Tunnel => Some(("ratio >= 0.9", Bound::RatioAtLeast(0.9))),
                Way::TunnelTls => Some(("ratio >= 0.8", Bound::RatioAtLeast(0.8))),
                Way::Direct | Way::DirectNoDelay => None,
            };
            rows.extend(rows_of(
                "tunnel.push_rate",
                "B/s",
                of,
                Way::Direct,
                &aim,
                &how,
            ));
        }
        let note = "from the last progress of a busy guest at the source to the first at the \
                    destination; post-copy comes in the first pass of pre-copy";
        let tenth = |way| (way == Way::Tunnel).then_some(("ratio <= 1.1", Bound::RatioAtMost(1.1)));
        let how = here(bytes, note);
        rows.extend(ways(
            "tunnel.blackout",
            "ms",
            &self.blackouts_ms,
            Way::Direct,
            &tenth,
            &how,
        ));
        for ((what, way), grown) in &self.grown {
            for (samples, end) in grown.iter().zip(["source", "destination"]) {
                let subject = format!("{end}: {}, {}", what.name(), way.name());
                let how = here(
                    bytes,
                    "most memory of the tunnel's process, less that before",
                );
                let row = samples.row("tunnel.memory", subject, "B", how);
                rows.push(row.against("--window", setting.window_bytes as f64));
            }
        }
        rows
    }
}

/// The target of a way.
type Aim<'a> = &'a dyn Fn(Way) -> Option<(&'static str, Bound)>;

/// Rows of one case, with ratios to the way `base`.
fn rows_of<'a>(
    case: &'static str,
    unit: &'static str,
    of: impl Iterator<Item = (Way, String, &'a Samples)>,
    base: Way,
    aim: Aim<'_>,
    how: &Conditions,
) -> Vec<Row> {
    let all: Vec<_> = of.collect();
    let compared = all.iter().find(|(way, ..)| *way == base);
    let compared = compared.map(|(_, name, samples)| (name.clone(), samples.median()));
    let rows = all.into_iter().map(|(way, subject, samples)| {
        let row = samples.row(case, subject, unit, how.clone());
        let row = match &compared {
            Some((name, value)) if way != base => row.against(name.as_str(), *value),
            _ => row,
        };
        match aim(way) {
            Some((words, bound)) => row.aiming_at(words, bound),
            None => row,
        }
    });
    rows.collect()
}
