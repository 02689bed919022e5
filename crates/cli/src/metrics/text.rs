//! The figures in Prometheus's text format, version 0.0.4.

use crate::console;
use crate::host::{Host, VM_STATES};
use crate::output;
use crate::report::ns;
use pageferry_migration::{Role, SessionStatus, StallRow, StallStage, StallTimes};
use std::fmt::Write;

/// The upper bounds of the buckets of stalls, in nanoseconds.
const BOUNDS_NS: [u64; 16] = [
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    10_000_000,
    100_000_000,
    1_000_000_000,
    10_000_000_000,
    100_000_000_000,
];

/// The stages of sessions, of both sides.
const STAGES: [&str; 18] = [
    "none",
    "setup",
    "pre-copy",
    "switch-over",
    "handed-over",
    "drained",
    "cancelling",
    "completed",
    "kept",
    "returned",
    "given-up",
    "resumed-here",
    "receiving",
    "ready",
    "running",
    "complete",
    "discarded",
    "incomplete",
];

/// All metrics of `host`.
pub(crate) fn of(host: &Host) -> String {
    let mut page = Page::with_build();
    page.family("vm_state", "gauge", "1 for the state of the VM, else 0.");
    page.states("vm_state", &VM_STATES, host.state_name());
    page.counter(
        "stderr_lost_lines_total",
        "Lines on stderr that were dropped, as nobody took them.",
        output::lost_lines(),
    );
    page.counter(
        "console_lost_bytes_total",
        "Bytes of the guest's console that were dropped, as its reader took nothing.",
        console::lost_bytes(),
    );
    page.counter(
        "defects_total",
        "Panics of threads of this process.",
        output::defects(),
    );
    session(&mut page, &host.session_status().unwrap_or_default());
    stalls(&mut page, &host.stalls());
    page.finish()
}

/// Metrics as text.
pub(crate) struct Page(String);

impl Page {
    /// A page with the version of this program.
    pub(crate) fn with_build() -> Self {
        let mut page = Self(String::new());
        let build = if cfg!(debug_assertions) {
            "debug"
        } else {
            "release"
        };
        page.family("build_info", "gauge", "The version, as labels.");
        let version = env!("CARGO_PKG_VERSION");
        page.sample(
            "build_info",
            &format!("version=\"{version}\",build=\"{build}\""),
            1,
        );
        page
    }

    pub(crate) fn finish(self) -> String {
        self.0
    }

    /// Begins a family of metrics.
    pub(crate) fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# HELP pageferry_{name} {help}");
        let _ = writeln!(self.0, "# TYPE pageferry_{name} {kind}");
    }

    pub(crate) fn sample(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        let _ = if labels.is_empty() {
            writeln!(self.0, "pageferry_{name} {value}")
        } else {
            writeln!(self.0, "pageferry_{name}{{{labels}}} {value}")
        };
    }

    /// One sample for each of `states`.
    fn states(&mut self, name: &str, states: &[&str], now: &str) {
        for state in states {
            let is = u8::from(*state == now);
            self.sample(name, &format!("state=\"{state}\""), is);
        }
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl std::fmt::Display) {
        self.family(name, "gauge", help);
        self.sample(name, "", value);
    }

    fn counter(&mut self, name: &str, help: &str, value: impl std::fmt::Display) {
        self.family(name, "counter", help);
        self.sample(name, "", value);
    }

    /// The samples of one histogram, of all `times` together.
    fn histogram<'a>(
        &mut self,
        name: &str,
        labels: &str,
        times: impl Iterator<Item = &'a StallTimes>,
    ) {
        let comma = if labels.is_empty() { "" } else { "," };
        let mut buckets = [0; BOUNDS_NS.len()];
        let (mut count, mut sum) = (0, 0.0);
        for times in times {
            sum += times.sum.as_secs_f64();
            for (time, more) in times.recorded() {
                let ns = ns(time);
                count += more;
                if let Some(at) = BOUNDS_NS.iter().position(|bound| ns <= *bound) {
                    buckets[at] += more;
                }
            }
        }
        let bucket = format!("{name}_bucket");
        let mut below = 0;
        for (bound, more) in BOUNDS_NS.iter().zip(buckets) {
            below += more;
            let le = *bound as f64 / 1e9;
            self.sample(&bucket, &format!("{labels}{comma}le=\"{le}\""), below);
        }
        self.sample(&bucket, &format!("{labels}{comma}le=\"+Inf\""), count);
        self.sample(&format!("{name}_sum"), labels, sum);
        self.sample(&format!("{name}_count"), labels, count);
    }
}

