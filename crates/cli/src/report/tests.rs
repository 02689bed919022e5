//! Tests of the report as a whole: its computed values, and the form of its output.

use super::halves::{Losses, Pages, Pass, Prefetch};
use super::*;

const START: u64 = 1_000_000_000;

fn report() -> Report {
    let phase = |name: &str, ms: u64| PhaseAt {
        name: name.into(),
        label: name.into(),
        at_ns: START + ms * 1_000_000,
    };
    let sample = |ms: u64| Sample {
        at_ns: START + ms * 1_000_000,
        done: vec![Some(ms * 3), Some(ms * 2)],
    };
    let samples = |range: std::ops::Range<u64>| range.map(sample).collect::<Vec<_>>();
    Report {
        engine: "soft".into(),
        vcpus: 2,
        memory_bytes: 32 << 20,
        sent: Some(Sent {
            phases: vec![
                phase("setup", 0),
                phase("pre-copy", 10),
                phase("switch-over", 110),
                phase("post-copy", 113),
                phase("completion", 210),
                phase("completed", 211),
            ],
            total_ns: 211_000_000,
            first_stop_ns: START + 110_100_000,
            last_stop_ns: START + 110_500_000,
            confirmed_ns: START + 113_000_000,
            protection: Protection {
                version: 4,
                tls: Some("TLS 1.3".into()),
                peer_name: Some("there".into()),
            },
            paused: false,
            pages: Pages::from(PageCounts {
                precopy: 8000,
                urgent: 100,
                background: 1900,
                zero: 192,
                confirmed: 70,
            }),
            prefetch: Prefetch {
                in_time: 30,
                unconfirmed: 8,
                late: 2,
            },
            devices: (2, 16, 1_500_000),
            missing_at_start: 2000,
            pages_resent: 12,
            bytes_saved: 70 << 12,
            page_bytes: 40 << 20,
            background_bytes: 7 << 20,
            background_ns: 90_000_000,
            passes: vec![Pass {
                pages: 8192,
                ns: 100_000_000,
                left: 1900,
            }],
            vmm_pause_ns: Some((300_000, 500_000)),
            blackout_forecast_ns: Some(1_700_000),
            notes: vec!["it does not converge".into()],
            losses: Losses {
                reconnects: 1,
                channels_lost: 3,
            },
            backing: "hugetlb-2m".into(),
            overhead_bytes: Some(9 << 20),
            samples: samples(0..112),
        }),
        received: Some(Received {
            phases: vec![phase("setup", 1), phase("completed", 211)],
            delivery: "exit".into(),
            delivery_because: "it was requested".into(),
            started_ns: START + 112_000_000,
            protection: Protection::default(),
            paused: false,
            first_instruction_ns: Some(START + 112_500_000),
            first_touch_ns: None,
            stalls: Stalls::new([(20_000, 90), (500_000, 9), (3_000_000, 1)]),
            stall_stages: vec![("install".into(), Stalls::new([(2000, 99), (7000, 1)]))],
            stalls_by_vcpu: vec![
                (Some(0), Stalls::new([(20_000, 90), (500_000, 9)])),
                (None, Stalls::new([(3_000_000, 1)])),
            ],
            local_faults: 3,
            pages: Pages::default(),
            missing_at_start: 2000,
            losses: Losses::default(),
            backing: "shmem".into(),
            large_mappings: Some(LargeMappings {
                host_bytes: Some(24 << 20),
                engine_bytes: Some(22 << 20),
            }),
            overhead_bytes: Some(8 << 20),
            samples: samples(113..300),
        }),
        verified: Some(Verified {
            guest: true,
            host: false,
            words: "<b>&".into(),
        }),
        guest_view: None,
        conditions: Conditions::here("TCP on loopback"),
    }
}

/// A move of Linux.
fn report_of_linux(faults: &[&str]) -> Report {
    Report {
        verified: None,
        guest_view: Some(GuestView {
            gap_before_ns: 1_500_000,
            gap_during_ns: 9_000_000,
            gap_after_ns: 2_500_000,
            clock_lost_ns: -500_000,
            pages_checked: 1000,
            pages_checked_there: 400,
            pages_wrong: 0,
            md5_rounds: 20,
            md5_wrong: 0,
            faults: faults.iter().map(|&fault| fault.to_owned()).collect(),
        }),
        ..report()
    }
}

#[test]
fn the_view_of_a_linux_guest_is_shown_everywhere() {
    let report = report_of_linux(&[]);
    report.check().unwrap();
    let table = report.table(true);
    for part in ["9.00 ms during", "400 of them", "nothing wrong"] {
        assert!(table.contains(part), "{part} in\n{table}");
    }
    let view = &report.json()["guest_view"];
    let gaps = serde_json::json!({"before": 1.5, "during": 9.0, "after": 2.5});
    assert_eq!(view["largest_gap_ms"], gaps);
    assert_eq!(view["clock_lost_ms"], -0.5);
    let page = report.html().unwrap();
    assert!(page.contains("the guest noticed nothing wrong"));
    let failed = report_of_linux(&["the guest said '<i>'"]);
    let failure = failed.check().unwrap_err();
    assert_eq!(failure.exit, Exit::Verification);
    assert!(failure.message.contains("<i>"), "{failure}");
    assert!(failed.table(true).contains("FAILED: the guest said"));
    let page = failed.html().unwrap();
    assert!(page.contains("verification failed") && !page.contains("<i>"));
}

