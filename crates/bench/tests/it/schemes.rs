//! The comparisons with other crates.

use crate::support::bench;
use serde_json::Value;

/// The subjects of the rows of a case.
fn subjects<'a>(rows: &'a Value, case: &str) -> Vec<&'a str> {
    let rows = rows.as_array().expect("an array of rows").iter();
    rows.filter(|row| row["case"] == case)
        .filter_map(|row| row["subject"].as_str())
        .collect()
}

#[test]
fn slots_are_measured_beside_other_crates() {
    let rows = bench(&[
        "slots", "--quick", "--slots", "10", "--repeat", "1", "--json",
    ])
    .json();
    let measured = subjects(&rows, "slots.by_gfn");
    for scheme in ["pageferry memslot", "vm-memory 0.18", "arc-swap imbl"] {
        let subject = format!("{scheme}, 10 slots");
        assert!(
            measured.contains(&subject.as_str()),
            "{subject} in {measured:?}"
        );
    }
}

#[test]
fn tables_are_measured_and_drawn() {
    let dir = tempfile::tempdir().expect("a folder");
    let page = dir.path().join("tables.html");
    let words = "tables --quick --repeat 1 --json --report"
        .split(' ')
        .map(str::to_owned);
    let words: Vec<String> = words.chain([page.display().to_string()]).collect();
    let rows = bench(&words).json();
    for case in ["map_page", "map_range", "find", "find_random", "unmap_page"] {
        let measured = subjects(&rows, &format!("tables.{case}"));
        assert!(measured.contains(&"pageferry tdp"), "{case}: {measured:?}");
    }
    let html = std::fs::read_to_string(page).expect("the page was written");
    assert!(html.contains("class=\"bar\"") && html.contains("tables.map_page"));
}

#[test]
fn what_cannot_be_measured_is_a_usage_error() {
    let fails = |words: &[&str], part| bench(words).assert_failed(2, part);
    fails(&["slots", "--slots", "2"], "2 is not in 4..=32764");
    let zero = bench(&["tables", "--repeat", "0"]);
    assert!(zero.stderr.contains("0 is not in 1..=1000"), "{zero:?}");
    let unwritten = [
        "tables",
        "--quick",
        "--repeat",
        "1",
        "--json",
        "--report",
        "/no/page.html",
    ];
    let ended = bench(&unwritten);
    ended.assert_failed(2, "cannot write /no/page.html");
    assert!(
        ended.stdout.contains("tables.find"),
        "the figures come first"
    );
}
