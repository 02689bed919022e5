//! What a migration did: one record, shown as a table, as JSON, or as an HTML page.
//!
//! **Guarantee.** Every number is measured, or a dash; where a number is a bound and not exact, it
//! says so.
//!
//! **Mechanism.** [`Sent`] is the source's half and [`Received`] the destination's, which travels
//! over the control socket; [`Report`] joins what there is of them. [`table`], [`json`] and
//! [`html`] only show.

mod conditions;
mod halves;
mod html;
mod json;
mod stalls;
mod table;
mod timeline;

pub(crate) use conditions::Conditions;
pub(crate) use halves::{PhaseAt, Received, Sent};
pub(crate) use stalls::Stalls;

use crate::exit::{Exit, Failure};
use crate::sampler::Sample;
use pageferry_guest::Verdict;
use pageferry_migration::PageCounts;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Nanoseconds a millisecond.
const MS: f64 = 1e6;

/// The outcome of both verifications.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Verified {
    /// No vCPU has found a wrong page in its own checks.
    pub(crate) guest: bool,
    /// The host found every page as the vCPUs' counters say it must be.
    pub(crate) host: bool,
    /// What was compared, and what was wrong, in words.
    pub(crate) words: String,
}

impl Verified {
    /// The outcome in words and as two truths.
    pub(crate) fn new(verdict: &Verdict) -> Self {
        let mut words = format!(
            "{} pages compared by the host, {} page visits checked by the guest",
            verdict.pages_checked, verdict.pages_done
        );
        if let Some(first) = verdict.errors.first() {
            words.push_str(&format!(
                "; the host found {} wrong pages, the first: page {} is {}",
                verdict.error_count, first.page.0, first.kind
            ));
        }
        if let Some(first) = verdict.first_guest_error {
            words.push_str(&format!(
                "; the guest found {} wrong pages, the first: vCPU {} found page {} {}",
                verdict.guest_errors, first.vcpu, first.report.page.0, first.report.kind
            ));
        }
        Self {
            guest: verdict.guest_holds(),
            host: verdict.host_holds(),
            words,
        }
    }

    /// Whether both hold.
    pub(crate) fn holds(&self) -> bool {
        self.guest && self.host
    }
}

/// How long no guest instruction ran anywhere.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Blackout {
    /// Milliseconds.
    pub(crate) ms: f64,
    /// What the number is.
    pub(crate) kind: BlackoutKind,
}

/// What a blackout's number means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlackoutKind {
    /// From the last guest instruction at the source to the first at the destination.
    Exact,
    /// To the guest's first touch of data at the destination, a little later than its first
    /// instruction.
    FirstTouch,
    /// To the word of the destination that the guest runs, as it arrived at the source.
    UpperBound,
}

impl BlackoutKind {
    /// The name in JSON.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::FirstTouch => "first-touch",
            Self::UpperBound => "upper-bound",
        }
    }

    /// The explanation for people.
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Self::Exact => "last guest instruction at the source to first at the destination",
            Self::FirstTouch => {
                "last guest instruction at the source to the guest's first touch of data at the destination: \
                 an upper bound, as this engine does not tell its first instruction"
            }
            Self::UpperBound => {
                "last guest instruction at the source to the destination's word that the guest runs: \
                 an upper bound, seen from the source"
            }
        }
    }
}

/// A whole migration, or what one side knows of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Who ran the guest.
    pub(crate) engine: String,
    /// How many vCPUs.
    pub(crate) vcpus: u32,
    /// RAM in bytes.
    pub(crate) memory_bytes: u64,
    /// The source's half.
    pub(crate) sent: Option<Sent>,
    /// The destination's half.
    pub(crate) received: Option<Received>,
    /// Both verifications, where they were made.
    pub(crate) verified: Option<Verified>,
    /// What it was measured on.
    pub(crate) conditions: Conditions,
}

impl Report {
    /// From the first connection attempt to the confirmed end, milliseconds.
    pub(crate) fn total_ms(&self) -> Option<f64> {
        let own =
            |r: &Received| Some((r.phases.last()?.at_ns - r.phases.first()?.at_ns) as f64 / MS);
        match &self.sent {
            Some(sent) => Some(sent.total_ns as f64 / MS),
            None => self.received.as_ref().and_then(own),
        }
    }

