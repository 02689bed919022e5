//! `tunnel`: its rows, and what it refuses.

use crate::support::bench;
use pageferry_testkit::certificates::{Authority, Validity::Now};
use pageferry_testkit::qemu::{self, Qemu};
use pageferry_testkit::skip;
use pageferry_testkit::two_hosts::{Link, Rate, or_skip};
use serde_json::Value;
use std::path::Path;
use std::sync::OnceLock;

/// The rows of the shortest run with TLS, which all tests share. `None` if this machine cannot.
pub(crate) fn quick() -> Option<&'static Value> {
    static ROWS: OnceLock<Option<Value>> = OnceLock::new();
    let run = || {
        if let Err(why) = Qemu::find(Path::new(qemu::PROGRAM)) {
            skip("qemu", why);
            return None;
        }
        drop(or_skip(&Link::new(Rate::mbit(1000)))?);
        let side = Authority::new("test").issue(&["here"], Now);
        let file = |name| side.path(name).display().to_string();
        let words = "tunnel --quick --memory 16M --json --peer-name here".split(' ');
        let mut words: Vec<_> = words.map(str::to_owned).collect();
        for (flag, name) in [
            ("--tls-cert", "cert.pem"),
            ("--tls-key", "key.pem"),
            ("--tls-ca", "ca.pem"),
        ] {
            words.extend([flag.to_owned(), file(name)]);
        }
        Some(bench(&words).json())
    };
    ROWS.get_or_init(run).as_ref()
}

#[test]
fn every_way_has_its_rows() {
    let Some(json) = quick() else {
        return;
    };
    let rows = json.as_array().expect("an array of rows");
    for (case, ways) in [
        ("tunnel.urgent_mean", 4),
        ("tunnel.urgent_p50", 4),
        ("tunnel.push_rate", 6),
        ("tunnel.blackout", 3),
        ("tunnel.memory", 8),
    ] {
        let of = rows.iter().filter(|row| row["case"] == case);
        assert_eq!(of.clone().count(), ways, "{case} in {json}");
        for row in of.filter(|row| row["case"] != "tunnel.memory") {
            assert!(row["value"].as_f64() > Some(0.0), "{row}");
        }
    }
    let judged = rows.iter().filter(|row| row["met"].is_boolean());
    assert_eq!(judged.count(), 6, "{json}");
}

#[test]
fn what_cannot_be_measured_is_a_usage_error() {
    let fails = |more: &[&str], part: &str| {
        bench(&[&["tunnel"], more].concat()).assert_failed(2, part);
    };
    fails(&["--rate", "fast"], "expected a whole number with bit");
    fails(&["--memory", "9M"], "expected a multiple of 8 MiB");
    fails(&["--repeat", "0"], "0 is not in 1..=1000");
    fails(&["--peer-program", "/nonexistent"], "qemu-system-misc");
}
