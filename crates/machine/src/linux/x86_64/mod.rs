//! An x86-64 kernel: `bzImage` by Linux's 64-bit protocol, or ELF by PVH.
//!
//! The kernel goes where its header wants it, by `linux-loader`. The low memory has what the
//! protocols want, at the addresses below, and the tables of [`tables`]. The initrd goes to the end
//! of the first region, or as high as the kernel can reach.
//!
//! | address | contents |
//! |---|---|
//! | 0x500 | GDT |
//! | 0x6000 | PVH: start info, module, memory map |
//! | 0x7000 | `struct boot_params` |
//! | 0x9000 | page tables: the first GiB, by pages of 2 MiB |
//! | 0x20000 | command line |
//! | 0x9fc00 | MP table |
//! | 0xe0000 | ACPI |
//! | 1 MiB | the kernel, as it is packed |
//!
//! Sources: Linux's `Documentation/arch/x86/boot.rst` and `zero-page.rst`, Xen's
//! `docs/misc/pvh.pandoc` and `public/arch-x86/hvm/start_info.h`.

mod tables;

use super::{Linux, LinuxError};
use crate::board::MmioDevice;
use crate::{DeviceMemory, GuestRam, RamLayout, StartMode, StartState};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use linux_loader::loader::bzimage::BzImage;
use linux_loader::loader::elf::{Elf, PvhBootCapability};
use linux_loader::loader::{KernelLoader, KernelLoaderResult};
use pageferry_addr::{Gpa, PAGE_SIZE};
use std::io::Cursor;
use std::ops::Range;
use std::sync::Arc;
use vm_memory::{ByteValued, GuestAddressSpace};

const START_INFO: u64 = 0x6000;
const BOOT_PARAMS: u64 = 0x7000;
const PAGE_TABLES: u64 = 0x9000;
const COMMAND_LINE: u64 = 0x2_0000;
const HIGH_MEMORY: u64 = 0x10_0000;
/// `COMMAND_LINE_SIZE` of x86 Linux, less the final 0.
const MAX_COMMAND_LINE: usize = 2047;
/// The end of what an ELF kernel's initrd may take: the kernel maps it early.
const PVH_INITRD_END: u64 = 1 << 31;

/// The reason why a kernel is not loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PcImageError {
    /// The file has another format.
    #[error("the kernel is {0}: expected an x86-64 bzImage, or a vmlinux with CONFIG_PVH")]
    Format(&'static str),
    /// The file is damaged, or a field of its header has an impossible value.
    #[error("the kernel cannot be loaded: {0}")]
    Damaged(String),
    /// A field of the header has a value that does not fit here.
    #[error("the kernel's header has {field} {value:#x}: expected {expected}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The values that it may have.
        expected: &'static str,
    },
}

/// The fields of the kernel's header.
struct Plan {
    /// Behind the kernel, when it has unpacked itself.
    end: u64,
    /// The end of what the initrd may take.
    initrd_end: u64,
    most_command_line: usize,
    /// Of a `bzImage`.
    header: Option<setup_header>,
}

/// Whether the file is an x86-64 kernel of a format that [`Linux::load_pc`] takes, by its first
/// bytes.
#[must_use]
pub fn is_pc_kernel(kernel: &[u8]) -> bool {
    is_bzimage(kernel) || is_elf(kernel)
}

fn is_bzimage(kernel: &[u8]) -> bool {
    kernel.get(0x202..0x206) == Some(b"HdrS")
}

/// An ELF of 64 bits for x86-64 (`EM_X86_64`).
fn is_elf(kernel: &[u8]) -> bool {
    kernel.starts_with(b"\x7fELF\x02\x01") && kernel.get(18..20) == Some(&[62, 0])
}

