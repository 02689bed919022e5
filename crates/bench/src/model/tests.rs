//! The model with given parts, and a small run of all of it.

use super::*;
use crate::demand_paging::flags;
use pageferry_testkit::skip;

fn parts() -> Parts {
    let one = |ns| Samples::from_iter([ns]);
    Parts {
        guest: one(80.0),
        lookup: one(20.0),
        map: one(50.0),
        missing: one(30.0),
        exit: one(200.0),
        copy: one(400.0),
        lock: one(10.0),
        handover: one(70.0),
        line: one(60.0),
    }
}

fn model_of(pages: u64, spread: Spread) -> Model {
    Model {
        parts: parts(),
        memory_per_vcpu: pages * PAGE_SIZE,
        total_memory: 12 << 40,
        spread,
        seed: 2019,
    }
}

#[test]
fn parallel_faults_scale_and_serialised_ones_stop_at_the_lock() {
    let model = model_of(256, Spread::Constant);
    for delivery in PageDelivery::ALL {
        let of = |scheme, vcpus| model.simulate(delivery, scheme, vcpus);
        let [one, all] = [1, 416].map(|vcpus| Scheme::ALL.map(|scheme| of(scheme, vcpus)));
        // The nanoseconds of one vCPU's page, and those of them under the lock.
        let (page, held) = match delivery {
            PageDelivery::None => (150.0, 120.0),
            PageDelivery::Exit => (800.0, 220.0),
        };
        let near = |value: f64, expected: f64| (value / expected - 1.0).abs() < 0.02;
        assert!(near(one[0].pages_per_s(), 1e9 / page), "{one:?}");
        let steps = delivery.steps(&parts()).len() as f64;
        assert!(near(one[1].pages_per_s(), 1e9 / (page + 10.0 * steps)));
        assert!(near(all[0].pages_per_s(), 416.0 * 1e9 / page), "{all:?}");
        assert!(near(all[1].pages_per_s(), 1e9 / held), "{all:?}");
        assert!(one[1].waiting_percent() < 1e-9);
        assert!(all[1].waiting_percent() > 95.0 && all[0].waiting_percent() < 1.0);
        let rows = model.point_rows(delivery, 416);
        let total = rows.iter().rfind(|row| row.case == "model.total_time");
        let pages = (12_u64 << 40) as f64 / PAGE_SIZE as f64;
        assert!(near(total.expect("a row").value, pages * held * 1e-9));
    }
}

#[test]
fn more_memory_takes_longer_at_the_same_rate() {
    let time = |pages: u64| {
        let model = model_of(pages, Spread::Uniform);
        model.point_rows(PageDelivery::Exit, 64)[1].value
    };
    // More pages than are simulated, and fewer.
    assert!((time(1 << 20) / time(1 << 18) - 4.0).abs() < 1e-9);
    assert!((time(2000) / time(1000) - 2.0).abs() < 0.05);
}

#[test]
fn a_seed_and_parts_name_one_outcome() {
    let model = model_of(256, Spread::Uniform);
    let once = |model: &Model| model.simulate(PageDelivery::Exit, Scheme::Serialised, 64);
    assert_eq!(once(&model), once(&model));
    let other = Model {
        seed: 1,
        ..model.clone()
    };
    assert_ne!(once(&model), once(&other));
}

#[test]
fn the_talks_vcpus_are_modelled_unless_others_are_named() {
    assert_eq!(flags("--model -v 8,1").vcpus(&VCPUS), [1, 8]);
    assert_eq!(flags("--model").vcpus(&VCPUS).last(), Some(&416));
}

#[test]
fn a_real_run_has_inputs_checks_and_curves() {
    if crate::row::cores() < 2 && skip("cores", "the model needs two cores") {
        return;
    }
    let report = match model(&flags("--model -v 1,8 -b 1M --repeat 1")) {
        Err(BenchError::Busy(why)) if skip("cores", &why) => return,
        report => report.unwrap(),
    };
    let of = |case: &'static str| report.rows.iter().filter(move |row| row.case == case);
    for case in ["model.guest", "model.exit", "model.line"] {
        assert_eq!(of(case).filter(|row| row.value >= 0.0).count(), 1, "{case}");
    }
    let checks = of("model.check").filter(|row| row.ratio > Some(0.0));
    assert_eq!(checks.count(), 8);
    for case in [
        "model.time",
        "model.rate",
        "model.waiting",
        "model.total_time",
    ] {
        assert_eq!(of(case).count(), 8, "{case}");
        assert!(
            of(case).all(|row| row.subject.starts_with("MODELLED")),
            "{case}"
        );
    }
    assert!(report.notes[0].starts_with("MODEL, not a measurement"));
    assert!(report.notes[1].contains("98 %") && report.notes[1].contains("89 %"));
}
