//! The double's snapshots, and the JSON that they have in common with its migrations. Fields that
//! nobody here knows are among it.

use crate::double::guest::Guest;
use rustix::fs::SeekFrom;
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// A mapping of guest RAM.
pub(super) fn mapping(slot: u32, gpa: u64, size: u64, offset: u64) -> Value {
    json!({
        "slot": slot, "gpa": gpa, "size": size, "zone_id": "mem0", "virtio_mem": false,
        "file_offset": offset,
    })
}

/// All mappings.
pub(super) fn mappings(guest: &Guest) -> Vec<Value> {
    let regions = guest.memory.rams().iter();
    regions
        .map(|r| mapping(r.slot, r.gpa, r.size, r.offset))
        .collect()
}

/// The VM's configuration.
pub(super) fn vm_config(guest: &Guest) -> Value {
    json!({
        "cpus": { "boot_vcpus": guest.vcpus() },
        "memory": { "size": 0, "shared": true, "hugepages": false, "zones": null, "thp": true },
        "payload": { "kernel": "/a \"kernel\"" },
    })
}

/// The CPUID entries, as a receiver wants them.
pub(super) fn cpuid() -> Value {
    json!([{ "function": 0, "index": 0, "flags": 0, "eax": 13, "ebx": 4294967295_u32 }])
}

/// The state of the memory manager.
pub(super) fn memory_manager(mappings: &[Value], ranges: &[Value]) -> Value {
    json!({
        "memory_ranges": { "data": ranges },
        "guest_ram_mappings": mappings,
        "boot_ram": 0, "arch_mem_regions": [], "next_memory_slot": 9,
    })
}

/// The ranges of guest memory in a snapshot. The real order is that of a hash table.
fn ranges(guest: &Guest) -> Vec<Value> {
    let regions = guest.memory.rams().iter().rev();
    regions
        .map(|r| json!({ "gpa": r.gpa, "length": r.size }))
        .collect()
}

/// State: the tree of states, and besides what the double needs.
pub(super) fn state(guest: &Guest) -> Value {
    let node =
        |state: &Value| json!({ "snapshots": {}, "snapshot_data": { "state": state.to_string() } });
    let vm = json!({ "clock": { "clock": 1 }, "common_cpuid": cpuid() });
    json!({
        "snapshots": {
            "cpu-manager": { "snapshots": { "0": node(&json!({})) }, "snapshot_data": null },
            "memory-manager": node(&memory_manager(&mappings(guest), &ranges(guest))),
        },
        "snapshot_data": { "state": vm.to_string() },
        "double": guest.plan(),
    })
}

/// Writes the snapshot of a paused VM into a directory. Zero pages are holes.
pub(super) fn write(guest: &Guest, directory: &Path) -> std::io::Result<()> {
    if guest.is_running() {
        return Err(std::io::Error::other("the VM runs"));
    }
    std::fs::write(directory.join("config.json"), vm_config(guest).to_string())?;
    std::fs::write(directory.join("state.json"), state(guest).to_string())?;
    let memory = File::create_new(directory.join("memory-ranges"))?;
    memory.set_len(guest.memory.rams().iter().map(|region| region.size).sum())?;
    let mut cursor = 0;
    for region in guest.memory.rams().iter().rev() {
        let end = region.offset + region.size;
        let mut at = region.offset;
        while let Ok(start) = rustix::fs::seek(&region.fd, SeekFrom::Data(at)) {
            if start >= end {
                break;
            }
            let hole = rustix::fs::seek(&region.fd, SeekFrom::Hole(start))?.min(end);
            let mut bytes = vec![0; (hole - start) as usize];
            rustix::io::pread(&region.fd, &mut bytes[..], start)?;
            memory.write_all_at(&bytes, cursor + start - region.offset)?;
            at = hole;
        }
        cursor += region.size;
    }
    Ok(())
}
