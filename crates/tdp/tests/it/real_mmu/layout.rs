//! The places of everything in guest-physical and guest-virtual addresses, and the stub's
//! descriptor tables.
//!
//! The stub, its tables and stacks, and the program are *pinned*. Every set of tables that the
//! guest runs on maps them at [`PINNED_GVA`] + their guest-physical address. They are user pages
//! like all others. Without SMEP and SMAP ring 0 may use them.

use super::code;
use super::ram::Ram;
use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::MemoryType;
use std::sync::atomic::Ordering;

/// Bytes of RAM, from guest-physical 0 on. The second GiB is for a leaf of 1 GiB.
pub(crate) const RAM_BYTES: u64 = 2 << 30;
/// Frames for page tables.
pub(crate) const TABLES: std::ops::Range<u64> = 0x400..0x2000;
/// The first frame for data, a multiple of 512.
pub(crate) const DATA_PFN: u64 = 0x2000;
/// The first frame of the second GiB.
pub(crate) const GIB_PFN: u64 = 1 << 18;
/// The pages of the slot that is unplugged for a flush, at [`FLUSH_GPA`].
pub(crate) const FLUSH_PAGES: u64 = 1;
pub(crate) const FLUSH_GPA: u64 = 0xc000_0000;

/// The largest number of vCPUs.
pub(crate) const MOST_VCPUS: u64 = 4;
/// Guest-virtual minus guest-physical address of pinned pages.
pub(crate) const PINNED_GVA: u64 = 0x6000_0000_0000;
const IDT: u64 = 0x1_0000;
const GDT: u64 = 0x1_1000;
const STUB: u64 = 0x1_2000;
const PROGRAM: u64 = 0x1_3000;
const VCPUS: u64 = 0x1_4000;
const VCPU_BYTES: u64 = 0x4000;
/// The address at which a store leaves the guest: no RAM is behind it.
const DOORBELL_GPA: u64 = 0xd000_0000;
pub(crate) const DOORBELL_GVA: u64 = PINNED_GVA + DOORBELL_GPA;

const CODE_RING0: u16 = 0x08;
pub(crate) const DATA_RING3: u16 = 0x2b;
pub(crate) const CODE_RING3: u16 = 0x33;
const TSS_SELECTOR: u16 = 0x40;
pub(crate) const TSS_LIMIT: u32 = 0x67;

/// The gfn, the frame and the memory type of each page that every set of tables must map.
pub(crate) fn pinned() -> impl Iterator<Item = (Gfn, Pfn, MemoryType)> {
    let end = VCPUS + MOST_VCPUS * VCPU_BYTES;
    let pages = (IDT..end)
        .step_by(4096)
        .map(|gpa| (gpa, MemoryType::WriteBack));
    pages
        .chain([(DOORBELL_GPA, MemoryType::Device)])
        .map(|(gpa, memory)| (Gfn((PINNED_GVA + gpa) >> 12), Pfn(gpa >> 12), memory))
}

/// The pages of one vCPU, by guest-physical address.
#[derive(Clone, Copy)]
pub(crate) struct Seat(pub(crate) u64);

impl Seat {
    const fn page(self, page: u64) -> u64 {
        VCPUS + self.0 * VCPU_BYTES + page * 4096
    }

    const fn tss(self) -> u64 {
        self.page(0)
    }

    /// The stack of ring 0. The stub reports at its bottom.
    pub(crate) const fn report(self) -> u64 {
        self.page(1)
    }

    /// The program's command.
    pub(crate) const fn command(self) -> u64 {
        self.page(2)
    }

    /// The end of the program's stack.
    pub(crate) const fn stack_end(self) -> u64 {
        self.page(4)
    }

    pub(crate) const fn tss_gva(self) -> u64 {
        PINNED_GVA + self.tss()
    }

    pub(crate) const fn tss_selector(self) -> u16 {
        TSS_SELECTOR + 16 * self.0 as u16
    }
}

pub(crate) const IDT_GVA: u64 = PINNED_GVA + IDT;
pub(crate) const GDT_GVA: u64 = PINNED_GVA + GDT;
pub(crate) const IDT_LIMIT: u16 = 32 * 16 - 1;
pub(crate) const GDT_LIMIT: u16 = TSS_SELECTOR + 16 * MOST_VCPUS as u16 - 1;
/// The address of the program in the guest.
pub(crate) const PROGRAM_GVA: u64 = PINNED_GVA + PROGRAM;

/// Writes stub, program and descriptor tables. Sources: AMD64 APM volume 2, 4.8 "Long-Mode Segment
/// Descriptors", 12.2.5 "64-bit Task State Segment".
pub(crate) fn write(ram: &Ram) {
    ram.write(STUB, code::fault_stub());
    ram.write(STUB + 0x800, code::other_stub());
    ram.write(PROGRAM, code::program());
    let set = |gpa: u64, value: u64| ram.word(gpa).store(value, Ordering::Relaxed);
    const PAGE_FAULT: u64 = 14;
    for vector in 0..32 {
        let stub = if vector == PAGE_FAULT {
            STUB
        } else {
            STUB + 0x800
        };
        let to = PINNED_GVA + stub;
        // A present interrupt gate, without its own stack.
        let low =
            to & 0xffff | u64::from(CODE_RING0) << 16 | 0x8e00 << 32 | (to & 0xffff_0000) << 32;
        set(IDT + vector * 16, low);
        set(IDT + vector * 16 + 8, to >> 32);
    }
    set(GDT + u64::from(CODE_RING0), 0x00af_9b00_0000_ffff);
    set(GDT + 0x10, 0x00cf_9300_0000_ffff);
    set(GDT + u64::from(DATA_RING3 & !7), 0x00cf_f300_0000_ffff);
    set(GDT + u64::from(CODE_RING3 & !7), 0x00af_fb00_0000_ffff);
    for seat in (0..MOST_VCPUS).map(Seat) {
        let at = seat.tss_gva();
        let low =
            u64::from(TSS_LIMIT) | (at & 0xff_ffff) << 16 | 0x89 << 40 | (at >> 24 & 0xff) << 56;
        set(GDT + u64::from(seat.tss_selector()), low);
        set(GDT + u64::from(seat.tss_selector()) + 8, at >> 32);
        // RSP0 is at byte 4: the end of the page that begins with the report.
        let stack = PINNED_GVA + seat.report() + 4096;
        set(seat.tss(), stack << 32);
        set(seat.tss() + 8, stack >> 32);
    }
}
