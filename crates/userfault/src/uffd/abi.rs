//! The kernel's side of the contract: numbers and layouts of `include/uapi/linux/userfaultfd.h`,
//! and those of `PAGEMAP_SCAN`.
//!
//! Every number and layout is asserted at compile time against the values of Linux 6.18. The ioctl
//! numbers are those of the architectures with the generic `_IOC` encoding (x86, arm, riscv, s390).

use core::mem::{offset_of, size_of};
use rustix::ioctl::{Opcode, opcode};

const GROUP: u8 = 0xaa;
/// The API number that `UFFDIO_API` needs.
pub(super) const UFFD_API: u64 = 0xaa;
/// Flag of `userfaultfd(2)`: serve faults of user mode only.
pub(super) const USER_MODE_ONLY: u32 = 1;

/// The bit of UFFDIO_*_MODE_DONTWAKE in COPY, ZEROPAGE, MOVE, CONTINUE and POISON.
pub(super) const MODE_DONTWAKE: u64 = 1 << 0;
/// The bit of UFFDIO_*_MODE_WP in COPY and CONTINUE: map the page write-protected.
pub(super) const MODE_WP: u64 = 1 << 1;
/// UFFDIO_MOVE: step over holes in the source.
pub(super) const MOVE_MODE_ALLOW_SRC_HOLES: u64 = 1 << 1;
/// UFFDIO_WRITEPROTECT: protect (set) or lift the protection (clear).
pub(super) const WRITEPROTECT_MODE_WP: u64 = 1 << 0;
/// UFFDIO_WRITEPROTECT has another DONTWAKE bit.
pub(super) const WRITEPROTECT_MODE_DONTWAKE: u64 = 1 << 1;

pub(super) const EVENT_PAGEFAULT: u8 = 0x12;
pub(super) const EVENT_FORK: u8 = 0x13;
pub(super) const EVENT_REMAP: u8 = 0x14;
pub(super) const EVENT_REMOVE: u8 = 0x15;
pub(super) const EVENT_UNMAP: u8 = 0x16;
pub(super) const PAGEFAULT_FLAG_WRITE: u64 = 1 << 0;
pub(super) const PAGEFAULT_FLAG_WP: u64 = 1 << 1;
pub(super) const PAGEFAULT_FLAG_MINOR: u64 = 1 << 2;

/// `sizeof(struct uffd_msg)`. `event.rs` decodes its fields at the offsets below.
pub(super) const MSG_BYTES: usize = 32;
/// The offset of the union of `struct uffd_msg`. `event` is byte 0.
pub(super) const MSG_ARG: usize = 8;

#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct UffdioApi {
    pub(super) api: u64,
    pub(super) features: u64,
    pub(super) ioctls: u64,
}

#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct UffdioRange {
    pub(super) start: u64,
    pub(super) len: u64,
}

#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct UffdioRegister {
    pub(super) range: UffdioRange,
    pub(super) mode: u64,
    pub(super) ioctls: u64,
}

/// `struct uffdio_copy` and `uffdio_move`, which have the same layout.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct UffdioCopy {
    pub(super) dst: u64,
    pub(super) src: u64,
    pub(super) len: u64,
    pub(super) mode: u64,
    pub(super) done: i64,
}

/// `struct uffdio_zeropage`, `uffdio_continue` and `uffdio_poison`, which have the same layout.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct UffdioFill {
    pub(super) range: UffdioRange,
    pub(super) mode: u64,
    pub(super) done: i64,
}

#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct UffdioWriteprotect {
    pub(super) range: UffdioRange,
    pub(super) mode: u64,
}

/// `struct pm_scan_arg` of `include/uapi/linux/fs.h`.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct PmScanArg {
    pub(super) size: u64,
    pub(super) flags: u64,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) walk_end: u64,
    pub(super) vec: u64,
    pub(super) vec_len: u64,
    pub(super) max_pages: u64,
    pub(super) category_inverted: u64,
    pub(super) category_mask: u64,
    pub(super) category_anyof_mask: u64,
    pub(super) return_mask: u64,
}

/// `struct page_region` of the same header.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct PageRegion {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) categories: u64,
}

/// PAGEMAP_SCAN: protect the pages that are reported, in the same step.
pub(super) const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
/// PAGEMAP_SCAN: fail on a mapping without asynchronous write protection.
pub(super) const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;
/// PAGEMAP_SCAN: the page is not write-protected by userfaultfd.
pub(super) const PAGE_IS_WRITTEN: u64 = 1 << 1;

