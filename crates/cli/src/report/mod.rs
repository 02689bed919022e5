//! The record of a migration, shown as a table, as JSON, or as an HTML page.
//!
//! **Guarantee.** Every number is measured, or a dash. A number that is only a bound is marked as
//! one.
//!
//! **Mechanism.** [`Sent`] is the source's half. [`Received`] is the destination's half, and
//! travels over the control socket. [`Report`] joins the halves that exist. [`table`], [`json`] and
//! [`html`] only show.

mod conditions;
mod guest_view;
mod halves;
mod html;
mod json;
mod stalls;
mod table;
mod timeline;

pub(crate) use conditions::Conditions;
pub(crate) use guest_view::GuestView;
pub(crate) use halves::{LargeMappings, PhaseAt, Protection, Received, Sent, ns};
pub(crate) use stalls::Stalls;

use crate::exit::{Exit, Failure};
use crate::sampler::Sample;
use pageferry_guest::Verdict;
use pageferry_migration::PageCounts;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Nanoseconds per millisecond.
const MS: f64 = 1e6;

/// The outcome of both verifications.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Verified {
    /// No vCPU has found a wrong page in its own checks.
    pub(crate) guest: bool,
    /// The host found the contents of every page as expected from the vCPUs' counters.
    pub(crate) host: bool,
    /// The extent of the check and the errors, in words.
    pub(crate) words: String,
}

impl Verified {
    /// The outcome as words and as two booleans.
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

    /// Whether both verifications hold.
    pub(crate) fn holds(&self) -> bool {
        self.guest && self.host
    }
}

/// The time in which no guest instruction ran anywhere.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Blackout {
    /// Milliseconds.
    pub(crate) ms: f64,
    /// The kind of the number.
    pub(crate) kind: BlackoutKind,
}

/// The meaning of a blackout's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlackoutKind {
    /// From the last guest instruction at the source to the first at the destination.
    Exact,
    /// To the guest's first touch of data at the destination, a little later than its first
    /// instruction.
    FirstTouch,
    /// To the arrival, at the source, of the destination's message that the guest runs.
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

/// A whole migration, or one side's record of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    /// The engine that ran the guest.
    pub(crate) engine: String,
    /// The number of vCPUs.
    pub(crate) vcpus: u32,
    /// RAM in bytes.
    pub(crate) memory_bytes: u64,
    /// The source's half.
    pub(crate) sent: Option<Sent>,
    /// The destination's half.
    pub(crate) received: Option<Received>,
    /// Both verifications, if they were made.
    pub(crate) verified: Option<Verified>,
    /// What a Linux guest saw of its move, if it was asked.
    #[serde(default)]
    pub(crate) guest_view: Option<GuestView>,
    /// The conditions of the measurement.
    pub(crate) conditions: Conditions,
}

