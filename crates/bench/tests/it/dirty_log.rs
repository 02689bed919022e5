//! The output of `dirty-log`, for programs and for people.

use crate::support::bench;

#[test]
fn every_phase_is_there_for_programs_and_for_people() {
    let small = ["dirty-log", "--memory", "256K", "--repeat", "1"];
    for bits in [false, true] {
        let mut arguments = small.to_vec();
        arguments.extend(bits.then_some("--dirty-bits"));
        arguments.push("--json");
        let ended = bench(&arguments);
        ended.assert_ok();
        let json = ended.json();
        let rows = json.as_array().expect("rows");
        assert_eq!(rows.len(), 24, "{json}");
        let by = if bits {
            "dirty bits"
        } else {
            "write protection"
        };
        for row in rows {
            assert!(row["value"].as_f64() > Some(0.0), "{row}");
            let note = row["conditions"]["note"].as_str().expect("a note");
            assert!(note.ends_with(by), "{note}");
        }
    }
    let ended = bench(&small);
    ended.assert_ok();
    for word in ["populate", "disable", "partitioned", "overlapping"] {
        assert!(ended.stdout.contains(word), "{}", ended.stdout);
    }
}

#[test]
fn memory_that_is_no_whole_pages_is_a_usage_error() {
    bench(&["dirty-log", "--memory", "5000"]).assert_failed(2, "not a multiple of 4096");
}

#[test]
fn benchmarks_of_one_engine_take_none() {
    for benchmark in ["soft", "states"] {
        let words = [benchmark, "--engine", "kvm", "--repeat", "1"];
        bench(&words).assert_failed(2, "unexpected argument '--engine'");
    }
}
