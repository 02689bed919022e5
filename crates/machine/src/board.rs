//! The addresses and lines of a board, as its tables tell a kernel.
//!
//! A kernel finds those of a PC by ACPI. Port numbers are those of PCs where these have one. A
//! kernel of a soft machine finds its own by the device tree.

/// The first serial port (COM1): 8 I/O ports, and its interrupt line.
pub const COM1: u16 = 0x3f8;
/// The interrupt line of [`COM1`].
pub const COM1_LINE: u32 = 4;
/// The PM1 event block of ACPI: 4 I/O ports.
pub const PM1_EVENT: u16 = 0x600;
/// The PM1 control block of ACPI: 2 I/O ports.
pub const PM1_CONTROL: u16 = 0x604;
/// The reset register of ACPI: 1 I/O port.
pub const RESET: u16 = 0x608;
/// The value that starts the guest anew, at [`RESET`].
pub const RESET_VALUE: u8 = 1;
/// The sleep type of switching off, at [`PM1_CONTROL`].
pub const SOFT_OFF: u8 = 5;
/// The interrupt line of ACPI's events.
pub const SCI_LINE: u32 = 9;
/// The VM's generation: 16 bytes that differ after each restore, in reserved memory.
pub const GENERATION: u64 = 0xf_f000;
/// The interrupt line that says that [`GENERATION`] is new.
pub const GENERATION_LINE: u32 = 5;
/// The interrupt lines for further devices.
pub const FREE_LINES: std::ops::Range<u32> = 16..24;

/// The addresses of a soft machine's interrupt controller, a PLIC with a context for each hart.
pub const PLIC: std::ops::Range<u64> =
    0xc000_0000..0xc000_0000 + PLIC_CONTEXTS + PLIC_CONTEXT_BYTES * crate::MAX_VCPUS as u64;
/// The number of sources of [`PLIC`], which are the interrupt lines from 1 on.
pub const PLIC_SOURCES: u32 = 31;
/// The offset of the contexts of [`PLIC`].
pub(crate) const PLIC_CONTEXTS: u64 = 0x20_0000;
/// The addresses of a context of [`PLIC`].
pub(crate) const PLIC_CONTEXT_BYTES: u64 = 0x1000;

/// A virtio device that a kernel finds through ACPI (`LNRO0005`) or a device tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmioDevice {
    /// The guest-physical address of its registers, outside RAM.
    pub address: u32,
    /// The bytes that they take.
    pub bytes: u32,
    /// Its interrupt line.
    pub line: u32,
}

impl MmioDevice {
    /// The most devices that have a line of their own.
    pub const MOST: usize = (FREE_LINES.end - FREE_LINES.start) as usize;

    /// The usual place of the device `index`: a page behind the doorbell of test programs, and one
    /// of the free lines.
    ///
    /// # Panics
    /// If there are as many devices as free lines already.
    #[must_use]
    pub fn at(index: u32) -> Self {
        let line = FREE_LINES.start + index;
        assert!(FREE_LINES.contains(&line), "device {index}");
        Self {
            address: 0xd000_1000 + index * 0x1000,
            bytes: 0x1000,
            line,
        }
    }
}

#[cfg(all(feature = "pc", target_arch = "x86_64"))]
pub(crate) const LAPIC: u32 = 0xfee0_0000;
#[cfg(all(feature = "pc", target_arch = "x86_64"))]
pub(crate) const IOAPIC: u32 = 0xfec0_0000;