fn other_format(kernel: &[u8]) -> &'static str {
    let magic: [(usize, &[u8], &'static str); 8] = [
        (
            56,
            b"RSC\x05",
            "a riscv64 Image, which runs on the soft engine",
        ),
        (56, b"ARM\x64", "an arm64 Image"),
        (4, b"zimg", "an EFI zboot image"),
        (0, b"\x7fELF", "an ELF for another processor"),
        (0, b"\x1f\x8b", "compressed with gzip"),
        (0, b"\xfd7zXZ", "compressed with xz"),
        (0, b"\x28\xb5\x2f\xfd", "compressed with zstd"),
        (0, b"", "of an unknown format"),
    ];
    let is = |(at, magic, _): &&(usize, &[u8], _)| {
        kernel
            .get(*at..)
            .is_some_and(|rest| rest.starts_with(magic))
    };
    magic.iter().find(is).map_or("empty", |(_, _, name)| name)
}

impl Plan {
    fn of(kernel: &[u8]) -> Result<Self, PcImageError> {
        if is_elf(kernel) {
            // Its headers say where it ends. `linux-loader` reads them when it loads.
            return Ok(Self {
                end: elf_end(kernel)?,
                initrd_end: PVH_INITRD_END,
                most_command_line: MAX_COMMAND_LINE,
                header: None,
            });
        }
        if !is_bzimage(kernel) {
            return Err(PcImageError::Format(other_format(kernel)));
        }
        let mut header = setup_header::default();
        let bytes = header.as_mut_slice();
        let Some(found) = kernel.get(0x1f1..0x1f1 + bytes.len()) else {
            return Err(PcImageError::Damaged("its header is cut off".into()));
        };
        bytes.copy_from_slice(found);
        let field = |field, value: u64, expected| {
            Err(PcImageError::Field {
                field,
                value,
                expected,
            })
        };
        // Version 2.12 has `xloadflags`, whose bit 0 says that there is a 64-bit entry.
        if header.version < 0x20c {
            return field("version", header.version.into(), "2.12 (0x20c) or later");
        }
        if header.loadflags & 1 == 0 {
            return field(
                "loadflags",
                header.loadflags.into(),
                "bit 0 (it loads high)",
            );
        }
        if header.xloadflags & 1 == 0 {
            return field(
                "xloadflags",
                header.xloadflags.into(),
                "bit 0 (a 64-bit entry)",
            );
        }
        if header.pref_address < HIGH_MEMORY {
            return field("pref_address", header.pref_address, "1 MiB or more");
        }
        let packed = HIGH_MEMORY + kernel.len() as u64;
        let Some(unpacked) = header.pref_address.checked_add(header.init_size.into()) else {
            return field("pref_address", header.pref_address, "an address in RAM");
        };
        Ok(Self {
            end: packed.max(unpacked),
            initrd_end: u64::from(header.initrd_addr_max) + 1,
            most_command_line: MAX_COMMAND_LINE.min(header.cmdline_size as usize),
            header: Some(header),
        })
    }
}

/// The end of an ELF kernel's segments in memory.
fn elf_end(kernel: &[u8]) -> Result<u64, PcImageError> {
    let damaged = |why: &str| PcImageError::Damaged(why.into());
    let bytes = |at: usize, count: usize| {
        let end = at.checked_add(count);
        end.and_then(|end| kernel.get(at..end))
            .ok_or_else(|| damaged("its program headers are cut off"))
    };
    let word = |at: usize| {
        let bytes = bytes(at, 8)?.first_chunk();
        Ok::<u64, PcImageError>(u64::from_le_bytes(*bytes.expect("8 bytes")))
    };
    let count = bytes(56, 2)?;
    let count = usize::from(u16::from_le_bytes([count[0], count[1]]));
    let table =
        usize::try_from(word(32)?).map_err(|_| damaged("its program headers are cut off"))?;
    let mut end = HIGH_MEMORY;
    for index in 0..count {
        let header = table
            .checked_add(index * 56)
            .ok_or_else(|| damaged("its program headers are cut off"))?;
        // `linux-loader` reads these bytes of the file, and adds to the offset unchecked.
        let (offset, length) = (word(header + 8)?, word(header + 32)?);
        let behind = offset.checked_add(length);
        if behind.is_none_or(|behind| behind > kernel.len() as u64) {
            return Err(damaged("a segment leaves the file"));
        }
        const LOAD: [u8; 4] = 1_u32.to_le_bytes();
        if bytes(header, 4)? != LOAD {
            continue;
        }
        let (address, in_file, in_memory) =
            (word(header + 24)?, word(header + 32)?, word(header + 40)?);
        if address < HIGH_MEMORY {
            return Err(PcImageError::Field {
                field: "a segment at",
                value: address,
                expected: "1 MiB or more",
            });
        }
        let behind = address.checked_add(in_memory.max(in_file));
        end = end.max(behind.ok_or_else(|| damaged("a segment has no end"))?);
    }
    Ok(end)
}

