//! The guest-physical address space of every program: RAM with a hole, and the doorbell. Also the
//! limits of a program.

use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};

/// The most vCPUs a program can have.
pub const MAX_VCPUS: u32 = 1024;
/// The most RAM a program can address, in bytes: 4 TiB.
pub const MAX_MEMORY_BYTES: u64 = 4 << 40;
/// The doorbell. No memory slot covers it, so a store to it leaves the guest.
pub const DOORBELL_GPA: Gpa = Gpa(0xD000_0000);
/// First guest-physical address of the hole in RAM.
pub const HOLE_START: u64 = 0xC000_0000;
/// First guest-physical address behind the hole.
pub const HOLE_END: u64 = 0x1_0000_0000;
/// RAM page index of the first page behind the hole. From here on, an address is [`HOLE_BYTES`]
/// higher than index times page size.
pub(crate) const HOLE_PAGE: u64 = HOLE_START / PAGE_SIZE;
/// Length of the hole in bytes.
pub(crate) const HOLE_BYTES: u64 = HOLE_END - HOLE_START;

/// The guest-physical address of a RAM page.
pub(crate) fn gpa_of(page: RamPage) -> Gpa {
    let offset = page.byte_offset();
    if offset < HOLE_START {
        Gpa(offset)
    } else {
        Gpa(offset + HOLE_BYTES)
    }
}
