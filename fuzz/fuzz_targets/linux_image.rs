//! Kernels with any header and any contents: no panic, and a kernel that is accepted is where its
//! hart starts.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pageferry_addr::Gpa;
use pageferry_machine::{GuestRam, Linux, RamLayout};
use std::sync::OnceLock;

const MEMORY: u64 = 4 << 20;

fn ram() -> &'static GuestRam {
    static RAM: OnceLock<GuestRam> = OnceLock::new();
    RAM.get_or_init(|| {
        let layout = RamLayout::for_memory(MEMORY).expect("a size that a machine may have");
        GuestRam::new(layout).expect("memory")
    })
}

fn load(kernel: &[u8]) {
    let ram = ram();
    let linux = Linux {
        kernel,
        initrd: Some(b"initrd"),
        command_line: "console=hvc0",
    };
    if let Ok(start) = linux.load(ram, 1) {
        let mut found = vec![0; kernel.len()];
        ram.try_read(Gpa(start.entry), &mut found).expect("RAM");
        assert_eq!(found, kernel);
    }
}

fuzz_target!(|data: &[u8]| {
    load(data);
    // A header that is nearly right, with these bytes in it.
    let mut near = vec![0x13; 64 + 4096];
    near[8..16].fill(0);
    near[16..24].copy_from_slice(&8192_u64.to_le_bytes());
    near[24..32].fill(0);
    near[56..60].copy_from_slice(b"RSC\x05");
    let (at, rest) = data.split_first().unwrap_or((&0, &[]));
    let at = usize::from(*at) % 64;
    let end = (at + rest.len()).min(near.len());
    near[at..end].copy_from_slice(&rest[..end - at]);
    load(&near);
});
