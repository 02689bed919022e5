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
        let by = if bits {
            "dirty_bits"
        } else {
            "write_protection"
        };
        assert_eq!(json["dirty_by"], by);
        let cells = json["cells"].as_array().expect("cells");
        assert_eq!(cells.len(), 12, "{json}");
        for cell in cells {
            for key in ["serialised_ms", "parallel_ms"] {
                assert!(cell[key]["median"].as_f64().expect("a number") > 0.0);
            }
        }
        assert_eq!(json["verdicts"].as_array().expect("verdicts").len(), 12);
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
fn benchmarks_without_kvm_refuse_it() {
    for benchmark in ["soft", "states"] {
        let words = [benchmark, "--engine", "kvm", "--repeat", "1"];
        bench(&words).assert_failed(2, "use no KVM");
    }
}
