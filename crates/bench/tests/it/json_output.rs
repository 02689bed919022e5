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
        "number" => value.is_number(),
        "integer" => value.is_u64(),
        "boolean" => value.is_boolean(),
        "string" | "text" => value.is_string(),
        "object" => value.is_object(),
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
    // Without a core for each of two threads, these have no figures.
    let optional = ["tables.map_partitioned", "tables.map_overlapping"];
    let needed = |all: BTreeSet<&str>| -> Vec<String> {
        let needed = all.into_iter().filter(|case| !optional.contains(case));
        needed.map(str::to_owned).collect()
    };
    assert_eq!(
        needed(found),
        needed(documented),
        "the cases of {benchmark}"
    );
    assert!(!rows.is_empty(), "{benchmark}");
    rows.clone()
}

#[test]
fn the_rows_of_linux_are_described() {
    let Some(output) = crate::linux::quick() else {
        return;
    };
    let section = Document::read().section("pageferry-bench");
    let rows = rows_with_documented_cases(&section, "linux", output);
    assert_described(&section, &Value::Array(rows), &[]);
}

#[test]
fn the_rows_of_tunnel_are_described() {
    let Some(output) = crate::tunnel::quick() else {
        return;
    };
    let section = Document::read().section("pageferry-bench");
    let rows = rows_with_documented_cases(&section, "tunnel", output);
    assert_described(&section, &Value::Array(rows), &[]);
}

#[test]
fn the_rows_of_benchmarks_are_described() {
    let section = Document::read().section("pageferry-bench");
    let mut all = Vec::new();
    for words in [
        "link --engine soft",
        "blackout --engine soft",
        "soft",
        "states",
    ] {
        let mut words: Vec<_> = words.split(' ').collect();
        let benchmark = words[0];
        words.extend(["--repeat", "1", "--json"]);
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
fn the_rows_of_the_others_are_described() {
    let section = Document::read().section("pageferry-bench");
    let mut all = Vec::new();
    let mut check = |benchmark, words: &str| {
        let ended = bench(&words.split(' ').collect::<Vec<_>>());
        let is_busy = matches!(ended.code, Some(2 | BUSY));
        if is_busy && benchmark == "demand-paging --model" && skip("cores", &ended.stderr) {
            return;
        }
        all.extend(rows_with_documented_cases(
            &section,
            benchmark,
            &ended.json(),
        ));
    };
    check("dirty-log", "dirty-log --memory 256K --repeat 1 --json");
    let paging = "demand-paging --memory-per-vcpu 256K --repeat 2 --json";
    check(
        "demand-paging",
        &format!("{paging} --vcpus 1,2 --engine soft --quick"),
    );
    check(
        "demand-paging --model",
        &format!("{paging} --vcpus 1 --model"),
    );
    check("tables", "tables --quick --repeat 1 --json");
    if !crate::postcopy_latency::skipped() {
        let words = crate::postcopy_latency::TINY.join(" ");
        check("postcopy-latency", &format!("{words} --json"));
    }
    assert_described(&section, &Value::Array(all), &[]);
}