impl Linux<'_> {
    /// Writes an x86-64 kernel, the initrd and the tables of a PC to `ram`, for a machine with
    /// `vcpus` vCPUs and virtio `devices`. Returns the start of vCPU 0; the others wait until the
    /// kernel starts them.
    ///
    /// The PC has the ports and lines of [`crate::board`].
    ///
    /// # Errors
    /// [`LinuxError`]. Parts of a damaged kernel may have been written then.
    pub fn load_pc(
        &self,
        ram: &Arc<GuestRam>,
        vcpus: u32,
        devices: &[MmioDevice],
    ) -> Result<StartState, LinuxError> {
        let plan = Plan::of(self.kernel)?;
        self.check(vcpus, plan.most_command_line)?;
        let initrd = self.place_initrd(&plan, ram.layout())?;
        let loaded = self.load_kernel(ram, plan.header.is_some())?;
        let map = memory_map(ram.layout());
        let start = match (plan.header, loaded.pvh_boot_cap) {
            (Some(header), _) => {
                write_boot_params(ram, self, header, &initrd, &map)?;
                write_page_tables(ram)?;
                // The 64-bit entry is 0x200 bytes behind the 32-bit one.
                Entry {
                    at: loaded.kernel_load.0 + 0x200,
                    argument: BOOT_PARAMS,
                    mode: StartMode::Kernel64,
                }
            }
            (None, PvhBootCapability::PvhEntryPresent(entry)) => {
                write_start_info(ram, &initrd, &map)?;
                Entry {
                    at: entry.0,
                    argument: START_INFO,
                    mode: StartMode::Kernel32,
                }
            }
            (None, _) => {
                let format = "an ELF file without a note that says where PVH starts";
                return Err(PcImageError::Format(format).into());
            }
        };
        let mut line = self.command_line.as_bytes().to_vec();
        line.push(0);
        let gdt = gdt(start.mode);
        for (gpa, bytes) in [
            (COMMAND_LINE, line.as_slice()),
            (initrd.start, self.initrd.unwrap_or_default()),
            (StartState::GDT.0, gdt.as_slice()),
            (tables::MP_TABLE, &tables::mp(vcpus)),
            (tables::RSDP, &tables::acpi(vcpus, devices)),
        ] {
            ram.try_write(Gpa(gpa), bytes)?;
        }
        Ok(StartState {
            entry: start.at,
            stack: 0,
            args: [0, start.argument],
            tables: Gpa(PAGE_TABLES),
            mode: start.mode,
        })
    }

    /// The place of the initrd: as high as it may be, and behind the kernel.
    fn place_initrd(&self, plan: &Plan, layout: &RamLayout) -> Result<Range<u64>, LinuxError> {
        let region = &layout.regions()[0];
        let available = match region.gfn.0 {
            0 => region.pages * PAGE_SIZE,
            _ => 0,
        };
        let bytes = self.initrd.map_or(0, |initrd| initrd.len() as u64);
        let taken = bytes.next_multiple_of(PAGE_SIZE);
        // A header may say any end, up to the last address.
        let kernel = plan.end.checked_next_multiple_of(PAGE_SIZE);
        let needed = kernel.unwrap_or(u64::MAX).saturating_add(taken);
        let end = available.min(plan.initrd_end);
        if needed > end {
            return Err(LinuxError::Memory {
                needed,
                available: end,
            });
        }
        let start = (end - taken) / PAGE_SIZE * PAGE_SIZE;
        Ok(start..start + bytes)
    }

    fn load_kernel(
        &self,
        ram: &Arc<GuestRam>,
        is_bzimage: bool,
    ) -> Result<KernelLoaderResult, LinuxError> {
        let memory = DeviceMemory::new(Arc::clone(ram), || false).memory();
        let mut file = Cursor::new(self.kernel);
        let high = vm_memory::GuestAddress(HIGH_MEMORY);
        let loaded = match is_bzimage {
            true => BzImage::load(&*memory, Some(high), &mut file, Some(high)),
            false => Elf::load(&*memory, None, &mut file, Some(high)),
        };
        loaded.map_err(|e| PcImageError::Damaged(e.to_string()).into())
    }
}

