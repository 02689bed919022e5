//! The figures of restores for people, and for Prometheus.

use pageferry_charts::time;
use pageferry_harness::size::human;
use pageferry_pager::{Latency, Phase, Status, Survival, VmStatus};
use serde_json::Value;
use std::fmt::Write;
use std::time::Duration;

const PHASES: [Phase; 5] = [
    Phase::Waiting,
    Phase::Serving,
    Phase::Lost,
    Phase::Failed,
    Phase::Ended,
];

fn word(phase: Phase) -> String {
    match serde_json::to_value(phase) {
        Ok(Value::String(word)) => word,
        _ => String::new(),
    }
}

/// Metrics in Prometheus's text format 0.0.4.
pub(crate) fn metrics(list: &[Status]) -> String {
    let mut page = String::new();
    let mut family = |name: &str, kind: &str, help: &str, sample: &dyn Fn(&mut String)| {
        let _ = writeln!(
            page,
            "# HELP pageferry_{name} {help}\n# TYPE pageferry_{name} {kind}"
        );
        sample(&mut page);
    };
    family(
        "restore_phase",
        "gauge",
        "1 for the phase of the restore, 0 for others.",
        &|page| {
            for status in list {
                for phase in PHASES {
                    let is = u8::from(phase == status.phase);
                    let (id, phase) = (&status.id, word(phase));
                    let _ = writeln!(
                        page,
                        "pageferry_restore_phase{{id=\"{id}\",phase=\"{phase}\"}} {is}"
                    );
                }
            }
        },
    );
    type Figure = fn(&VmStatus) -> u64;
    let figures: [(&str, &str, &str, Figure); 12] = [
        (
            "restore_resident_pages",
            "gauge",
            "Pages that are there.",
            |vm| vm.resident,
        ),
        (
            "restore_missing_pages",
            "gauge",
            "Pages that need the source.",
            |vm| vm.missing,
        ),
        (
            "restore_given_back_pages",
            "gauge",
            "Pages that the VM gave back.",
            |vm| vm.given_back,
        ),
        (
            "restore_waiting_faults",
            "gauge",
            "Faults that wait for the source.",
            |vm| vm.waiting,
        ),
        (
            "restore_zero_pages_total",
            "counter",
            "Pages placed as zeros.",
            |vm| vm.zeros,
        ),
        (
            "restore_neighbour_pages_total",
            "counter",
            "Pages placed beside a touched one.",
            |vm| vm.neighbours,
        ),
        (
            "restore_replayed_pages_total",
            "counter",
            "Pages placed because of a recording.",
            |vm| vm.replayed,
        ),
        (
            "restore_sampled_pages",
            "gauge",
            "Pages of the recording left out as a sample of it.",
            |vm| vm.sampled,
        ),
        (
            "restore_sampled_touched_pages",
            "gauge",
            "Pages of the sample that were touched.",
            |vm| vm.sampled_touched,
        ),
        (
            "restore_background_pages_total",
            "counter",
            "Pages loaded in the background.",
            |vm| vm.background,
        ),
        (
            "restore_source_errors_total",
            "counter",
            "Failed reads of the source.",
            |vm| vm.source_errors,
        ),
        (
            "restore_death_costs_vm",
            "gauge",
            "1 if the death of the pager would cost the VM.",
            |vm| u64::from(matches!(vm.death_of_pager, Survival::Lost(_))),
        ),
    ];
    for (name, kind, help, figure) in figures {
        family(name, kind, help, &|page| {
            for (status, vm) in with_vm(list) {
                let _ = writeln!(
                    page,
                    "pageferry_{name}{{id=\"{}\"}} {}",
                    status.id,
                    figure(vm)
                );
            }
        });
    }
    family(
        "restore_fault_seconds",
        "summary",
        "Time from a fault's message to its page, by the way of the page.",
        &|page| {
            for (status, vm) in with_vm(list) {
                for (way, times) in ways(vm) {
                    let labels = format!("id=\"{}\",way=\"{way}\"", status.id);
                    for (quantile, value) in
                        [("0.5", times.p50), ("0.99", times.p99), ("1", times.max)]
                    {
                        let seconds = Duration::from_nanos(value).as_secs_f64();
                        let _ = writeln!(
                            page,
                            "pageferry_restore_fault_seconds{{{labels},quantile=\"{quantile}\"}} {seconds}"
                        );
                    }
                    let _ = writeln!(
                        page,
                        "pageferry_restore_fault_seconds_count{{{labels}}} {}",
                        times.faults
                    );
                }
            }
        },
    );
    page
}

