//! `docs/json-output.md`, compared with the output of the commands.

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
        "switch",
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
        "switch",
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
fn the_results_of_snapshot_are_described() {
    use crate::snapshot::{files, snapshot};
    let dir = crate::support::Dir::new();
    files(&dir);
    let document = Document::read();
    let run = |line: &str| {
        let ended = snapshot(&dir, &format!("{line} --json"));
        ended.assert_ok();
        ended.json()
    };
    let packed = document.section("snapshot pack, diff, and info");
    let of_info = [
        "bases[].id",
        "bases[].file",
        "states[].name",
        "states[].bytes",
        "vmm",
        "vmm_version",
        "cpu",
    ];
    let full = run("pack @full.mem @full --state @vmstate");
    packed.assert_describes(&full, &of_info, &[]);
    let diff = run("diff @full @diff.mem @diff --state @vmstate");
    packed.assert_describes(&diff, &of_info, &[]);
    packed.assert_describes(&run("info @diff"), &["ms", "zeroed_pages"], &[]);
    let unpacked = document.section("snapshot unpack");
    unpacked.assert_describes(&run("unpack @full @unpacked"), &[], &[]);
    let verified = document.section("snapshot verify");
    verified.assert_describes(&run("verify @diff"), &[], &[]);
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
