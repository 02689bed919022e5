//! The tables by which a kernel finds its PC: ACPI, and the older MP table.
//!
//! Sources: ACPI 6.5 (RSDP 5.2.5.3, XSDT 5.2.8, FADT 5.2.9, MADT 5.2.12), and Intel's
//! MultiProcessor Specification 1.4, chapter 4. Stock kernels read ACPI only. A small kernel may
//! have no ACPI.

use crate::board::MmioDevice;
use crate::board::{
    COM1, COM1_LINE, FREE_LINES, GENERATION, GENERATION_LINE, IOAPIC, LAPIC, PM1_CONTROL,
    PM1_EVENT, RESET, RESET_VALUE, SCI_LINE, SOFT_OFF,
};
use acpi_tables::aml::{
    Device, EISAName, IO, Interrupt, Memory32Fixed, Method, Name, Notify, ONE, Package,
    ResourceTemplate,
};
use acpi_tables::sdt::Sdt;
use acpi_tables::{Aml, aml::Path};

/// The RSDP, and the other tables of ACPI behind it.
pub(super) const RSDP: u64 = 0xe_0000;
/// The first byte behind the memory for tables.
pub(super) const END: u64 = 0x10_0000;
/// The MP table: the last KiB below 640 KiB, where kernels look for it.
pub(super) const MP_TABLE: u64 = 0x9_fc00;
pub(super) const MP_TABLE_BYTES: u64 = 0x400;

const OEM: [u8; 6] = *b"PGFRRY";
const OEM_TABLE: [u8; 8] = *b"PGFERRY ";
/// The vCPUs that the fields of eight bits can name.
const XAPIC_IDS: u32 = 255;

/// A table with the usual header of 36 bytes, in `bytes` bytes.
fn table(signature: &[u8; 4], revision: u8, bytes: u32) -> Sdt {
    Sdt::new(*signature, bytes, revision, OEM, OEM_TABLE, 1)
}

/// Appends to a table of tables.
struct Tables {
    bytes: Vec<u8>,
}

impl Tables {
    /// Puts a table behind the others. Returns its address.
    fn put(&mut self, bytes: &[u8]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(64), 0);
        let address = RSDP + self.bytes.len() as u64;
        self.bytes.extend_from_slice(bytes);
        address
    }
}

/// The bytes from [`RSDP`] on: all tables of ACPI.
pub(super) fn acpi(vcpus: u32, devices: &[MmioDevice]) -> Vec<u8> {
    const RSDP_BYTES: usize = 36;
    let mut tables = Tables {
        bytes: vec![0; RSDP_BYTES],
    };
    let dsdt = tables.put(dsdt(devices).as_slice());
    let fadt = tables.put(fadt(dsdt).as_slice());
    let madt = tables.put(madt(vcpus).as_slice());
    let mut xsdt = table(b"XSDT", 1, 36);
    for address in [fadt, madt] {
        xsdt.append_slice(&address.to_le_bytes());
    }
    let xsdt = tables.put(xsdt.as_slice());
    let rsdp = &mut tables.bytes[..RSDP_BYTES];
    rsdp[..8].copy_from_slice(b"RSD PTR ");
    rsdp[9..15].copy_from_slice(&OEM);
    rsdp[15] = 2; // revision
    rsdp[20..24].copy_from_slice(&(RSDP_BYTES as u32).to_le_bytes());
    rsdp[24..32].copy_from_slice(&xsdt.to_le_bytes());
    rsdp[8] = checksum(&rsdp[..20]);
    rsdp[32] = checksum(rsdp);
    tables.bytes
}

/// The byte that makes the sum of all 0, for a table whose byte for it is 0.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte))
}

/// The devices, in ACPI's language.
fn dsdt(devices: &[MmioDevice]) -> Sdt {
    let mut aml = Vec::new();
    let edge = |line| Interrupt::new(true, true, false, false, line);
    Device::new(
        Path::new("_SB_.COM1"),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0501")),
            &Name::new("_UID".into(), &0_u8),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(vec![&edge(COM1_LINE), &IO::new(COM1, COM1, 1, 8)]),
            ),
        ],
    )
    .to_aml_bytes(&mut aml);
    for (index, device) in devices.iter().enumerate() {
        let memory = Memory32Fixed::new(true, device.address, device.bytes);
        Device::new(
            Path::new(&format!("_SB_.V{index:03}")),
            vec![
                &Name::new("_HID".into(), &"LNRO0005"),
                &Name::new("_UID".into(), &(index as u32)),
                // Its memory accesses are coherent with the processor's.
                &Name::new("_CCA".into(), &ONE),
                &Name::new(
                    "_CRS".into(),
                    &ResourceTemplate::new(vec![&memory, &edge(device.line)]),
                ),
            ],
        )
        .to_aml_bytes(&mut aml);
    }
    add_generation(&mut aml, &edge(GENERATION_LINE));
    Name::new(
        "_S5_".into(),
        &Package::new(vec![&SOFT_OFF, &0_u8, &0_u8, &0_u8]),
    )
    .to_aml_bytes(&mut aml);
    let mut dsdt = table(b"DSDT", 2, 36);
    dsdt.append_slice(&aml);
    dsdt
}