fn with_vm(list: &[Status]) -> impl Iterator<Item = (&Status, &VmStatus)> {
    list.iter()
        .filter_map(|status| Some((status, status.vm.as_ref()?)))
}

pub(crate) fn ways(vm: &VmStatus) -> [(&'static str, &Latency); 3] {
    [
        ("zero", &vm.zero_faults),
        ("at-hand", &vm.at_hand_faults),
        ("read", &vm.read_faults),
    ]
}

/// A restore as lines.
pub(crate) fn table(status: &Value) -> String {
    let mut lines = String::new();
    for (name, value) in rows(status) {
        let _ = writeln!(lines, "  {name:<11} {value}");
    }
    lines
}

/// A restore as rows: a name and a value.
pub(crate) fn rows(status: &Value) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut row = |name, value: String| rows.push((name, value));
    row("restore", text(&status["id"]));
    row("phase", text(&status["phase"]));
    if let Some(fault) = status["fault"].as_str() {
        row("fault", fault.to_owned());
    }
    row("memory", text(&status["restore"]["memory"]));
    let vm = &status["vm"];
    if vm.is_null() {
        row("socket", text(&status["restore"]["socket"]));
        return rows;
    }
    let number = |key: &str| vm[key].as_u64().unwrap_or(0);
    let bytes = |key: &str| human(number(key) * number("page_bytes"));
    row("VMM", format!("process {}", vm["pid"]));
    row(
        "pages",
        format!(
            "{} of {} are there, {} missing, {} given back",
            bytes("resident"),
            bytes("pages"),
            bytes("missing"),
            bytes("given_back")
        ),
    );
    let mut faults = Vec::new();
    for (key, way) in [
        ("zero_faults", "zero"),
        ("at_hand_faults", "at hand"),
        ("read_faults", "read"),
    ] {
        let figure = |name: &str| vm[key][name].as_u64().unwrap_or(0);
        if figure("faults") > 0 {
            faults.push(format!(
                "{} {way} (p50 {}, p99 {})",
                figure("faults"),
                time(figure("p50") as f64 / 1e3),
                time(figure("p99") as f64 / 1e3)
            ));
        }
    }
    row(
        "faults",
        if faults.is_empty() {
            "none".to_owned()
        } else {
            faults.join(", ")
        },
    );
    if number("replayed") > 0 {
        let mut line = format!("{} from a recording", bytes("replayed"));
        let (sampled, touched) = (number("sampled"), number("sampled_touched"));
        if let Some(unused) = (100 * sampled.saturating_sub(touched)).checked_div(sampled) {
            let _ = write!(
                line,
                ", about {unused} % of it unused so far (a sample of {sampled} pages)"
            );
        }
        row("ahead", line);
    }
    if vm["sees_removals"] == false {
        let line = "not seen: pages that the VM gives back would get their old contents again";
        row("removals", line.to_owned());
    }
    match &vm["death_of_pager"] {
        Value::Object(lost) => row(
            "at risk",
            format!("a death of the pager costs the VM: {}", text(&lost["lost"])),
        ),
        _ => row("at risk", "no: the VM outlives the pager".to_owned()),
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn removals_that_are_not_seen_are_told() {
        for (sees, rows_of_them) in [(true, 0), (false, 1)] {
            let status = json!({ "vm": { "sees_removals": sees } });
            let found = rows(&status)
                .into_iter()
                .filter(|(name, value)| *name == "removals" && value.starts_with("not seen"));
            assert_eq!(found.count(), rows_of_them);
        }
    }
}