/// The migration that is under way, or the last one.
fn session(page: &mut Page, status: &SessionStatus) {
    page.family(
        "session_state",
        "gauge",
        "1 for the state of the migration under way, or of the last one, else 0.",
    );
    page.states("session_state", &STAGES, status.stage);
    page.gauge(
        "session_connected",
        "Whether the control channel is open.",
        u8::from(status.connected),
    );
    page.gauge(
        "session_generation",
        "The generation of the channels.",
        status.generation,
    );
    page.counter(
        "session_reconnects_total",
        "How often the control channel was opened again.",
        status.reconnects,
    );
    page.counter(
        "channels_lost_total",
        "Channels that were open and were lost.",
        status.channels_lost,
    );
    page.counter(
        "strangers_total",
        "Connections that were refused since the destination listens.",
        status.strangers,
    );
    page.family("channels", "gauge", "Open channels.");
    for (role, name) in [(Role::Bulk, "bulk"), (Role::Urgent, "urgent")] {
        let open = status.channels.iter().filter(|id| id.role == role).count();
        page.sample("channels", &format!("role=\"{name}\""), open);
    }
    page.gauge(
        "pages_left",
        "Pages that are not confirmed (source) or missing (destination).",
        status.pages_left,
    );
    page.gauge("left_bytes", "The same in bytes.", status.bytes_left());
    page.gauge(
        "pages_in_flight",
        "Pages that were sent and have no receipt (source).",
        status.pages_in_flight,
    );
    page.counter(
        "page_bytes_total",
        "Bytes of pages acknowledged (source) or received (destination).",
        status.page_bytes,
    );
    page.gauge(
        "page_rate_bytes_per_second",
        "Bytes of pages acknowledged or received, over about the last second.",
        status.page_rate,
    );
    if let Some(rate) = status.dirty_rate {
        page.gauge(
            "dirty_rate_bytes_per_second",
            "Bytes of pages that the guest dirtied in the last pre-copy pass (source).",
            rate,
        );
    }
    if let Some(rate) = status.link_rate {
        page.gauge(
            "link_rate_bytes_per_second",
            "Bytes of pages that were acknowledged in the last pre-copy pass (source).",
            rate,
        );
    }
    if let Some(time) = status.blackout_forecast {
        page.gauge(
            "blackout_forecast_seconds",
            "The expected blackout, at the end of the last pre-copy pass (source).",
            time.as_secs_f64(),
        );
    }
    if let Some(time) = status.time_left {
        page.gauge(
            "time_left_seconds",
            "The time until no page is left, at the rates of the last pass or second.",
            time.as_secs_f64(),
        );
    }
    page.gauge(
        "waiting_faults",
        "Threads that wait for missing pages (destination).",
        status.waiting_faults,
    );
    if let Some(time) = status.lost_for {
        page.gauge(
            "lost_seconds",
            "How long there has been no control channel.",
            time.as_secs_f64(),
        );
    }
}

/// The stalls of the migration that brought the VM.
fn stalls(page: &mut Page, rows: &[StallRow]) {
    page.family(
        "stall_seconds",
        "histogram",
        "How long faults on missing pages delayed a vCPU.",
    );
    page.histogram("stall_seconds", "", rows.iter().map(|row| &row.whole));
    page.family(
        "stall_stage_seconds",
        "histogram",
        "The stages of these delays. A stage that was not seen is left out.",
    );
    for stage in StallStage::ALL {
        let label = format!("stage=\"{}\"", stage.name());
        let times = rows.iter().map(|row| row.stage(stage));
        page.histogram("stall_stage_seconds", &label, times);
    }
    page.family(
        "vcpu_stall_seconds",
        "summary",
        "The delays of each vCPU. Faults of userfaultfd events name none: vcpu is event.",
    );
    for row in rows {
        let vcpu = row.vcpu.map_or("event".into(), |vcpu| vcpu.to_string());
        let label = format!("vcpu=\"{vcpu}\"");
        let sum = row.whole.sum.as_secs_f64();
        page.sample("vcpu_stall_seconds_sum", &label, sum);
        page.sample("vcpu_stall_seconds_count", &label, row.whole.count());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_session_without_stalls_has_every_family_once() {
        let mut page = Page(String::new());
        let mut status = SessionStatus::default();
        status.stage = "handed-over";
        status.pages_left = 3;
        status.time_left = Some(Duration::from_millis(1500));
        status.link_rate = Some(5 << 20);
        status.blackout_forecast = Some(Duration::from_micros(2500));
        session(&mut page, &status);
        stalls(&mut page, &[]);
        let lines: Vec<&str> = page.0.lines().collect();
        for wanted in [
            "pageferry_session_state{state=\"handed-over\"} 1",
            "pageferry_session_state{state=\"completed\"} 0",
            "pageferry_channels{role=\"bulk\"} 0",
            "pageferry_pages_left 3",
            "pageferry_left_bytes 12288",
            "pageferry_time_left_seconds 1.5",
            "pageferry_link_rate_bytes_per_second 5242880",
            "pageferry_blackout_forecast_seconds 0.0025",
            "pageferry_stall_seconds_bucket{le=\"0.000001\"} 0",
            "pageferry_stall_seconds_bucket{le=\"+Inf\"} 0",
            "pageferry_stall_stage_seconds_count{stage=\"wire-and-queue\"} 0",
        ] {
            let count = lines.iter().filter(|line| **line == wanted).count();
            assert_eq!(count, 1, "{wanted} in {}", page.0);
        }
        let mut families: Vec<_> = lines.iter().filter(|l| l.starts_with("# TYPE")).collect();
        families.sort_unstable();
        let all = families.len();
        families.dedup();
        assert_eq!(families.len(), all);
    }
}
