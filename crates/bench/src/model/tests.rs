//! The model with given parts, and a small run of all of it.

use super::*;
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

fn setting(vcpus: &[u32]) -> ModelSetting {
    ModelSetting {
        vcpus: vcpus.to_vec(),
        memory_per_vcpu: 256 * PAGE_SIZE,
        repeat: 1,
        ..ModelSetting::default()
    }
}

#[test]
fn parallel_faults_scale_and_serialised_ones_stop_at_the_lock() {
    let setting = ModelSetting {
        spread: Spread::Constant,
        ..setting(&[416, 1, 2, 416])
    };
    for delivery in PageDelivery::ALL {
        let curve = curve(&setting, &parts(), delivery);
        let vcpus: Vec<u32> = curve.points.iter().map(|point| point.vcpus).collect();
        assert_eq!(vcpus, [1, 2, 416]);
        let (one, all) = (curve.points[0], curve.points[2]);
        // The nanoseconds of one vCPU's page, and those of them under the lock.
        let (page, held) = match delivery {
            PageDelivery::None => (150.0, 120.0),
            PageDelivery::Exit => (800.0, 220.0),
        };
        let near = |value: f64, expected: f64| (value / expected - 1.0).abs() < 0.02;
        assert!(near(one.parallel.seconds, 256.0 * page * 1e-9), "{one:?}");
        assert!(near(
            one.serialised.pages_per_s,
            1e9 / (page + 10.0 * curve.steps.len() as f64)
        ));
        assert!(near(all.parallel.seconds, one.parallel.seconds), "{all:?}");
        assert!(
            near(all.serialised.seconds, 256.0 * 416.0 * held * 1e-9),
            "{all:?}"
        );
        assert!(one.serialised.waiting_percent < 1e-9);
        assert!(all.serialised.waiting_percent > 95.0 && all.parallel.waiting_percent < 1.0);
        assert!(near(
            all.saved_percent,
            100.0 * (1.0 - all.parallel.seconds / all.serialised.seconds)
        ));
        let pages = (12_u64 << 40) as f64 / PAGE_SIZE as f64;
        assert!(near(
            all.serialised.total_memory_seconds,
            pages * held * 1e-9
        ));
    }
}

#[test]
fn more_memory_takes_longer_at_the_same_rate() {
    let time = |pages: u64| {
        let setting = ModelSetting {
            memory_per_vcpu: pages * PAGE_SIZE,
            ..setting(&[64])
        };
        curve(&setting, &parts(), PageDelivery::Exit).points[0]
            .serialised
            .seconds
    };
    // More pages than are simulated, and fewer.
    assert!((time(1 << 20) / time(1 << 18) - 4.0).abs() < 1e-9);
    assert!((time(2000) / time(1000) - 2.0).abs() < 0.05);
}

#[test]
fn a_seed_and_parts_name_one_curve() {
    let setting = setting(&[7, 64]);
    let once = || curve(&setting, &parts(), PageDelivery::Exit);
    assert_eq!(once(), once());
    let other = ModelSetting {
        seed: 1,
        ..setting.clone()
    };
    assert_ne!(once(), curve(&other, &parts(), PageDelivery::Exit));
}

#[test]
fn a_real_run_has_inputs_checks_and_curves() {
    if crate::row::cores() < 2 && skip("cores", "the model needs two cores") {
        return;
    }
    let report = match model(&setting(&[1, 8])) {
        Err(BenchError::Busy(why)) if skip("cores", &why) => return,
        report => report.unwrap(),
    };
    let of = |case: &'static str| report.rows.iter().filter(move |row| row.case == case);
    for case in ["model.guest", "model.exit", "model.line"] {
        assert_eq!(of(case).filter(|row| row.value >= 0.0).count(), 1, "{case}");
    }
    assert_eq!(
        of("model.check")
            .filter(|row| row.ratio > Some(0.0))
            .count(),
        8
    );
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
    let figure = report.charts[0].1.as_ref().expect("the talk's figure");
    assert!(figure.contains("MODELLED"));
}

#[test]
fn nothing_to_model_is_refused() {
    for nothing in [
        setting(&[]),
        setting(&[0]),
        ModelSetting {
            memory_per_vcpu: 0,
            ..setting(&[1])
        },
    ] {
        let error = model(&nothing).unwrap_err();
        assert!(error.to_string().contains("nothing to model"));
    }
}
