//! Snapshot directories of Cloud Hypervisor: what is taken, and what is refused by which words.

use crate::ch::Directory;
use pageferry_bridge::ch::Snapshot;
use pageferry_pager::{Format, Stores};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;

fn mapping(slot: u64, gpa: u64, size: u64) -> Value {
    json!({"slot": slot, "gpa": gpa, "size": size, "zone_id": "a", "virtio_mem": false,
           "file_offset": 0})
}

fn range(gpa: u64, length: u64) -> Value {
    json!({ "gpa": gpa, "length": length })
}

fn config(memory: &Value) -> String {
    json!({ "cpus": { "boot_vcpus": 2 }, "memory": memory }).to_string()
}

fn shared() -> String {
    config(&json!({ "size": 4096, "shared": true }))
}

/// The state of a VM with these mappings, and these ranges in its memory file.
fn state(mappings: &[Value], ranges: &[Value]) -> String {
    let manager = json!({
        "memory_ranges": { "data": ranges }, "guest_ram_mappings": mappings, "boot_ram": 1,
    });
    let vm = json!({ "clock": null, "common_cpuid": [{ "function": 7 }] });
    json!({
        "snapshots": {
            "device-manager": { "snapshots": {}, "snapshot_data": null },
            "memory-manager": {
                "snapshots": {}, "snapshot_data": { "state": manager.to_string() },
            },
        },
        "snapshot_data": { "state": vm.to_string() },
    })
    .to_string()
}

fn parse(config: &str, state: &str) -> Result<Snapshot, String> {
    let parsed = Snapshot::parse(config.as_bytes(), state.as_bytes().to_vec());
    parsed.map_err(|error| error.to_string())
}

#[track_caller]
fn check_refused(config: &str, state: &str, sentence: &str) {
    let error = parse(config, state).expect_err(sentence);
    assert!(error.contains(sentence), "{error}");
}

fn good() -> String {
    let mappings = [mapping(0, 0, 8192), mapping(1, 1 << 32, 4096)];
    state(&mappings, &[range(1 << 32, 4096), range(0, 8192)])
}

