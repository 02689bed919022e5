//! `bench tdp` as a program or a person reads it.

mod support;

use support::{Dir, pageferry};

const ALONE: [&str; 7] = [
    "map_page",
    "map_range",
    "find",
    "find_random",
    "protect_range",
    "unmap_range",
    "unmap_page",
];

#[test]
fn the_json_and_the_page_have_every_operation() {
    let dir = Dir::new();
    let page = dir.path("tables.html");
    let shown = page.to_str().expect("a UTF-8 path");
    let ended = pageferry(&[
        "bench", "tdp", "--quick", "--repeat", "2", "--json", "--report", shown,
    ]);
    ended.assert_ok();
    let json = ended.json();
    let figures = json["figures"].as_array().expect("figures");
    for scheme in [
        "floor: compare-exchange",
        "pageferry tdp",
        "pagetable 0.4 (komora)",
    ] {
        for operation in ALONE {
            let figure = figures
                .iter()
                .find(|f| f["scheme"] == scheme && f["operation"] == operation)
                .unwrap_or_else(|| panic!("{operation} of {scheme}"));
            let number = |key: &str| figure[key].as_f64().expect("a number");
            assert!(number("min") > 0.0, "{figure}");
            assert!(number("min") <= number("value") && number("value") <= number("max"));
            assert_eq!(number("samples") + number("left_out"), 8.0, "{figure}");
            assert_eq!(figure["unit"], "ns");
        }
    }
    assert_eq!(json["absent"][0]["scheme"], "asterinas ostd");
    let verdicts = json["verdicts"].as_array().expect("verdicts");
    let named = |name: &str| verdicts.iter().find(|v| v["name"] == name);
    let map = named("map a page").expect("a bound of mapping");
    assert_eq!(map["limit"].as_f64(), Some(25.0));
    assert!(named("protect a range, to floor: compare-exchange").is_some());
    let page = std::fs::read_to_string(&page).expect("the page was written");
    assert!(page.matches("<h2>").count() > ALONE.len(), "{page}");
    assert!(page.contains("class=\"ours\""));
}

#[test]
fn what_cannot_be_measured_is_a_usage_error() {
    pageferry(&["bench", "tdp", "--repeat", "0"]).assert_failed(2, "0 is not in 1..=1000");
}