struct Entry {
    at: u64,
    argument: u64,
    mode: StartMode,
}

/// The four descriptors of [`StartState::GDT`]: none, none, code, data.
fn gdt(mode: StartMode) -> Vec<u8> {
    let code: u64 = match mode {
        StartMode::Kernel32 => 0x00cf_9b00_0000_ffff,
        _ => 0x00af_9b00_0000_ffff,
    };
    let all = [0, 0, code, 0x00cf_9300_0000_ffff];
    all.iter().flat_map(|entry| entry.to_le_bytes()).collect()
}

/// Flat tables for the first GiB. The kernel maps what else it needs.
fn write_page_tables(ram: &GuestRam) -> Result<(), LinuxError> {
    const PRESENT_WRITE: u64 = 3;
    const LARGE: u64 = 1 << 7;
    let [top, middle, bottom] = [0, 1, 2].map(|index| PAGE_TABLES + index * PAGE_SIZE);
    ram.try_write(Gpa(top), &(middle | PRESENT_WRITE).to_le_bytes())?;
    ram.try_write(Gpa(middle), &(bottom | PRESENT_WRITE).to_le_bytes())?;
    let entries =
        (0..512_u64).flat_map(|index| (index << 21 | LARGE | PRESENT_WRITE).to_le_bytes());
    ram.try_write(Gpa(bottom), &entries.collect::<Vec<_>>())?;
    Ok(())
}

/// Memory by the kinds of the E820 map.
const USABLE: u32 = 1;
const RESERVED: u32 = 2;

/// The memory map: address, bytes and kind.
fn memory_map(layout: &RamLayout) -> Vec<(u64, u64, u32)> {
    let mut map = vec![
        (0, tables::MP_TABLE, USABLE),
        (tables::MP_TABLE, tables::MP_TABLE_BYTES, RESERVED),
        (tables::RSDP, tables::END - tables::RSDP, RESERVED),
    ];
    for region in layout.regions() {
        let (start, bytes) = (region.gfn.gpa().0, region.pages * PAGE_SIZE);
        let start_used = start.max(HIGH_MEMORY);
        map.push((
            start_used,
            (start + bytes).saturating_sub(start_used),
            USABLE,
        ));
    }
    map
}

fn write_boot_params(
    ram: &GuestRam,
    linux: &Linux<'_>,
    mut header: setup_header,
    initrd: &Range<u64>,
    map: &[(u64, u64, u32)],
) -> Result<(), LinuxError> {
    header.type_of_loader = 0xff; // without a number of its own
    header.cmd_line_ptr = COMMAND_LINE as u32;
    header.cmdline_size = linux.command_line.len() as u32;
    header.ramdisk_image = if initrd.is_empty() {
        0
    } else {
        initrd.start as u32
    };
    header.ramdisk_size = (initrd.end - initrd.start) as u32;
    header.code32_start = HIGH_MEMORY as u32;
    let mut params = boot_params {
        hdr: header,
        acpi_rsdp_addr: tables::RSDP,
        e820_entries: map.len() as u8,
        ..Default::default()
    };
    let mut e820 = params.e820_table;
    for (entry, (addr, size, kind)) in e820.iter_mut().zip(map) {
        *entry = boot_e820_entry {
            addr: *addr,
            size: *size,
            r#type: *kind,
        };
    }
    params.e820_table = e820;
    ram.try_write(Gpa(BOOT_PARAMS), params.as_slice())?;
    Ok(())
}

