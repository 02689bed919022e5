//! All fuzz targets in one program, so that one link serves them. The variable `PAGEFERRY_FUZZ`
//! names the target.
#![no_main]

mod cache_index;
mod ch_message;
mod ch_snapshot;
mod cpu_model;
mod device_moved_state;
mod device_registers;
mod device_states;
mod fc_config;
mod fuse_message;
mod hello;
mod http_head;
mod linux_image;
mod memslot_ops;
mod pager_handshake;
mod pager_request;
mod plic_state;
mod recording;
mod remote_peer;
mod saved_vm;
mod sbi_call;
mod session_step;
mod snapshot;
mod tunnel_record;
mod wire_stream;
mod wire_urgent;

use libfuzzer_sys::fuzz_target;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::LazyLock;

/// More than a chunk of the largest size, a decompressor, a whole reply, or the details of such
/// small files.
const MAX_ALLOCATION: usize = 4 << 20;

/// Refuses large allocations: no foreign bytes make the program ask for much memory.
struct Bounded;

// SAFETY: the system's allocator does the work, with the same arguments.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > MAX_ALLOCATION {
            // The fuzzer reports a crash. A panic would allocate.
            std::process::abort();
        }
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static BOUNDED: Bounded = Bounded;

type Target = fn(&[u8]);

const TARGETS: [(&str, Target); 25] = [
    ("cache_index", cache_index::run),
    ("ch_message", ch_message::run),
    ("ch_snapshot", ch_snapshot::run),
    ("cpu_model", cpu_model::run),
    ("device_moved_state", device_moved_state::run),
    ("device_registers", device_registers::run),
    ("device_states", device_states::run),
    ("fc_config", fc_config::run),
    ("fuse_message", fuse_message::run),
    ("hello", hello::run),
    ("http_head", http_head::run),
    ("linux_image", linux_image::run),
    ("memslot_ops", memslot_ops::run),
    ("pager_handshake", pager_handshake::run),
    ("pager_request", pager_request::run),
    ("plic_state", plic_state::run),
    ("recording", recording::run),
    ("remote_peer", remote_peer::run),
    ("saved_vm", saved_vm::run),
    ("sbi_call", sbi_call::run),
    ("session_step", session_step::run),
    ("snapshot", snapshot::run),
    ("tunnel_record", tunnel_record::run),
    ("wire_stream", wire_stream::run),
    ("wire_urgent", wire_urgent::run),
];

/// The target that the variable names.
static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("PAGEFERRY_FUZZ").unwrap_or_default();
    match TARGETS.iter().find(|target| target.0 == name) {
        Some(target) => target.1,
        None => panic!(
            "PAGEFERRY_FUZZ is '{name}': expected one of {}",
            TARGETS.map(|target| target.0).join(", ")
        ),
    }
});

fuzz_target!(|bytes: &[u8]| TARGET(bytes));