/// The generation of the VM, and the device whose interrupt says that it is new. Sources: "Virtual
/// Machine Generation ID" (Microsoft) for the first, and ACPI 6.5, 5.6.9, for the second.
fn add_generation(aml: &mut Vec<u8>, interrupt: &Interrupt) {
    let counter = || Path::new("\\_SB_.VGEN");
    Device::new(
        counter(),
        vec![
            // Kernels know the one or the other.
            &Name::new("_HID".into(), &"VMGENCTR"),
            &Name::new("_CID".into(), &"VM_Gen_Counter"),
            &Name::new("_DDN".into(), &"VM_Gen_Counter"),
            &Name::new(
                "ADDR".into(),
                &Package::new(vec![&(GENERATION as u32), &(GENERATION >> 32)]),
            ),
        ],
    )
    .to_aml_bytes(aml);
    Device::new(
        Path::new("_SB_.GED_"),
        vec![
            &Name::new("_HID".into(), &"ACPI0013"),
            &Name::new("_UID".into(), &0_u8),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![interrupt])),
            &Method::new(
                "_EVT".into(),
                1,
                true,
                vec![&Notify::new(&counter(), &0x80_u8)],
            ),
        ],
    )
    .to_aml_bytes(aml);
}

/// The fixed description: power management, and which parts of a PC are missing.
fn fadt(dsdt: u64) -> Sdt {
    let mut fadt = table(b"FACP", 6, 276);
    let mut space = |at: usize, port: u16, bits: u8| {
        fadt.write(at, 1_u8); // I/O ports
        fadt.write(at + 1, bits);
        fadt.write(at + 4, u64::from(port));
    };
    space(148, PM1_EVENT, 32);
    space(172, PM1_CONTROL, 16);
    space(116, RESET, 8);
    fadt.write(40, dsdt as u32);
    fadt.write(140, dsdt);
    fadt.write(46, SCI_LINE as u16);
    fadt.write(56, u32::from(PM1_EVENT));
    fadt.write(64, u32::from(PM1_CONTROL));
    fadt.write(88, 4_u8);
    fadt.write(89, 2_u8);
    fadt.write(128, RESET_VALUE);
    fadt.write(131, 3_u8); // minor version
    // Legacy devices: there are PICs. There is no VGA and no CMOS clock.
    fadt.write(109, 1_u16 | 1 << 2 | 1 << 5);
    // WBINVD, buttons are no fixed ones, and the reset register is there.
    fadt.write(112, 1_u32 | 1 << 4 | 1 << 5 | 1 << 10);
    fadt.update_checksum();
    fadt
}

/// The processors and interrupt controllers.
fn madt(vcpus: u32) -> Sdt {
    let mut madt = table(b"APIC", 5, 44);
    madt.write(36, LAPIC);
    madt.write(40, 1_u32); // there are PICs, too
    for id in 0..vcpus {
        if id < XAPIC_IDS {
            let id = id as u8;
            madt.append_slice(&[0, 8, id, id, 1, 0, 0, 0]);
        } else {
            let mut x2apic = vec![9, 16, 0, 0];
            for word in [id, 1, id] {
                x2apic.extend(word.to_le_bytes());
            }
            madt.append_slice(&x2apic);
        }
    }
    let mut ioapic = vec![1, 12, 0, 0];
    ioapic.extend(IOAPIC.to_le_bytes());
    ioapic.extend(0_u32.to_le_bytes());
    madt.append_slice(&ioapic);
    // ACPI's own interrupt is level-triggered, and high is active.
    let line = SCI_LINE as u8;
    madt.append_slice(&[2, 10, 0, line, line, 0, 0, 0, 0x0d, 0]);
    madt.update_checksum();
    madt
}

