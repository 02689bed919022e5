//! The results of the model, with its inputs and its errors. All that is modelled says so.

use super::{Check, Curve, ModelSetting, PageDelivery, Parts, Point, TALK};
use crate::Samples;
use crate::output::{Chart, Output};
use crate::row::{Conditions, Row, cores};
use pageferry_charts::{Line, Linear, linear};
use pageferry_harness::size;

/// Inputs, checks and results.
pub(super) fn output(
    setting: &ModelSetting,
    parts: &Parts,
    curves: &[Curve],
    checks: &[Check],
) -> Output {
    let measured = |note: &str| Conditions::here(1, setting.memory_per_vcpu, note);
    let inputs = parts.inputs().into_iter().map(|(case, samples)| {
        samples.row(
            case,
            "an input of the model",
            "ns",
            measured("soft engine, measured"),
        )
    });
    let points = curves.iter().flat_map(|curve| {
        curve
            .points
            .iter()
            .flat_map(|point| point_rows(setting, curve, point))
    });
    Output {
        rows: inputs
            .chain(checks.iter().map(|check| check_row(setting, check)))
            .chain(points)
            .collect(),
        notes: vec![
            format!(
                "MODEL, not a measurement: demand paging with a core for each vCPU, from times \
                 measured in this run on {} cores. Seed: {}.",
                cores(),
                setting.seed
            ),
            format!(
                "The talk's figures, not modelled here: {} % of the time waiting for the lock, {} % \
                 of the time saved ({}).",
                TALK.waiting_percent, TALK.saved_percent, TALK.source
            ),
            "Left out: memory bandwidth, sockets, the host's own locks, overlapping touches. To the \
             parallel MMU's disadvantage, all vCPUs link new tables through one cache line."
                .into(),
        ],
        // The talk's figure comes first: pages are missing, and faults on them are exits.
        charts: curves
            .iter()
            .rev()
            .map(|curve| {
                let heading = match curve.delivery {
                    PageDelivery::Exit => "MODELLED: each page takes an exit and a copy",
                    PageDelivery::None => "MODELLED: no page is missing, faults only",
                };
                (heading.to_owned(), chart(setting, curve))
            })
            .collect(),
    }
}

/// The model next to a real run: nanoseconds per page of a vCPU.
fn check_row(setting: &ModelSetting, check: &Check) -> Row {
    let scheme = check.scheme;
    let subject = format!(
        "MODELLED: {}, {scheme}, {} vCPUs",
        check.delivery.name(),
        check.vcpus
    );
    let note = if check.by_construction {
        "modelled; the guest's time is derived from this run"
    } else {
        "modelled, next to real runs"
    };
    let how = Conditions::here(check.vcpus, setting.memory_per_vcpu, note);
    Samples::from_iter([check.modelled_ns])
        .row("model.check", subject, "ns", how)
        .against("measured", check.measured_ns.median())
}

/// Both schemes with one number of vCPUs. The ratio of `parallel` is to `serialised`.
fn point_rows(setting: &ModelSetting, curve: &Curve, point: &Point) -> Vec<Row> {
    let row = |case: &'static str, scheme: &str, unit, value: f64| {
        let name = curve.delivery.name();
        let subject = format!("MODELLED: {name}, {scheme}, {} vCPUs", point.vcpus);
        let note = format!("modelled, a core for each vCPU, seed {}", setting.seed);
        let how = Conditions::here(point.vcpus, setting.memory_per_vcpu, note);
        Samples::from_iter([value]).row(case, subject, unit, how)
    };
    let mut rows = Vec::new();
    for (case, unit, of) in [
        (
            "model.time",
            "s",
            (|side| side.seconds) as fn(&super::SchemeFigures) -> f64,
        ),
        ("model.rate", "pages/s", |side| side.pages_per_s),
        ("model.waiting", "%", |side| side.waiting_percent),
        ("model.total_time", "s", |side| side.total_memory_seconds),
    ] {
        let serialised = row(case, "serialised", unit, of(&point.serialised));
        let parallel = row(case, "parallel", unit, of(&point.parallel));
        rows.push(parallel.against("serialised", serialised.value));
        rows.push(serialised);
    }
    rows
}

fn chart(setting: &ModelSetting, curve: &Curve) -> Chart {
    let line = |name: &str, seconds: &dyn Fn(&Point) -> f64| Line {
        name: name.to_owned(),
        points: curve
            .points
            .iter()
            .map(|point| (f64::from(point.vcpus), seconds(point) * 1e3))
            .collect(),
    };
    let lines = [
        line("parallel", &|point| point.parallel.seconds),
        line("serialised", &|point| point.serialised.seconds),
    ];
    let last = curve.points.last().ok_or("there is nothing to draw")?;
    let subtitle = format!(
        "MODELLED from times measured on {} cores. {} vCPUs: {:.1} % of the time waiting, {:.1} % saved. Talk, on KVM: {} %, {} %",
        cores(),
        last.vcpus,
        last.serialised.waiting_percent,
        last.saved_percent,
        TALK.waiting_percent,
        TALK.saved_percent
    );
    let title = format!(
        "Time to page in {} per vCPU, with serialised and with parallel faults",
        size::human(setting.memory_per_vcpu)
    );
    linear(&Linear {
        title: Some((&title, &subtitle)),
        x_desc: "vCPUs, each on its own core",
        y_desc: "milliseconds, modelled",
        lines: &lines,
    })
}
