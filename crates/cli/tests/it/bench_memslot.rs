//! The output of `bench memslot`, for programs and for people.

use crate::support::{Dir, pageferry};

const TESTS: [&str; 6] = [
    "map",
    "unmap",
    "unmap_chunked",
    "move_active",
    "move_inactive",
    "slot_setup",
];

#[test]
fn the_json_and_the_page_have_every_test() {
    let dir = Dir::new();
    let page = dir.path("slots.html");
    let shown = page.to_str().expect("a UTF-8 path");
    let ended = pageferry(&[
        "bench", "memslot", "--quick", "--slots", "33,10", "--repeat", "1", "--json", "--report",
        shown,
    ]);
    ended.assert_ok();
    let json = ended.json();
    let cells = json["cells"].as_array().expect("cells");
    let seen: Vec<_> = cells
        .iter()
        .map(|cell| (cell["slots"].as_u64(), cell["test"].as_str()))
        .collect();
    let expected: Vec<_> = [10, 33]
        .into_iter()
        .flat_map(|slots| TESTS.map(|test| (Some(slots), Some(test))))
        .collect();
    assert_eq!(seen, expected);
    for cell in cells {
        for scheme in ["array_copy", "scalable"] {
            let figure = |key: &str| cell[scheme][key].as_f64().expect("a number");
            assert!(figure("min_s") > 0.0 && figure("samples") >= 1.0, "{cell}");
            assert!(figure("min_s") <= figure("median_s"), "{cell}");
            assert!(figure("median_s") <= figure("max_s"), "{cell}");
        }
        assert_eq!(cell["xeon"].is_null(), cell["slots"] == 33, "{cell}");
    }
    let measured = json["kvm_absent"].is_null();
    for call in json["calls"].as_array().expect("calls") {
        assert_eq!(call["kvm"].is_null(), !measured, "{call}");
    }
    let page = std::fs::read_to_string(&page).expect("the page was written");
    assert_eq!(page.matches("<svg").count(), TESTS.len());
    assert!(page.contains("Move inactive"));
}

#[test]
fn what_cannot_be_measured_is_a_usage_error() {
    pageferry(&["bench", "memslot", "--slots", "2"]).assert_failed(2, "2 is not in 3..=32764");
    pageferry(&["bench", "memslot", "--micro"]).assert_failed(2, "unexpected argument");
}

#[test]
fn a_page_that_cannot_be_written_does_not_cost_the_figures() {
    let ended = pageferry(&[
        "bench",
        "memslot",
        "--quick",
        "--slots",
        "10",
        "--repeat",
        "1",
        "--json",
        "--report",
        "/no/such/place/page.html",
    ]);
    ended.assert_failed(2, "cannot write the report to /no/such/place/page.html");
    assert!(!ended.json()["cells"].as_array().expect("cells").is_empty());
}

#[test]
fn benchmarks_without_kvm_refuse_it() {
    for benchmark in ["soft", "states"] {
        let words = ["bench", benchmark, "--engine", "kvm", "--repeat", "1"];
        pageferry(&words).assert_failed(2, "use no KVM");
    }
}