#[test]
fn the_blackout_is_as_exact_as_what_is_known() {
    let mut report = report();
    let blackout = report.blackout().unwrap();
    assert_eq!((blackout.ms, blackout.kind), (2.0, BlackoutKind::Exact));
    let received = report.received.as_mut().unwrap();
    received.first_instruction_ns = None;
    received.first_touch_ns = Some(START + 112_700_000);
    let blackout = report.blackout().unwrap();
    assert_eq!(
        (blackout.ms, blackout.kind),
        (2.2, BlackoutKind::FirstTouch)
    );
    report.received = None;
    let blackout = report.blackout().unwrap();
    assert_eq!(
        (blackout.ms, blackout.kind),
        (2.5, BlackoutKind::UpperBound)
    );
    report.sent = None;
    assert_eq!(report.blackout(), None);
}

#[test]
fn json_has_the_keys_that_programs_rely_on() {
    let json = report().json();
    for key in [
        "engine",
        "delivery",
        "delivery_because",
        "vcpus",
        "memory_bytes",
        "total_ms",
        "paused",
        "tls",
        "peer_name",
        "protocol_version",
        "blackout_ms",
        "blackout_forecast_ms",
        "precopy_notes",
        "throughput_bytes_per_s",
    ] {
        assert!(!json[key].is_null(), "{key}");
    }
    for key in ["precopy", "urgent", "background", "zero", "confirmed"] {
        assert!(json["pages"][key].is_u64(), "{key}");
    }
    assert_eq!(json["pages_resent"], 12);
    assert_eq!(json["bytes_saved"], 70 << 12);
    let prefetch = serde_json::json!({"in_time": 30, "unconfirmed": 8, "late": 2});
    assert_eq!(json["prefetch"], prefetch);
    let passes = serde_json::json!([{"pages": 8192, "ms": 100.0, "left": 1900}]);
    assert_eq!(json["passes"], passes);
    let devices = serde_json::json!({"count": 2, "bytes": 16, "ms": 1.5});
    assert_eq!(json["devices"], devices);
    let pause = serde_json::json!({"stop_ms": 0.3, "save_ms": 0.5, "rest_ms": 1.5});
    assert_eq!(json["vmm_pause"], pause);
    for key in [
        "count", "mean", "p50", "p90", "p99", "p999", "max", "over_2ms",
    ] {
        assert!(json["stall_us"][key].is_number(), "{key}");
    }
    assert_eq!(json["stall_us"]["p50"], 20.0);
    assert_eq!(json["stall_us"]["over_2ms"], 1);
    assert_eq!(json["verified"]["guest"], true);
    assert_eq!(json["verified"]["host"], false);
    // 40 MiB in the 200 ms from the first pass to the completion.
    assert_eq!(json["throughput_bytes_per_s"], (40u64 << 20) as f64 * 5.0);
}

#[test]
fn a_side_that_knows_half_still_reports() {
    let mut half = report();
    half.received = None;
    half.verified = None;
    assert!(half.json()["stall_us"].is_null());
    assert!(half.table(true).contains("at most"), "{}", half.table(true));
    half.html().unwrap();
    let mut half = report();
    half.sent = None;
    assert_eq!(half.total_ms(), Some(210.0));
    assert!(half.json()["blackout_ms"].is_null());
    half.html().unwrap();
}

#[test]
fn the_page_is_complete_and_escapes_what_it_is_given() {
    let page = report().html().unwrap();
    assert_eq!(page.matches("<svg").count(), 3);
    assert_eq!(page.matches("</svg>").count(), 3);
    for part in [
        "blackout",
        "vCPU 1",
        "pages rewritten a second",
        "p99.9",
        "&lt;b&gt;&amp;",
        "verification failed",
    ] {
        assert!(page.contains(part), "{part}");
    }
    assert!(!page.contains("<b>&"), "escaped");
    for loaded in ["src=", "href=", "url(", "@import"] {
        assert!(
            !page.contains(loaded),
            "nothing is loaded from elsewhere: {loaded}"
        );
    }
}

#[test]
fn the_guest_stands_still_in_the_blackout() {
    let samples = report().samples();
    let times: Vec<u64> = samples.iter().map(|s| s.at_ns).collect();
    assert!(times.is_sorted(), "{times:?}");
    let at = |ns: u64| {
        samples
            .iter()
            .find(|s| s.at_ns == START + ns)
            .map(|s| s.done.clone())
    };
    assert_eq!(at(110_500_000), Some(vec![Some(333), Some(222)]));
    assert_eq!(at(112_500_000), at(110_500_000));
    assert_eq!(
        samples
            .iter()
            .filter(|s| s.at_ns > START + 110_500_000 && s.at_ns < START + 112_500_000)
            .count(),
        0
    );
}

#[test]
fn the_table_says_what_failed() {
    let table = report().table(true);
    for part in [
        "FAILED",
        "holds",
        "2.00 ms",
        "100 faults",
        "1 over 2 ms",
        "8000 pre-copy",
        "1.70 ms expected",
        "it does not converge",
        "8192 pages in 100.0 ms, 1900 left",
    ] {
        assert!(table.contains(part), "{part} in\n{table}");
    }
}

#[test]
fn the_short_table_has_the_essentials_in_narrow_rows() {
    let table = report().table(false);
    for part in [
        "moved",
        "took",
        "2.00 ms",
        "100: p50 20.0 us, p99",
        "FAILED",
    ] {
        assert!(table.contains(part), "{part} in\n{table}");
    }
    assert!(table.lines().count() <= 8, "{table}");
    let linux = report_of_linux(&[]).table(false);
    for part in ["9.00 ms during", "nothing wrong"] {
        assert!(linux.contains(part), "{part} in\n{linux}");
    }
    let mut paused = report();
    paused.sent.as_mut().unwrap().paused = true;
    assert_eq!(paused.blackout(), None);
    for verbose in [false, true] {
        let table = paused.table(verbose);
        assert!(table.contains("none: the VM was paused"), "{table}");
    }
}