impl Report {
    /// Checks that nobody found anything wrong.
    ///
    /// # Errors
    /// [`Exit::Verification`] with what is wrong.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let words = match (&self.verified, &self.guest_view) {
            (Some(verified), _) if !verified.holds() => verified.words.clone(),
            (_, Some(view)) if !view.holds() => view.faults.join("; "),
            _ => return Ok(()),
        };
        Err(Failure::new(
            Exit::Verification,
            format!("verification failed: {words}"),
        ))
    }

    /// From the first connection attempt to the confirmed end, milliseconds.
    pub(crate) fn total_ms(&self) -> Option<f64> {
        let own =
            |r: &Received| Some((r.phases.last()?.at_ns - r.phases.first()?.at_ns) as f64 / MS);
        match &self.sent {
            Some(sent) => Some(sent.total_ns as f64 / MS),
            None => self.received.as_ref().and_then(own),
        }
    }

    /// Whether the VM was paused by its owner when it moved.
    pub(crate) fn paused(&self) -> bool {
        let sent = self.sent.as_ref().map(|s| s.paused);
        sent.or_else(|| self.received.as_ref().map(|r| r.paused))
            .unwrap_or(false)
    }

    /// What protected the channels, as the source saw it if it is known.
    pub(crate) fn protection(&self) -> Option<&Protection> {
        let sent = self.sent.as_ref().map(|s| &s.protection);
        sent.or_else(|| self.received.as_ref().map(|r| &r.protection))
    }

    /// The sentence that says that the VM is at `to`.
    pub(crate) fn arrival(&self, to: &impl std::fmt::Display) -> String {
        match self.paused() {
            true => format!("the VM is at {to} now, paused: `pageferry resume` there runs it"),
            false => format!("the VM runs at {to} now"),
        }
    }

    /// The blackout; `None` for a VM that was paused, and for one that another process has handed
    /// over. With both halves (one host, one clock) the time between the two ends; otherwise the
    /// source's bound.
    pub(crate) fn blackout(&self) -> Option<Blackout> {
        let sent = self.sent.as_ref().filter(|_| !self.paused())?;
        let sent = Some(sent).filter(|sent| sent.last_stop_ns > 0)?;
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

    /// The parts of the pause of another VMM's VM, milliseconds: to stop it, to save it, and the
    /// rest of the blackout.
    pub(crate) fn vmm_pause(&self) -> Option<[f64; 3]> {
        let (stop, save) = self.sent.as_ref()?.vmm_pause_ns?;
        let (stop, save) = (stop as f64 / MS, save as f64 / MS);
        Some([stop, save, (self.blackout()?.ms - save).max(0.0)])
    }

    /// Numbers of pages by the way they travelled, from the source.
    pub(crate) fn pages(&self) -> PageCounts {
        let sent = self.sent.as_ref().map(|s| s.pages.into());
        sent.or_else(|| self.received.as_ref().map(|r| r.pages.into()))
            .unwrap_or_default()
    }

    /// The stalls, if the destination reported them.
    pub(crate) fn stalls(&self) -> Option<&Stalls> {
        self.received.as_ref().map(|r| &r.stalls)
    }

    /// Bytes of pages per second while pages were sent: from the first pass (or the switch-over, if
    /// there was none) to the completion.
    pub(crate) fn throughput(&self) -> Option<f64> {
        let sent = self.sent.as_ref()?;
        let start = |name: &str| sent.phases.iter().find(|p| p.name == name).map(|p| p.at_ns);
        let from = start("pre-copy").or_else(|| start("switch-over"))?;
        let ns = start("completion")?
            .checked_sub(from)
            .filter(|&ns| ns > 0)?;
        Some(sent.page_bytes as f64 * 1e9 / ns as f64)
    }

    /// Bytes of pages per second while the background push ran.
    pub(crate) fn background_throughput(&self) -> Option<f64> {
        let sent = self
            .sent
            .as_ref()
            .filter(|s| s.background_ns > 0 && s.background_bytes > 0)?;
        Some(sent.background_bytes as f64 * 1e9 / sent.background_ns as f64)
    }

    /// The guest's progress on both sides, in order of time. The last sample of the stopped source
    /// holds for the whole blackout.
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

    /// The report as a table: the essentials, or all of it.
    pub(crate) fn table(&self, verbose: bool) -> String {
        table::show(self, verbose)
    }

    /// The report as one JSON object.
    pub(crate) fn json(&self) -> serde_json::Value {
        json::show(self)
    }

    /// The report as a self-contained HTML page.
    ///
    /// # Errors
    /// When a chart cannot be drawn.
    pub(crate) fn html(&self) -> Result<String, String> {
        html::show(self)
    }
}

/// Writes a drawn page to `path`: whole, or not at all.
///
/// # Errors
/// [`Exit::Usage`] if the file cannot be written, [`Exit::Internal`] if the page could not be
/// drawn.
pub(crate) fn write(path: &Path, drawn: Result<String, String>) -> Result<(), Failure> {
    let page = drawn
        .map_err(|why| Failure::new(Exit::Internal, format!("cannot draw the report: {why}")))?;
    pageferry_charts::replace_file(path, &page).map_err(|why| {
        Failure::new(
            Exit::Usage,
            format!("cannot write the report to {}: {why}", path.display()),
        )
    })
}

#[cfg(test)]
mod tests;
