//! `docs/json-output.md`, compared with the output of the benchmarks.

use crate::json_document::Document;
use crate::json_document::Section;
use crate::support::bench;
use pageferry_testkit::skip;
use serde_json::Value;
use std::collections::BTreeSet;

/// The exit code of a host whose cores have other work.
const BUSY: i32 = 15;

/// The values at `path`: points between keys, `[]` for all elements of an array.
fn values<'a>(value: &'a Value, path: &str) -> Vec<&'a Value> {
    let (first, rest) = path.split_once('.').unwrap_or((path, ""));
    let name = first.strip_suffix("[]");
    match value {
        // An array of rows, or the elements of `name[]`.
        Value::Array(all) => all.iter().flat_map(|value| values(value, path)).collect(),
        Value::Object(map) => match map.get(name.unwrap_or(first)) {
            Some(found) if rest.is_empty() => vec![found],
            Some(found) => values(found, rest),
            None => Vec::new(),
        },
        _ => Vec::new(),
    }
}

/// Whether `value` has the documented type `kind`.
fn has_type(value: &Value, kind: &str) -> bool {
    let literals: Vec<&str> = kind.split('`').skip(1).step_by(2).collect();
    if literals.iter().any(|literal| literal.starts_with('"')) {
        let name = value.as_str().unwrap_or_default();
        return literals.iter().any(|known| known.trim_matches('"') == name);
    }
    match kind.split([' ', ',']).next().unwrap_or_default() {
        "number" | "numbers" => value.is_number(),
        "integer" | "integers" => value.is_u64(),
        "boolean" => value.is_boolean(),
        "string" | "text" => value.is_string(),
        "object" | "figure" => value.is_object(),
        "array" => value.is_array(),
        "`true`" => value == true,
        "`false`" => value == false,
        _ => panic!("docs/json-output.md names a type that this test does not know: {kind}"),
    }
}

/// Fails unless every value has the type that the tables of `section` give. Only a key whose
/// row mentions null may be null.
#[track_caller]
fn assert_types(section: &Section, output: &Value) {
    let rows = section.rows();
    for row in rows.filter(|row| row.len() > 2 && row[0].starts_with('`')) {
        let mut parent = "";
        for (index, key) in row[0].split('`').skip(1).step_by(2).enumerate() {
            let path = match key.strip_prefix('.') {
                Some(key) => format!("{parent}.{key}"),
                None => key.to_owned(),
            };
            if let Some((before, _)) = key.rsplit_once('.').filter(|pair| !pair.0.is_empty()) {
                parent = before;
            }
            let kinds: Vec<&str> = row[1].split("; ").collect();
            let kind = kinds.get(index).unwrap_or(&kinds[0]);
            for value in values(output, &path) {
                assert!(
                    has_type(value, kind) || value.is_null() && row[2].contains("null"),
                    "docs/json-output.md: {path} is '{kind}', not {value}"
                );
            }
        }
    }
}

/// Fails unless `section` describes `output`: its keys, except those of `absent`, and types.
#[track_caller]
fn assert_described(section: &Section, output: &Value, absent: &[&str]) {
    section.assert_describes(output, absent, &[]);
    assert_types(section, output);
}

/// The rows of a benchmark. Fails unless `section` lists their cases.
#[track_caller]
fn rows_with_documented_cases(section: &Section, benchmark: &str, output: &Value) -> Vec<Value> {
    let rows = output.as_array().expect("an array of rows");
    let found: BTreeSet<&str> = rows.iter().filter_map(|row| row["case"].as_str()).collect();
    let name = format!("`{benchmark}`");
    let cases = section.rows().find(|row| row[0] == name);
    let cases = cases.expect("a row of cases")[1];
    let documented: BTreeSet<&str> = cases.split('`').skip(1).step_by(2).collect();
    assert_eq!(found, documented, "the cases of bench {benchmark}");
    rows.clone()
}

#[test]
fn the_rows_of_linux_are_described() {
    let Some(output) = crate::linux::quick() else {
        return;
    };
    let section = Document::read().section("bench");
    let rows = rows_with_documented_cases(&section, "linux", output);
    assert_described(&section, &Value::Array(rows), &[]);
}

#[test]
fn the_rows_of_tunnel_are_described() {
    let Some(output) = crate::tunnel::quick() else {
        return;
    };
    let section = Document::read().section("bench");
    let rows = rows_with_documented_cases(&section, "tunnel", output);
    assert_described(&section, &Value::Array(rows), &[]);
}

#[test]
fn the_rows_of_benchmarks_are_described() {
    let section = Document::read().section("bench");
    let mut all = Vec::new();
    for benchmark in ["link", "blackout", "soft", "states"] {
        let words = [benchmark, "--engine", "soft", "--repeat", "1", "--json"];
        let ended = bench(&words);
        if ended.code == Some(BUSY) && skip("cores", &ended.stderr) {
            continue;
        }
        ended.assert_ok();
        let output = ended.json();
        all.extend(rows_with_documented_cases(&section, benchmark, &output));
    }
    let words = "restore --memory 32M --working-set 2M --repeat 1 --json";
    let ended = bench(&words.split(' ').collect::<Vec<_>>());
    if !(ended.code == Some(2) && skip("uffd", &ended.stderr)) {
        ended.assert_ok();
        all.extend(rows_with_documented_cases(
            &section,
            "restore",
            &ended.json(),
        ));
    }
    if !all.is_empty() {
        assert_described(&section, &Value::Array(all), &[]);
    }
}

#[test]
fn the_figures_of_postcopy_latency_are_described() {
    use crate::postcopy_latency::{TINY, skipped};
    if skipped() {
        return;
    }
    let section = Document::read().section("bench postcopy-latency");
    let output = bench(&[&TINY[..], &["--json"]].concat()).json();
    assert_described(&section, &output, &[]);
}

#[test]
fn the_figures_of_dirty_log_are_described() {
    let words = ["dirty-log", "--memory", "256K", "--repeat", "1", "--json"];
    let document = Document::read();
    let section = document
        .section("bench dirty-log")
        .and(document.section("bench"));
    let rows = [
        "case", "subject", "value", "unit", "ratio", "baseline", "min", "max", "samples", "target",
        "met",
    ];
    assert_described(&section, &bench(&words).json(), &rows);
}

#[test]
fn the_figures_of_demand_paging_are_described() {
    let common = [
        "demand-paging",
        "--memory-per-vcpu",
        "256K",
        "--repeat",
        "2",
        "--vcpus",
        "1",
        "--json",
    ];
    let document = Document::read();
    let section = document.section("bench demand-paging");
    let [measured, modelled] = section.split("With `--model` it prints another object");
    let measured = measured.and(document.section("bench"));
    let with = |more: &[&str]| bench(&common.iter().chain(more).copied().collect::<Vec<_>>());
    let soft = with(&["--engine", "soft", "--quick"]);
    soft.assert_ok();
    // The keys of a row, which the output has below `rows`.
    let of_rows = [
        "case",
        "subject",
        "value",
        "unit",
        "ratio",
        "baseline",
        "min",
        "max",
        "samples",
        "target",
        "met",
        "conditions",
    ];
    assert_described(&measured, &soft.json(), &of_rows);
    let model = with(&["--model"]);
    // One core, or cores that other work has.
    if matches!(model.code, Some(2 | BUSY)) && skip("cores", &model.stderr) {
        return;
    }
    model.assert_ok();
    assert_described(&modelled, &model.json(), &[]);
}
