//! Kernels with any header and any contents, for RISC-V and for PCs: no panic. A RISC-V kernel that
//! is accepted is where its hart starts.

use pageferry_addr::Gpa;
use pageferry_machine::board::MmioDevice;
use pageferry_machine::{GuestRam, Linux, RamLayout};
use std::sync::{Arc, OnceLock};

const MEMORY: u64 = 4 << 20;

fn ram() -> &'static Arc<GuestRam> {
    static RAM: OnceLock<Arc<GuestRam>> = OnceLock::new();
    RAM.get_or_init(|| {
        let layout = RamLayout::for_memory(MEMORY).expect("a size that a machine may have");
        Arc::new(GuestRam::new(layout).expect("memory"))
    })
}

fn load(kernel: &[u8]) {
    let ram = ram();
    let linux = Linux {
        kernel,
        initrd: Some(b"initrd"),
        command_line: "console=hvc0",
    };
    let _ = linux.load_pc(ram, 2, &[MmioDevice::at(0)]);
    if let Ok(start) = linux.load(ram, 1) {
        let mut found = vec![0; kernel.len()];
        ram.try_read(Gpa(start.entry), &mut found).expect("RAM");
        assert_eq!(found, kernel);
    }
}

pub(crate) fn run(data: &[u8]) {
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
    // A bzImage that is nearly right: flags, version, the places of kernel and initrd.
    let mut near = vec![0; 1024 + 4096];
    near[0x1f1] = 1;
    near[0x202..0x206].copy_from_slice(b"HdrS");
    near[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
    near[0x211] = 1;
    near[0x22c..0x230].copy_from_slice(&0x7fff_ffff_u32.to_le_bytes());
    near[0x236] = 1;
    near[0x238..0x23c].copy_from_slice(&2047_u32.to_le_bytes());
    near[0x258..0x260].copy_from_slice(&(1_u64 << 20).to_le_bytes());
    near[0x260..0x264].copy_from_slice(&0x10_0000_u32.to_le_bytes());
    let at = 0x1f1 + at % 0x7b;
    let end = (at + rest.len()).min(0x1f1 + 0x7b);
    near[at..end].copy_from_slice(&rest[..end - at]);
    load(&near);
    // An ELF file for x86-64 with these program headers and notes.
    let mut near = vec![0; 4096];
    near[..6].copy_from_slice(b"\x7fELF\x02\x01");
    near[18] = 62;
    near[24..32].copy_from_slice(&(1_u64 << 20).to_le_bytes());
    near[32] = 64;
    near[54] = 56;
    near[56] = 2;
    let end = (64 + data.len()).min(near.len());
    near[64..end].copy_from_slice(&data[..end - 64]);
    load(&near);
}
