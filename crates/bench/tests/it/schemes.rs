//! The comparisons with other crates.

use crate::json_document::Document;
use crate::support::bench;

/// A quick run of `tables` with further words.
fn quick_tables<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let words = ["tables", "--quick", "--repeat", "1", "--json"];
    words.iter().chain(more).copied().collect()
}

#[track_caller]
fn fails(words: &[&str], code: i32, part: &str) {
    bench(words).assert_failed(code, part);
}

#[test]
fn slots_are_measured_beside_other_crates() {
    let json = bench(&[
        "slots", "--quick", "--slots", "10", "--repeat", "1", "--json",
    ])
    .json();
    let figures = json["figures"].as_array().expect("figures");
    for scheme in ["pageferry memslot", "vm-memory 0.18", "arc-swap imbl"] {
        assert!(
            figures.iter().any(|figure| figure["scheme"] == scheme),
            "{scheme}"
        );
    }
    assert!(figures.iter().all(|figure| figure["slots"] == 10));
}

#[test]
fn tables_are_measured_and_drawn() {
    let dir = tempfile::tempdir().expect("a folder");
    let page = dir.path().join("tables.html");
    let page = page.to_str().expect("a UTF-8 path");
    let json = bench(&quick_tables(&["--report", page])).json();
    let figures = json["figures"].as_array().expect("figures");
    for operation in ["map_page", "map_range", "find", "find_random", "unmap_page"] {
        let ours = figures
            .iter()
            .find(|figure| figure["scheme"] == "pageferry tdp" && figure["operation"] == operation);
        let ours = ours.unwrap_or_else(|| panic!("no figure of {operation}"));
        assert!(ours["value"].as_f64() > Some(0.0), "{ours}");
    }
    assert_eq!(json["absent"][0]["scheme"], "asterinas ostd");
    let html = std::fs::read_to_string(page).expect("the page was written");
    assert!(html.contains("class=\"ours\"") && html.contains("map a page"));
}

#[test]
fn the_document_names_every_key() {
    let section = Document::read().section("slots and tables");
    let slots = bench(&[
        "slots", "--quick", "--slots", "4", "--repeat", "1", "--json",
    ])
    .json();
    section.assert_describes(&slots, &["pages", "absent"], &[]);
    let tables = bench(&quick_tables(&[])).json();
    let of_slots = ["figures[].slots", "verdicts[].slots", "line_transfer"];
    section.assert_describes(&tables, &of_slots, &[]);
}

#[test]
fn what_cannot_be_measured_is_a_usage_error() {
    fails(&["slots", "--slots", "2"], 2, "expected 4 to 32764");
    fails(&["tables", "--repeat", "0"], 2, "0 is not in 1..=1000");
    let page = ["slots", "--report", "page.html"];
    fails(&page, 2, "unexpected argument");
}

#[test]
fn a_page_that_cannot_be_written_does_not_cost_the_figures() {
    let ended = bench(&quick_tables(&["--report", "/no/such/place/page.html"]));
    ended.assert_failed(2, "cannot write /no/such/place/page.html");
    assert!(ended.stdout.contains("figures"));
}
