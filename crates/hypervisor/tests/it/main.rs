//! The hypervisor's integration tests: harts (`hart_*`) and whole VMs (`vm_*`).

mod hart_alu;
mod hart_atomics;
mod hart_control;
mod hart_decode;
mod hart_memory;
mod hart_speed;
mod hart_traps;
mod support;
mod vm_atomics;
mod vm_dirty;
mod vm_dirty_api;
mod vm_dirty_log;
mod vm_exits;
mod vm_flush;
mod vm_in_flight;
mod vm_large_pages;
mod vm_mmu_stress;
mod vm_notifier;
mod vm_scheme;
mod vm_slot_changes;
mod vm_slots;
mod vm_snapshot;
mod vm_speed;
mod vm_stress;
mod vm_write_track;
mod vm_write_track_beside;
