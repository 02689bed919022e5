//! The files of a snapshot of Cloud Hypervisor: its configuration, its state, and the tables in it.

use pageferry_bridge::ch::Snapshot;

const CONFIG: &[u8] = br#"{"memory":{"shared":true}}"#;

/// The state of a VM with this text of its memory manager.
fn state(manager: &str) -> Vec<u8> {
    let leaf =
        |text: &str| serde_json::json!({ "snapshots": {}, "snapshot_data": { "state": text } });
    let root = serde_json::json!({
        "snapshots": { "memory-manager": leaf(manager) },
        "snapshot_data": { "state": "{}" },
    });
    root.to_string().into_bytes()
}

pub(crate) fn run(bytes: &[u8]) {
    let Some((kind, rest)) = bytes.split_first() else {
        return;
    };
    let parsed = match kind % 3 {
        0 => Snapshot::parse(rest, state("{}")),
        1 => Snapshot::parse(CONFIG, rest.to_vec()),
        // Mappings and ranges from bytes, so that tables are near what is taken.
        _ => {
            let (mut mappings, mut ranges) = (Vec::new(), Vec::new());
            for (slot, row) in rest.as_chunks::<4>().0.iter().enumerate() {
                let [is_range, gpa, size, shift] = row.map(u64::from);
                let (gpa, size) = (gpa << (shift % 57), size << 12);
                if is_range % 2 == 0 {
                    mappings.push(serde_json::json!({
                        "slot": slot, "gpa": gpa, "size": size, "file_offset": 0,
                        "virtio_mem": shift > 250,
                    }));
                } else {
                    ranges.push(serde_json::json!({ "gpa": gpa, "length": size }));
                }
            }
            let manager = serde_json::json!({
                "guest_ram_mappings": mappings, "memory_ranges": { "data": ranges },
            });
            let parsed = Snapshot::parse(CONFIG, state(&manager.to_string()));
            if let Ok(snapshot) = &parsed {
                let sum = |rows: &[serde_json::Value], name: &str| -> u64 {
                    rows.iter().filter_map(|row| row[name].as_u64()).sum()
                };
                assert_eq!(snapshot.memory_bytes(), sum(&mappings, "size"));
                assert_eq!(snapshot.memory_bytes(), sum(&ranges, "length"));
            }
            parsed
        }
    };
    if let Ok(snapshot) = parsed {
        assert!(snapshot.memory_bytes() > 0);
        let _ = snapshot.vcpus();
    }
}