#[test]
fn a_snapshot_has_the_config_and_the_memory_of_its_vm() {
    let snapshot = parse(&shared(), &good()).unwrap();
    assert_eq!(snapshot.memory_bytes(), 12288);
    assert_eq!(snapshot.vcpus(), Some(2));
    let zones = json!({ "size": 0, "zones": [{ "id": "a", "size": 1, "shared": true }] });
    assert_eq!(parse(&config(&zones), &good()).unwrap().vcpus(), Some(2));
    // On ARM there are no CPUID entries.
    let without = good().replace(r#",\"common_cpuid\":[{\"function\":7}]"#, "");
    assert_ne!(without, good());
    parse(&shared(), &without).unwrap();
}

#[test]
fn memory_that_a_process_does_not_take_is_refused_by_its_option() {
    for (memory, sentence) in [
        (json!({ "size": 1 }), "shared=off: expected shared=on"),
        (
            json!({ "size": 1, "shared": true, "hugepages": true }),
            "hugepages=on: expected hugepages=off",
        ),
        (
            json!({ "size": 1, "shared": true, "prefault": true }),
            "prefault=on: expected prefault=off",
        ),
        (
            json!({ "zones": [{ "shared": true }, { "shared": false }] }),
            "shared=off",
        ),
        (
            json!({ "zones": [{ "shared": true, "prefault": true }] }),
            "prefault=on",
        ),
        (
            json!({ "shared": 7 }),
            "config.json is none of Cloud Hypervisor",
        ),
    ] {
        check_refused(&config(&memory), &good(), sentence);
    }
}

#[test]
fn malformed_files_are_refused_by_name() {
    let long = format!("{}{}", shared(), " ".repeat(1 << 20));
    for (config, sentence) in [
        ("", "config.json has 0 bytes: expected 1 to 1048576"),
        (&long[..], "expected 1 to 1048576"),
        (
            "{}",
            "config.json is none of Cloud Hypervisor: missing field `memory`",
        ),
        ("{\"memory\":{\"shared\":true}} {}", "trailing characters"),
        ("\u{0}", "config.json is none of Cloud Hypervisor"),
    ] {
        check_refused(config, &good(), sentence);
    }
    let long = format!("{}{}", good(), " ".repeat(16 << 20));
    for (state, sentence) in [
        ("", "state.json has 0 bytes: expected 1 to 16777216"),
        (&long[..], "expected 1 to 16777216"),
        ("[]", "state.json is none of Cloud Hypervisor"),
        (
            r#"{"snapshots":{},"snapshot_data":{"state":"{}"}}"#,
            "missing field `memory-manager`",
        ),
        (
            &good().replace("guest_ram_mappings", "x")[..],
            "guest_ram_mappings",
        ),
        (
            &good().replace("memory_ranges", "x")[..],
            "missing field `memory_ranges`",
        ),
        (
            &good().replace(r#""state":"{"#, r#""state":"{{"#)[..],
            "key must be a string",
        ),
        (&"{\"snapshots\":".repeat(1000)[..], "EOF while parsing"),
    ] {
        check_refused(&shared(), state, sentence);
    }
}

#[test]
fn tables_that_do_not_fit_are_refused() {
    let maps = [mapping(0, 0, 8192), mapping(1, 1 << 32, 4096)];
    let many: Vec<_> = (0..65).map(|_| range(0, 4096)).collect();
    for (ranges, sentence) in [
        (vec![], "0 ranges of memory: expected 1 to 64"),
        (many, "65 ranges of memory"),
        (vec![range(0, 0)], "it is no whole pages"),
        (vec![range(1, 4096)], "it is no whole pages"),
        (vec![range(0, 4097)], "it is no whole pages"),
        (vec![range(8192, 4096)], "does not lie in one mapping"),
        (vec![range(4096, 8192)], "does not lie in one mapping"),
        (vec![range(0, 1 << 63)], "does not lie in one mapping"),
        (vec![range(!4095, 4096)], "does not lie in one mapping"),
        (vec![range(0, 8192)], "lacks the memory at 0x100000000"),
        (
            vec![range(4096, 4096), range(1 << 32, 4096)],
            "lacks the memory at 0x0",
        ),
        (
            vec![range(0, 4096), range(1 << 32, 4096)],
            "lacks the memory at 0x1000",
        ),
        (
            vec![range(0, 8192), range(4096, 4096), range(1 << 32, 4096)],
            "a range of 4096 bytes at 0x1000: another range has the same memory",
        ),
        (
            vec![range(0, 8192), range(1 << 32, 4096), range(1 << 32, 4096)],
            "a range of 4096 bytes at 0x100000000: another range has the same memory",
        ),
    ] {
        check_refused(&shared(), &state(&maps, &ranges), sentence);
    }
    let virtio =
        state(&maps, &[range(0, 8192)]).replace("virtio_mem\\\":false", "virtio_mem\\\":true");
    check_refused(&shared(), &virtio, "it is hot-pluggable (virtio-mem)");
    let overlap = [mapping(0, 0, 8192), mapping(1, 4096, 4096)];
    check_refused(
        &shared(),
        &state(&overlap, &[range(0, 8192)]),
        "begins inside it",
    );
}

#[test]
fn a_directory_lacks_no_file_and_no_byte() {
    let directory = Directory::new();
    let open = |path: &Path| {
        let opened = Snapshot::open(path, &Stores::default(), Format::Raw);
        opened.map_err(|error| error.to_string()).err()
    };
    let refused = |name: &str| open(directory.as_ref()).is_some_and(|why| why.contains(name));
    assert!(refused("config.json failed: No such file"));
    std::fs::write(directory.join("config.json"), shared()).unwrap();
    assert!(refused("state.json failed: No such file"));
    std::fs::write(directory.join("state.json"), good()).unwrap();
    assert!(refused("memory-ranges failed: No such file"));
    for (bytes, sentence) in [
        (
            0,
            "memory-ranges has 0 bytes: its table in state.json has 12288",
        ),
        (12287, "memory-ranges has 12287 bytes"),
        (12289, "memory-ranges has 12289 bytes"),
    ] {
        std::fs::write(directory.join("memory-ranges"), vec![1; bytes]).unwrap();
        assert!(refused(sentence), "{sentence}");
    }
    std::fs::write(directory.join("memory-ranges"), vec![1; 12288]).unwrap();
    assert_eq!(open(directory.as_ref()), None);
    let packed = Snapshot::open(directory.as_ref(), &Stores::default(), Format::Packed);
    assert!(packed.is_err(), "it is not packed");
    let none = open(Path::new("s3://bucket/web")).unwrap();
    assert!(none.contains("expected a path"), "{none}");
}

proptest! {
    #[test]
    fn no_bytes_make_the_parser_panic(
        config in prop::collection::vec(any::<u8>(), 0..100),
        state in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let _ = Snapshot::parse(&config, state.clone());
        let _ = Snapshot::parse(shared().as_bytes(), state);
    }

    /// Whatever is taken has each page of its mappings once.
    #[test]
    fn ranges_that_are_taken_have_all_memory(
        sizes in prop::collection::vec((1..4_u64, 0..3_u64), 1..4),
        raw in prop::collection::vec((0..12_u64, 0..5_u64), 1..6),
    ) {
        let (mut at, mut all, mut mappings) = (0, 0, Vec::new());
        for (slot, (pages, gap)) in sizes.iter().enumerate() {
            mappings.push(mapping(slot as u64, at << 12, pages << 12));
            at += pages + gap;
            all += pages << 12;
        }
        let ranges: Vec<_> = raw.iter().map(|(gpa, len)| range(gpa << 12, len << 12)).collect();
        if let Ok(snapshot) = parse(&shared(), &state(&mappings, &ranges)) {
            prop_assert_eq!(snapshot.memory_bytes(), all);
            let sum: u64 = raw.iter().map(|(_, len)| len << 12).sum();
            prop_assert_eq!(sum, all);
        }
    }
}
