//! Recorded results, and the page of figures.

use crate::support::{BENCH, bench};

#[test]
fn the_help_has_the_exit_codes() {
    let help = bench(&["--help"]).stdout;
    let codes = help.contains("Exit codes:") && help.contains("12  the host");
    assert!(codes, "{help}");
}

#[test]
fn a_recorded_result_becomes_a_page() {
    let fails = |words: &[&str], code, part| bench(words).assert_failed(code, part);
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().to_str().expect("a UTF-8 path");
    let file = format!("{folder}/1-tables.json");
    let words = [
        "record", &file, "--", BENCH, "tables", "--quick", "--repeat", "1", "--json",
    ];
    bench(&words).assert_ok();
    let record = std::fs::read_to_string(&file).expect("the record");
    let rows = record.matches("\"case\"").count();
    assert!((1..30).contains(&rows), "only judged rows are kept: {rows}");
    fails(&["record", &file, "--", "false"], 12, "is not recorded");
    fails(
        &["record", &file, "--", "echo", "x"],
        2,
        "did not print rows",
    );
    std::fs::remove_file(&file).expect("the result is removed");
    fails(&["report", folder], 2, "it has no results");
    std::fs::remove_dir(dir.path()).expect("nothing was left behind");
}

#[test]
fn the_page_of_figures_is_made_of_the_results_that_are_there() {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");
    let made = bench(&["report", &format!("{docs}/results")]);
    made.assert_ok();
    let kept = std::fs::read_to_string(format!("{docs}/performance.md")).expect("the page");
    assert_eq!(
        kept, made.stdout,
        "write it again: pageferry-bench report docs/results"
    );
    let table = made.stdout.split("|---|---|---|---|---|---|\n").nth(1);
    let claims = table.expect("a table").lines();
    let claims = claims.take_while(|line| line.starts_with('|')).count();
    assert_eq!(claims, 24, "the results have every claim");
}
