//! `pageferry-compare`, used by programs and by people.

#[expect(dead_code, reason = "the tests of `pageferry` use all of it")]
#[path = "../../../cli/tests/it/json_document.rs"]
mod json_document;

use json_document::Document;
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Output};

fn compare(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pageferry-compare"));
    command.args(words).output().expect("the program starts")
}

fn json(words: &[&str]) -> Value {
    let output = compare(words);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// A quick run of `tables` with further words.
fn quick_tables<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let words = ["tables", "--quick", "--repeat", "1", "--json"];
    words.iter().chain(more).copied().collect()
}

fn fails(words: &[&str], code: i32, part: &str) {
    let output = compare(words);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(said.contains(part), "{said}");
}

/// The path of a file that is removed at the end of its test.
struct File(PathBuf);

impl File {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("pageferry-{}-{name}", std::process::id())))
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("a UTF-8 path")
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn slots_are_measured_beside_other_crates() {
    let json = json(&[
        "slots", "--quick", "--slots", "10", "--repeat", "1", "--json",
    ]);
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
    let page = File::new("tables.html");
    let json = json(&quick_tables(&["--report", page.path()]));
    let figures = json["figures"].as_array().expect("figures");
    for operation in ["map_page", "map_range", "find", "find_random", "unmap_page"] {
        let ours = figures
            .iter()
            .find(|figure| figure["scheme"] == "pageferry tdp" && figure["operation"] == operation);
        let ours = ours.unwrap_or_else(|| panic!("no figure of {operation}"));
        assert!(ours["value"].as_f64() > Some(0.0), "{ours}");
    }
    assert_eq!(json["absent"][0]["scheme"], "asterinas ostd");
    let html = std::fs::read_to_string(page.path()).expect("the page was written");
    assert!(html.contains("class=\"ours\"") && html.contains("map a page"));
}

#[test]
fn the_document_names_every_key() {
    let section = Document::read().section("pageferry-compare");
    let slots = json(&[
        "slots", "--quick", "--slots", "4", "--repeat", "1", "--json",
    ]);
    section.assert_describes(&slots, &["pages", "absent"], &[]);
    let tables = json(&quick_tables(&[]));
    let of_slots = ["figures[].slots", "verdicts[].slots", "line_transfer"];
    section.assert_describes(&tables, &of_slots, &[]);
}

#[test]
fn what_cannot_be_measured_is_a_usage_error() {
    fails(&["slots", "--slots", "2"], 2, "expected 4 to 32764");
    fails(&["tables", "--repeat", "0"], 2, "0 is not in 1..=1000");
    fails(
        &["slots", "--report", "page.html"],
        2,
        "unexpected argument",
    );
}

#[test]
fn a_page_that_cannot_be_written_does_not_cost_the_figures() {
    let output = compare(&quick_tables(&["--report", "/no/such/place/page.html"]));
    assert_eq!(output.status.code(), Some(2));
    let json: Value = serde_json::from_slice(&output.stdout).expect("the figures");
    assert!(!json["figures"].as_array().expect("figures").is_empty());
}

#[test]
fn the_help_has_the_exit_codes() {
    let output = compare(&["slots", "--help"]);
    let help = String::from_utf8_lossy(&output.stdout);
    assert!(
        help.contains("Exit codes:") && help.contains("12  the host"),
        "{help}"
    );
}

#[test]
fn a_recorded_result_becomes_a_page() {
    let dir = File::new("results");
    std::fs::create_dir(dir.path()).expect("a fresh directory");
    let file = format!("{}/1-slots.json", dir.path());
    let program = env!("CARGO_BIN_EXE_pageferry-compare");
    let words = [
        "record", &file, "--", program, "slots", "--quick", "--slots", "4", "--repeat", "1",
        "--json",
    ];
    let recorded = compare(&words);
    assert!(recorded.status.success(), "{recorded:?}");
    let page = compare(&["report", dir.path()]);
    let shown = String::from_utf8_lossy(&page.stdout);
    assert!(page.status.success(), "{page:?}");
    let command = "| 1 | `pageferry-compare slots --quick --slots 4 --repeat 1 --json` |";
    assert!(
        shown.contains(command) && shown.contains("4 slots | "),
        "{shown}"
    );
    std::fs::remove_file(&file).expect("the result is removed");
    fails(&["report", dir.path()], 2, "it has no results");
    fails(&["record", &file, "--", "false"], 12, "is not recorded");
    fails(
        &["record", &file, "--", "echo", "x"],
        2,
        "did not print JSON",
    );
    std::fs::remove_dir(dir.path()).expect("nothing was left behind");
}

#[test]
fn the_page_of_figures_is_made_of_the_results_that_are_there() {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");
    let made = compare(&["report", &format!("{docs}/results")]);
    assert!(made.status.success(), "{made:?}");
    let kept = std::fs::read_to_string(format!("{docs}/performance.md")).expect("the page");
    let made = String::from_utf8_lossy(&made.stdout);
    assert_eq!(
        kept, made,
        "write it again: pageferry-compare report docs/results"
    );
    let table = made.split("|---|---|---|---|---|---|\n").nth(1);
    let claims = table.expect("a table").lines();
    let claims = claims.take_while(|line| line.starts_with('|')).count();
    assert_eq!(claims, 20, "the results have every claim");
}