    /// The blackout. With both halves (one host, one clock) between the two ends; else the source's
    /// bound.
    pub(crate) fn blackout(&self) -> Option<Blackout> {
        let sent = self.sent.as_ref()?;
        let (end, kind) = match self
            .received
            .as_ref()
            .map(|r| (r.first_instruction_ns, r.first_touch_ns))
        {
            Some((Some(exact), _)) => (exact, BlackoutKind::Exact),
            Some((None, Some(touch))) => (touch, BlackoutKind::FirstTouch),
            Some((None, None)) | None => (sent.confirmed_ns, BlackoutKind::UpperBound),
        };
        Some(Blackout {
            ms: end.saturating_sub(sent.last_stop_ns) as f64 / MS,
            kind,
        })
    }

    /// Pages by the way they went, as the source counts them.
    pub(crate) fn pages(&self) -> PageCounts {
        let sent = self.sent.as_ref().map(|s| s.pages.into());
        sent.or_else(|| self.received.as_ref().map(|r| r.pages.into()))
            .unwrap_or_default()
    }

    /// The stalls, where the destination told of them.
    pub(crate) fn stalls(&self) -> Option<&Stalls> {
        self.received.as_ref().map(|r| &r.stalls)
    }

    /// Bytes of pages a second while pages were being sent: from the first pass (or the
    /// switch-over, if there was none) to the completion.
    pub(crate) fn throughput(&self) -> Option<f64> {
        let sent = self.sent.as_ref()?;
        let start = |name: &str| sent.phases.iter().find(|p| p.name == name).map(|p| p.at_ns);
        let from = start("pre-copy").or_else(|| start("switch-over"))?;
        let ns = start("completion")?
            .checked_sub(from)
            .filter(|&ns| ns > 0)?;
        Some(sent.page_bytes as f64 * 1e9 / ns as f64)
    }

    /// Bytes of pages a second while the background push ran.
    pub(crate) fn background_throughput(&self) -> Option<f64> {
        let sent = self
            .sent
            .as_ref()
            .filter(|s| s.background_ns > 0 && s.background_bytes > 0)?;
        Some(sent.background_bytes as f64 * 1e9 / sent.background_ns as f64)
    }

    /// The guest's progress on both sides, in order of time. What the stopped source shows holds
    /// for the whole blackout.
    pub(crate) fn samples(&self) -> Vec<Sample> {
        let here = || self.received.iter().flat_map(|r| &r.samples);
        let Some(sent) = &self.sent else {
            return here().cloned().collect();
        };
        let (before, after): (Vec<_>, Vec<_>) = sent
            .samples
            .iter()
            .cloned()
            .partition(|s| s.at_ns <= sent.last_stop_ns);
        let end = self.blackout().map_or(sent.last_stop_ns, |b| {
            sent.last_stop_ns + (b.ms * MS) as u64
        });
        let stopped = after.into_iter().next().into_iter().flat_map(|sample| {
            [sent.last_stop_ns, end].map(|at_ns| Sample {
                at_ns,
                done: sample.done.clone(),
            })
        });
        before
            .into_iter()
            .chain(stopped)
            .chain(here().filter(|s| s.at_ns > end).cloned())
            .collect()
    }

    /// As a table for people.
    pub(crate) fn table(&self) -> String {
        table::show(self)
    }

    /// As one JSON object.
    pub(crate) fn json(&self) -> serde_json::Value {
        json::show(self)
    }

    /// As a self-contained HTML page.
    ///
    /// # Errors
    /// When a chart cannot be drawn.
    pub(crate) fn html(&self) -> Result<String, String> {
        html::show(self)
    }
}

/// Writes a page that was drawn to `path`: whole, or not at all.
///
/// # Errors
/// [`Exit::Usage`] where the file cannot be written, [`Exit::Internal`] where the page could not be
/// drawn.
pub(crate) fn write(path: &Path, drawn: Result<String, String>) -> Result<(), Failure> {
    let page = drawn
        .map_err(|why| Failure::new(Exit::Internal, format!("cannot draw the report: {why}")))?;
    pageferry_bench::kit::replace_file(path, &page).map_err(|why| {
        Failure::new(
            Exit::Usage,
            format!("cannot write the report to {}: {why}", path.display()),
        )
    })
}

#[cfg(test)]
mod tests;