pub(super) const PAGEMAP_SCAN: Opcode = opcode::read_write::<PmScanArg>(b'f', 16);
pub(super) const UFFDIO_API: Opcode = opcode::read_write::<UffdioApi>(GROUP, 0x3f);
pub(super) const UFFDIO_REGISTER: Opcode = opcode::read_write::<UffdioRegister>(GROUP, 0x00);
// The kernel reads the argument of the next two, but declares them as _IOR in its header.
pub(super) const UFFDIO_UNREGISTER: Opcode = opcode::read::<UffdioRange>(GROUP, 0x01);
pub(super) const UFFDIO_WAKE: Opcode = opcode::read::<UffdioRange>(GROUP, 0x02);
pub(super) const UFFDIO_COPY: Opcode = opcode::read_write::<UffdioCopy>(GROUP, 0x03);
pub(super) const UFFDIO_ZEROPAGE: Opcode = opcode::read_write::<UffdioFill>(GROUP, 0x04);
pub(super) const UFFDIO_MOVE: Opcode = opcode::read_write::<UffdioCopy>(GROUP, 0x05);
pub(super) const UFFDIO_WRITEPROTECT: Opcode =
    opcode::read_write::<UffdioWriteprotect>(GROUP, 0x06);
pub(super) const UFFDIO_CONTINUE: Opcode = opcode::read_write::<UffdioFill>(GROUP, 0x07);
pub(super) const UFFDIO_POISON: Opcode = opcode::read_write::<UffdioFill>(GROUP, 0x08);
/// The ioctl of `/dev/userfaultfd`. Its argument is the flags, by value, and it returns a new
/// descriptor.
pub(super) const USERFAULTFD_IOC_NEW: Opcode = opcode::none(GROUP, 0x00);

const _: () = {
    assert!(UFFDIO_API as u64 == 0xc018_aa3f);
    assert!(UFFDIO_REGISTER as u64 == 0xc020_aa00);
    assert!(UFFDIO_UNREGISTER as u64 == 0x8010_aa01);
    assert!(UFFDIO_WAKE as u64 == 0x8010_aa02);
    assert!(UFFDIO_COPY as u64 == 0xc028_aa03);
    assert!(UFFDIO_ZEROPAGE as u64 == 0xc020_aa04);
    assert!(UFFDIO_MOVE as u64 == 0xc028_aa05);
    assert!(UFFDIO_WRITEPROTECT as u64 == 0xc018_aa06);
    assert!(UFFDIO_CONTINUE as u64 == 0xc020_aa07);
    assert!(UFFDIO_POISON as u64 == 0xc020_aa08);
    assert!(USERFAULTFD_IOC_NEW as u64 == 0xaa00);

    assert!(PAGEMAP_SCAN as u64 == 0xc060_6610);

    assert!(size_of::<UffdioApi>() == 24);
    assert!(size_of::<UffdioRange>() == 16);
    assert!(size_of::<UffdioRegister>() == 32);
    assert!(size_of::<UffdioCopy>() == 40);
    assert!(size_of::<UffdioFill>() == 32);
    assert!(size_of::<UffdioWriteprotect>() == 24);
    assert!(size_of::<PmScanArg>() == 96);
    assert!(size_of::<PageRegion>() == 24);

    assert!(offset_of!(UffdioApi, features) == 8 && offset_of!(UffdioApi, ioctls) == 16);
    assert!(offset_of!(UffdioRange, len) == 8);
    assert!(offset_of!(UffdioRegister, mode) == 16 && offset_of!(UffdioRegister, ioctls) == 24);
    assert!(offset_of!(UffdioCopy, src) == 8 && offset_of!(UffdioCopy, len) == 16);
    assert!(offset_of!(UffdioCopy, mode) == 24 && offset_of!(UffdioCopy, done) == 32);
    assert!(offset_of!(UffdioFill, mode) == 16 && offset_of!(UffdioFill, done) == 24);
    assert!(offset_of!(UffdioWriteprotect, mode) == 16);
    assert!(offset_of!(PmScanArg, start) == 16 && offset_of!(PmScanArg, walk_end) == 32);
    assert!(offset_of!(PmScanArg, vec) == 40 && offset_of!(PmScanArg, vec_len) == 48);
    assert!(offset_of!(PmScanArg, category_mask) == 72);
    assert!(offset_of!(PmScanArg, return_mask) == 88);
    assert!(offset_of!(PageRegion, end) == 8 && offset_of!(PageRegion, categories) == 16);
};