/// Writes `struct hvm_start_info`, version 1, with what it points to.
fn write_start_info(
    ram: &GuestRam,
    initrd: &Range<u64>,
    map: &[(u64, u64, u32)],
) -> Result<(), LinuxError> {
    const MAGIC: u32 = 0x336e_c578;
    const MODULES: u64 = START_INFO + 0x40;
    const MAP: u64 = START_INFO + 0x80;
    let modules = u32::from(!initrd.is_empty());
    let mut info = Vec::new();
    for word in [MAGIC, 1, 0, modules] {
        info.extend(word.to_le_bytes());
    }
    for address in [MODULES, COMMAND_LINE, tables::RSDP, MAP] {
        info.extend(address.to_le_bytes());
    }
    info.extend((map.len() as u64).to_le_bytes());
    info.resize((MODULES - START_INFO) as usize, 0);
    for word in [initrd.start, initrd.end - initrd.start, 0, 0] {
        info.extend(word.to_le_bytes());
    }
    info.resize((MAP - START_INFO) as usize, 0);
    for (address, bytes, kind) in map {
        info.extend(address.to_le_bytes());
        info.extend(bytes.to_le_bytes());
        info.extend(u64::from(*kind).to_le_bytes());
    }
    assert!(
        info.len() as u64 <= BOOT_PARAMS - START_INFO,
        "64 regions at most"
    );
    ram.try_write(Gpa(START_INFO), &info)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LayoutError, MAX_VCPUS};
    use proptest::prelude::*;

    const CODE: [u8; 5000] = [0x90; 5000];

    /// A `bzImage` of two sectors, whose kernel unpacks itself to 2 MiB.
    fn bzimage() -> Vec<u8> {
        let header = setup_header {
            setup_sects: 1,
            header: 0x5372_6448,
            version: 0x20f,
            loadflags: 1,
            code32_start: HIGH_MEMORY as u32,
            initrd_addr_max: 0x7fff_ffff,
            xloadflags: 1,
            cmdline_size: 2047,
            pref_address: 2 << 20,
            init_size: 1 << 20,
            ..Default::default()
        };
        let mut image = vec![0; 1024];
        let bytes = header.as_slice();
        image[0x1f1..0x1f1 + bytes.len()].copy_from_slice(bytes);
        image.extend(CODE);
        image
    }

    /// A `vmlinux` with one segment at 2 MiB and the PVH entry behind its start.
    fn vmlinux() -> Vec<u8> {
        let mut image = vec![0; 256];
        image[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\x00");
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(16, &[2, 0, 62, 0, 1]);
        put(24, &(2_u64 << 20).to_le_bytes()); // entry
        put(32, &64_u64.to_le_bytes()); // program headers
        put(54, &[56, 0, 2, 0]); // two of 56 bytes
        let mut segment = |at: usize, kind: u32, [offset, address, file, memory]: [u64; 4]| {
            put(at, &kind.to_le_bytes());
            for (index, word) in [offset, address, address, file, memory].iter().enumerate() {
                put(at + 8 + index * 8, &word.to_le_bytes());
            }
        };
        segment(64, 1, [256, 2 << 20, CODE.len() as u64, 1 << 20]);
        segment(120, 4, [184, 0, 20, 20]);
        // The note: lengths of name and value, type 18, "Xen", the entry.
        for (index, word) in [4_u32, 4, 18, u32::from_le_bytes(*b"Xen\0"), 0x20_0010]
            .iter()
            .enumerate()
        {
            put(184 + index * 4, &word.to_le_bytes());
        }
        image.extend(CODE);
        image
    }

    fn ram(bytes: u64) -> Arc<GuestRam> {
        Arc::new(GuestRam::new(RamLayout::for_memory(bytes).unwrap()).unwrap())
    }

    fn linux<'a>(kernel: &'a [u8], initrd: &'a [u8]) -> Linux<'a> {
        Linux {
            kernel,
            initrd: Some(initrd),
            command_line: "console=ttyS0",
        }
    }

    fn read(ram: &GuestRam, gpa: u64, bytes: usize) -> Vec<u8> {
        let mut found = vec![0; bytes];
        ram.try_read(Gpa(gpa), &mut found).unwrap();
        found
    }

    #[test]
    fn a_bzimage_finds_all_its_parts() {
        let (kernel, ram, initrd) = (bzimage(), ram(16 << 20), [7; 5000]);
        let start = linux(&kernel, &initrd).load_pc(&ram, 2, &[]).unwrap();
        assert_eq!(
            (start.entry, start.mode),
            (HIGH_MEMORY + 0x200, StartMode::Kernel64)
        );
        assert_eq!(
            (start.args[1], start.tables),
            (BOOT_PARAMS, Gpa(PAGE_TABLES))
        );
        assert!(read(&ram, HIGH_MEMORY, CODE.len()) == CODE);
        assert_eq!(read(&ram, COMMAND_LINE, 14), b"console=ttyS0\0");
        let params = read(&ram, BOOT_PARAMS, 4096);
        let word = |at: usize| u32::from_le_bytes(*params[at..].first_chunk().unwrap());
        // Offsets of `struct boot_params`: the RSDP, and fields of the header.
        assert_eq!((word(0x70), word(0x74)), (tables::RSDP as u32, 0));
        assert_eq!((word(0x228), word(0x21c)), (COMMAND_LINE as u32, 5000));
        let at = u64::from(word(0x218));
        assert_eq!(at, (16 << 20) - 8192);
        assert!(read(&ram, at, 5000) == initrd);
        assert_eq!(read(&ram, tables::MP_TABLE, 4), b"_MP_");
        assert_eq!(read(&ram, tables::RSDP, 8), b"RSD PTR ");
        // The last entry of the tables maps the last 2 MiB of the first GiB.
        let last = read(&ram, PAGE_TABLES + 2 * PAGE_SIZE + 511 * 8, 8);
        assert_eq!(last, (0x3fe0_0083_u64).to_le_bytes());
    }

    #[test]
    fn a_vmlinux_starts_by_pvh() {
        let (kernel, ram) = (vmlinux(), ram(16 << 20));
        let start = linux(&kernel, &[7; 5000]).load_pc(&ram, 1, &[]).unwrap();
        assert_eq!((start.entry, start.mode), (0x20_0010, StartMode::Kernel32));
        assert_eq!(start.args[1], START_INFO);
        assert!(read(&ram, 2 << 20, CODE.len()) == CODE);
        let info = read(&ram, START_INFO, 0x100);
        let word = |at: usize| u64::from_le_bytes(*info[at..].first_chunk().unwrap());
        assert_eq!(info[..4], 0x336e_c578_u32.to_le_bytes());
        assert_eq!((word(24), word(32)), (COMMAND_LINE, tables::RSDP));
        let module = (word(16) - START_INFO) as usize;
        assert_eq!((word(module), word(module + 8)), ((16 << 20) - 8192, 5000));
        let map = (word(40) - START_INFO) as usize;
        assert_eq!((word(map), word(map + 8)), (0, tables::MP_TABLE));
    }

    #[test]
    fn the_memory_map_has_all_of_ram_but_the_holes() {
        for (bytes, usable) in [(64 << 20, 2), (3 << 30, 2), (5 << 30, 3)] {
            let map = memory_map(&RamLayout::for_memory(bytes).unwrap());
            let of = |kind| map.iter().filter(move |entry| entry.2 == kind);
            assert_eq!(of(USABLE).count(), usable);
            let sum: u64 = of(USABLE).map(|entry| entry.1).sum();
            // From 640 KiB less a KiB up to 1 MiB, nothing is usable.
            assert_eq!(sum, bytes - (HIGH_MEMORY - tables::MP_TABLE));
            assert!(map.is_sorted());
            assert!(
                map.windows(2)
                    .all(|pair| pair[0].0 + pair[0].1 <= pair[1].0)
            );
        }
    }

    #[test]
    fn what_cannot_start_is_refused_with_the_reason() {
        let small = ram(4 << 20);
        let why = |kernel: &[u8]| {
            let linux = Linux {
                initrd: None,
                ..linux(kernel, &[])
            };
            linux.load_pc(&small, 1, &[]).unwrap_err().to_string()
        };
        let with = |at: usize, bytes: &[u8]| {
            let mut image = bzimage();
            image[at..at + bytes.len()].copy_from_slice(bytes);
            why(&image)
        };
        let mut riscv = vec![0; 1000];
        riscv[56..60].copy_from_slice(b"RSC\x05");
        assert!(why(&riscv).contains("a riscv64 Image, which runs on the soft engine"));
        assert!(why(b"\x1f\x8bsome").contains("compressed with gzip"));
        assert!(why(&[]).contains("of an unknown format"));
        let mut arm = vmlinux();
        arm[18] = 183;
        assert!(why(&arm).contains("an ELF for another processor"));
        let mut without = vmlinux();
        without[184 + 8] = 17;
        assert!(why(&without).contains("without a note that says where PVH starts"));
        assert!(with(0x206, &[0, 2]).contains("version 0x200: expected 2.12"));
        assert!(with(0x211, &[0]).contains("loadflags"));
        assert!(with(0x236, &[0, 0]).contains("a 64-bit entry"));
        assert!(with(0x258, &[0; 8]).contains("pref_address 0x0: expected 1 MiB"));
        assert!(with(0x258, &[0xff; 8]).contains("pref_address"));
        assert!(with(0x260, &[0xff; 4]).contains("bytes of memory below 3 GiB are too few"));
        assert!(with(0x1f1, &[0xff]).contains("cannot be loaded"));
        assert!(why(&bzimage()[..0x210]).contains("cut off"));
        let mut low = vmlinux();
        low[64 + 24..64 + 32].fill(0);
        assert!(why(&low).contains("a segment at 0x0"));
        let mut far = vmlinux();
        far[64 + 40..64 + 48].fill(0xff);
        assert!(why(&far).contains("has no end"));
        let mut last = vmlinux();
        last[64 + 40..64 + 48].copy_from_slice(&(u64::MAX - (2 << 20)).to_le_bytes());
        assert!(why(&last).contains("are too few"));
        for (header, field) in [(64, 8), (64, 32), (120, 8), (120, 32)] {
            let mut outside = vmlinux();
            outside[header + field..header + field + 8].fill(0xff);
            assert!(
                why(&outside).contains("a segment leaves the file"),
                "{header} {field}"
            );
        }
    }

    #[test]
    fn limits_of_the_other_parts_hold() {
        let (kernel, ram) = (bzimage(), ram(16 << 20));
        let refused = |linux: Linux<'_>, vcpus| linux.load_pc(&ram, vcpus, &[]).unwrap_err();
        let with = |command_line| Linux {
            command_line,
            ..linux(&kernel, &[1])
        };
        let long = "x".repeat(2048);
        with(&long[1..]).load_pc(&ram, 1, &[]).unwrap();
        let (bytes, most) = (2048, 2047);
        assert_eq!(
            refused(with(&long), 1),
            LinuxError::CommandLine { bytes, most }
        );
        assert_eq!(refused(with("a\0b"), 1), LinuxError::CommandLineZero(1));
        assert_eq!(refused(linux(&kernel, &[]), 1), LinuxError::EmptyInitrd);
        let vcpus = MAX_VCPUS + 1;
        let layout = LinuxError::Vcpus(LayoutError::Vcpus(vcpus));
        assert_eq!(refused(linux(&kernel, &[1]), vcpus), layout);
        // The kernel reaches to 3 MiB.
        let large = vec![1; (13 << 20) + 1];
        let memory = refused(linux(&kernel, &large), 1);
        assert!(matches!(memory, LinuxError::Memory { .. }), "{memory}");
        linux(&kernel, &large[1..])
            .load_pc(&ram, MAX_VCPUS, &[])
            .unwrap();
        // A kernel that reaches no initrd so high.
        let mut near = bzimage();
        near[0x22c..0x230].copy_from_slice(&(4_u32 << 20).to_le_bytes());
        linux(&near, &[1; 100]).load_pc(&ram, 1, &[]).unwrap();
        let params = read(&ram, BOOT_PARAMS, 4096);
        assert_eq!(params[0x218..0x21c], 0x3f_f000_u32.to_le_bytes());
    }

    proptest! {
        #[test]
        fn damaged_kernels_never_panic(
            changes in proptest::collection::vec((0_usize..0x280, any::<u8>()), 1..8),
            elf in any::<bool>(),
            keep in 0_usize..8000,
        ) {
            let ram = ram(8 << 20);
            let mut image = if elf { vmlinux() } else { bzimage() };
            for (at, byte) in changes {
                image[at] = byte;
            }
            image.truncate(keep);
            let _ = linux(&image, &[1]).load_pc(&ram, 1, &[]);
        }
    }
}
