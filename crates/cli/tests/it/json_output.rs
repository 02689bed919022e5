//! What `docs/json-output.md` says, beside what the commands print.

use crate::json_document::Document;
use crate::support::{Source, pageferry, status};

#[track_caller]
fn json(words: &[&str]) -> serde_json::Value {
    let ended = pageferry(words);
    ended.assert_ok();
    ended.json()
}

#[test]
fn the_report_of_a_migration_is_described() {
    let demo = [
        "demo", "--engine", "soft", "--vcpus", "1", "--memory", "16M", "--json",
    ];
    let document = Document::read();
    let section = document.section("demo, migrate, receive");
    let section = section.and(document.section("Conditions"));
    // The tables of conditions name the keys below `conditions`.
    let output = json(&demo);
    let conditions = [
        "version",
        "build",
        "kernel",
        "arch",
        "cores",
        "host_memory_bytes",
        "link",
        "precopy_passes",
        "engine_because",
    ];
    section.assert_describes(&output, &conditions, &[]);
    document
        .section("Conditions")
        .assert_describes(&output["conditions"], &[], &[]);
}

#[test]
fn what_probe_finds_is_described() {
    let document = Document::read();
    let section = document.section("probe");
    let section = section.and(document.section("Conditions"));
    let conditions = [
        "version",
        "build",
        "kernel",
        "arch",
        "cores",
        "host_memory_bytes",
        "link",
        "precopy_passes",
        "engine_because",
    ];
    section.assert_describes(&json(&["probe", "--json"]), &conditions, &[]);
}

#[test]
fn the_status_of_a_vm_is_described() {
    let source = Source::start("16M");
    let section = Document::read().section("status");
    let status = status(&source.socket).expect("a status");
    section.assert_describes(&status, &[], &["guest"]);
    source.assert_unharmed();
}

#[test]
fn the_exit_codes_are_those_of_the_program() {
    let printed = pageferry(&["help", "exit-codes"]);
    printed.assert_ok();
    assert_eq!(pageferry(&["exit-codes"]).stdout.trim(), {
        let table = printed.stdout.split("Usage:").next().expect("text");
        table.trim()
    });
    let program: Vec<(String, String)> = printed
        .stdout
        .lines()
        .filter_map(|line| line.trim_start().split_once("  "))
        .filter(|(code, _)| code.parse::<u8>().is_ok())
        .map(|(code, meaning)| (code.to_owned(), meaning.to_owned()))
        .collect();
    let document = Document::read();
    let section = document.section("Exit codes");
    let documented: Vec<(String, String)> = section
        .rows()
        .filter(|row| row[0].parse::<u8>().is_ok())
        .map(|row| (row[0].to_owned(), row[1].to_owned()))
        .collect();
    assert!(program.len() >= 15, "{program:?}");
    assert_eq!(program, documented);
}

#[cfg(feature = "bench")]
mod bench {
    use super::*;
    use pageferry_testkit::skip;

    #[test]
    fn the_rows_of_benchmarks_are_described() {
        let rows = json(&["bench", "soft", "--repeat", "1", "--json"]);
        Document::read()
            .section("bench")
            .assert_describes(&rows, &[], &[]);
    }

    #[test]
    fn the_figures_of_memslot_are_described() {
        let words = [
            "bench", "memslot", "--quick", "--slots", "10", "--repeat", "1", "--json",
        ];
        let section = Document::read().section("bench memslot");
        section.assert_describes(&json(&words), &[], &[]);
    }

    #[test]
    fn the_figures_of_dirty_log_are_described() {
        let words = [
            "bench",
            "dirty-log",
            "--memory",
            "256K",
            "--repeat",
            "1",
            "--json",
        ];
        let document = Document::read();
        let section = document
            .section("bench dirty-log")
            .and(document.section("bench"));
        let rows = [
            "case", "subject", "value", "unit", "ratio", "baseline", "min", "max", "samples",
            "target", "met",
        ];
        section.assert_describes(&json(&words), &rows, &[]);
    }

    #[test]
    fn the_figures_of_demand_paging_are_described() {
        let common = [
            "bench",
            "demand-paging",
            "--memory-per-vcpu",
            "256K",
            "--repeat",
            "2",
            "--vcpus",
            "1",
            "--json",
        ];
        let section = Document::read().section("bench demand-paging");
        let [measured, modelled] = section.split("With `--model` it prints another object");
        let with =
            |more: &[&str]| pageferry(&common.iter().chain(more).copied().collect::<Vec<_>>());
        let soft = with(&["--engine", "soft"]);
        soft.assert_ok();
        measured.assert_describes(&soft.json(), &[], &[]);
        let model = with(&["--model"]);
        // One core, or cores that other work has.
        if matches!(model.code, Some(2 | 15)) && skip("cores", &model.stderr) {
            return;
        }
        model.assert_ok();
        modelled.assert_describes(&model.json(), &[], &[]);
    }
}
