//! The report as JSON. Keys keep their names and units from version to version.

use super::halves::Pass;
use super::{GuestView, MS, Report, Stalls};
use serde_json::{Value, json};

/// The report as one object.
pub(super) fn show(report: &Report) -> Value {
    let pages = report.pages();
    let blackout = report.blackout();
    let received = report.received.as_ref();
    let sent = report.sent.as_ref();
    let protection = report.protection();
    let losses = sent.map(|s| s.losses).or(received.map(|r| r.losses));
    json!({
        "engine": report.engine,
        "delivery": received.map(|r| &r.delivery),
        "delivery_because": received.map(|r| &r.delivery_because),
        "vcpus": report.vcpus,
        "memory_bytes": report.memory_bytes,
        "total_ms": report.total_ms(),
        "paused": report.paused(),
        "tls": protection.and_then(|p| p.tls.as_ref()),
        "peer_name": protection.and_then(|p| p.peer_name.as_ref()),
        "protocol_version": protection.map(|p| p.version),
        "reconnects": losses.map(|l| l.reconnects),
        "channels_lost": losses.map(|l| l.channels_lost),
        "blackout_ms": blackout.map(|b| b.ms),
        "blackout_kind": blackout.map(|b| b.kind.name()),
        "blackout_exact": blackout.map(|b| b.kind == super::BlackoutKind::Exact),
        "blackout_forecast_ms": sent.and_then(|s| s.blackout_forecast_ns).map(|ns| ns as f64 / MS),
        "vmm_pause": report.vmm_pause().map(|[stop, save, rest]| {
            json!({"stop_ms": stop, "save_ms": save, "rest_ms": rest})
        }),
        "precopy_notes": sent.map(|s| &s.notes),
        "pages": {
            "precopy": pages.precopy,
            "urgent": pages.urgent,
            "background": pages.background,
            "zero": pages.zero,
            "confirmed": pages.confirmed,
        },
        "pages_resent": sent.map(|s| s.pages_resent),
        "bytes_saved": sent.map(|s| s.bytes_saved),
        "prefetch": sent.map(|s| s.prefetch),
        "devices": sent.map(|s| s.devices).map(|(count, bytes, ns)| json!({"count": count, "bytes": bytes, "ms": ns as f64 / MS})),
        "missing_at_start": sent.map(|s| s.missing_at_start).or(received.map(|r| r.missing_at_start)),
        "stall_us": report.stalls().map(stall_us),
        "stall_histogram": report.stalls().map(histogram),
        "stall_stages_us": received.map(stages),
        "stalls_by_vcpu": received.map(by_vcpu),
        "local_faults": received.map(|r| r.local_faults),
        "throughput_bytes_per_s": report.throughput(),
        "background_bytes_per_s": report.background_throughput(),
        "phases": phases(report),
        "passes": sent.map(|s| s.passes.iter().map(pass).collect::<Vec<_>>()),
        "backing": {
            "source": sent.map(|s| &s.backing),
            "destination": received.map(|r| &r.backing),
        },
        "large_mappings": received.and_then(|r| r.large_mappings),
        "overhead_bytes": {
            "source": sent.and_then(|s| s.overhead_bytes),
            "destination": received.and_then(|r| r.overhead_bytes),
        },
        "verified": report.verified.as_ref().map(|v| json!({"guest": v.guest, "host": v.host, "words": v.words})),
        "guest_view": report.guest_view.as_ref().map(guest_view),
        "conditions": report.conditions,
    })
}

fn pass(pass: &Pass) -> Value {
    json!({"pages": pass.pages, "ms": pass.ns as f64 / MS, "left": pass.left})
}

fn guest_view(view: &GuestView) -> Value {
    json!({
        "largest_gap_ms": {
            "before": view.gap_before_ns as f64 / MS,
            "during": view.gap_during_ns as f64 / MS,
            "after": view.gap_after_ns as f64 / MS,
        },
        "clock_lost_ms": view.clock_lost_ns as f64 / MS,
        "pages_checked": view.pages_checked,
        "pages_checked_there": view.pages_checked_there,
        "pages_wrong": view.pages_wrong,
        "md5_rounds": view.md5_rounds,
        "md5_wrong": view.md5_wrong,
        "faults": view.faults,
    })
}

fn stall_us(stalls: &Stalls) -> Value {
    json!({
        "count": stalls.count(),
        "mean": stalls.mean_us(),
        "p50": stalls.quantile_us(0.5),
        "p90": stalls.quantile_us(0.9),
        "p99": stalls.quantile_us(0.99),
        "p999": stalls.quantile_us(0.999),
        "max": stalls.max_us(),
        "over_2ms": stalls.over_2ms(),
    })
}

/// The stages by name.
fn stages(received: &super::Received) -> Value {
    let stages = received.stall_stages.iter();
    stages
        .map(|(name, stalls)| (name.replace('-', "_"), short(stalls)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

fn short(stalls: &Stalls) -> Value {
    json!({
        "count": stalls.count(),
        "p50": stalls.quantile_us(0.5),
        "p99": stalls.quantile_us(0.99),
        "max": stalls.max_us(),
    })
}

fn by_vcpu(received: &super::Received) -> Value {
    let rows = received.stalls_by_vcpu.iter();
    rows.map(|(vcpu, stalls)| {
        json!({"vcpu": vcpu, "stall_us": short(stalls), "histogram": histogram(stalls)})
    })
    .collect()
}

fn histogram(stalls: &Stalls) -> Value {
    stalls
        .buckets()
        .iter()
        .map(|b| json!({"from_us": b.from_us, "to_us": b.to_us, "count": b.count}))
        .collect()
}

/// The phases with their starts in milliseconds since the first phase.
fn phases(report: &Report) -> Option<Vec<Value>> {
    let sent = report.sent.as_ref().map(|s| &s.phases);
    let phases = sent.or(report.received.as_ref().map(|r| &r.phases))?;
    let start = phases.first()?.at_ns;
    let show = |p: &super::PhaseAt| json!({"phase": p.name, "label": p.label, "at_ms": p.at_ns.saturating_sub(start) as f64 / MS});
    Some(phases.iter().map(show).collect())
}