/// The MP table at [`MP_TABLE`], with the vCPUs that fit.
pub(super) fn mp(vcpus: u32) -> Vec<u8> {
    const POINTER: usize = 16;
    const HEADER: usize = 44;
    const PROCESSOR: usize = 20;
    // The rest: a bus, the IOAPIC, its lines, two local interrupts.
    let lines = FREE_LINES.end;
    let rest = 8 * (2 + lines as usize + 2);
    let room = (MP_TABLE_BYTES as usize - POINTER - HEADER - rest) / PROCESSOR;
    let vcpus = vcpus.min(room as u32) as u8;
    let ioapic = vcpus;
    let mut entries: Vec<u8> = Vec::new();
    for id in 0..vcpus {
        // Version 0x14, usable, and the first one boots. The signature and features of a Pentium.
        entries.extend([0, id, 0x14, 1 | u8::from(id == 0) << 1]);
        entries.extend(0x600_u32.to_le_bytes());
        entries.extend(0x201_u32.to_le_bytes());
        entries.extend([0; 8]);
    }
    entries.extend([1, 0]);
    entries.extend(b"ISA   ");
    entries.extend([2, ioapic, 0x14, 1]);
    entries.extend(IOAPIC.to_le_bytes());
    for line in 0..lines as u8 {
        entries.extend([3, 0, 0, 0, 0, line, ioapic, line]);
    }
    entries.extend([4, 3, 0, 0, 0, 0, 0, 0]); // the PICs
    entries.extend([4, 1, 0, 0, 0, 0, 0xff, 1]); // non-maskable interrupts
    let count = u16::from(vcpus) + 2 + lines as u16 + 2;
    let mut header = Vec::with_capacity(HEADER);
    header.extend(b"PCMP");
    header.extend(((HEADER + entries.len()) as u16).to_le_bytes());
    header.extend([4, 0]); // revision 1.4, checksum
    header.extend(b"PGFERRY PGFERRY     ");
    header.extend([0; 6]);
    header.extend(count.to_le_bytes());
    header.extend(LAPIC.to_le_bytes());
    header.extend([0; 4]);
    header.extend(entries);
    header[7] = checksum(&header);
    let mut all = Vec::with_capacity(POINTER + header.len());
    all.extend(b"_MP_");
    all.extend((MP_TABLE as u32 + POINTER as u32).to_le_bytes());
    all.extend([1, 4, 0, 0, 0, 0, 0, 0]);
    all[10] = checksum(&all);
    all.extend(header);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MAX_VCPUS;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(*bytes[at..].first_chunk().unwrap())
    }

    fn u64_at(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(*bytes[at..].first_chunk().unwrap())
    }

    /// The table at an address, whose length and checksum are right.
    fn at<'a>(all: &'a [u8], address: u64, signature: &[u8; 4]) -> &'a [u8] {
        let table = &all[(address - RSDP) as usize..];
        let table = &table[..u32_at(table, 4) as usize];
        assert_eq!(&table[..4], signature);
        assert_eq!(sum(table), 0, "{signature:?}");
        table
    }

    #[test]
    fn a_kernel_finds_every_table_from_the_pointer_on() {
        let devices = [MmioDevice::at(0), MmioDevice::at(1)];
        for vcpus in [1, 2, 255, 256, MAX_VCPUS] {
            let all = acpi(vcpus, &devices);
            assert!(all.len() as u64 <= GENERATION - RSDP, "{}", all.len());
            assert_eq!(&all[..8], b"RSD PTR ");
            assert_eq!((sum(&all[..20]), sum(&all[..36])), (0, 0));
            let xsdt = at(&all, u64_at(&all, 24), b"XSDT");
            assert_eq!(xsdt.len(), 36 + 2 * 8);
            let fadt = at(&all, u64_at(xsdt, 36), b"FACP");
            assert_eq!(fadt.len(), 276);
            assert_eq!(u64::from(u32_at(fadt, 40)), u64_at(fadt, 140));
            let dsdt = at(&all, u64_at(fadt, 140), b"DSDT");
            for part in [
                &b"COM1"[..],
                b"V000",
                b"V001",
                b"LNRO0005",
                b"VMGENCTR",
                b"_S5_",
            ] {
                assert!(dsdt.windows(part.len()).any(|window| window == part));
            }
            let madt = at(&all, u64_at(xsdt, 44), b"APIC");
            let (mut rest, mut ids) = (&madt[44..], Vec::new());
            while let [kind, length, ..] = *rest {
                match kind {
                    0 => ids.push(u32::from(rest[3])),
                    9 => ids.push(u32_at(rest, 4)),
                    _ => {}
                }
                rest = &rest[usize::from(length)..];
            }
            assert!(ids.into_iter().eq(0..vcpus));
        }
    }

    #[test]
    fn the_mp_table_has_the_vcpus_that_fit() {
        for (vcpus, named) in [(1, 1), (2, 2), (16, 16), (MAX_VCPUS, 37)] {
            let all = mp(vcpus);
            assert!(all.len() as u64 <= MP_TABLE_BYTES, "{}", all.len());
            assert_eq!((&all[..4], sum(&all[..16])), (&b"_MP_"[..], 0));
            let table = &all[16..];
            let length = u16::from_le_bytes([table[4], table[5]]);
            assert_eq!(usize::from(length), table.len());
            assert_eq!(sum(table), 0);
            let count = u16::from_le_bytes([table[34], table[35]]);
            let processors = table[44..].chunks(20).take_while(|entry| entry[0] == 0);
            assert_eq!(processors.count(), named);
            assert_eq!(usize::from(count), named + 2 + 24 + 2);
        }
    }
}
