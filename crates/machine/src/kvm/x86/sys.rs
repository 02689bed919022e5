#![expect(unsafe_code, reason = "ioctls on KVM's descriptors")]
//! The ioctls that kvm-ioctls lacks, with their ABI asserted (`include/uapi/linux/kvm.h`, Linux
//! 6.18).

use kvm_bindings::{
    KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_clear_dirty_log, kvm_device_attr, kvm_dirty_log,
    kvm_ioeventfd, kvm_irqfd, kvm_sregs2,
};
use kvm_ioctls::{VcpuFd, VmFd};
use rustix::io::Errno;
use std::ffi::c_void;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

const KVMIO: u64 = 0xAE;
const WRITE: u64 = 1;
const READ: u64 = 2;

/// `_IOC` of `include/uapi/asm-generic/ioctl.h`.
const fn ioc(direction: u64, number: u64, size: usize) -> u64 {
    (direction << 30) | ((size as u64) << 16) | (KVMIO << 8) | number
}

/// `sizeof(struct kvm_xsave)` as in the ioctl numbers: without its flexible tail.
pub(super) const XSAVE_BASE_BYTES: usize = 4096;

const KVM_RUN: u64 = ioc(0, 0x80, 0);
/// The kernel's `struct kvm_signal_mask` ends in a flexible array.
const KVM_SET_SIGNAL_MASK: u64 = ioc(WRITE, 0x8b, size_of::<u32>());
const KVM_GET_DIRTY_LOG: u64 = ioc(WRITE, 0x42, size_of::<kvm_dirty_log>());
const KVM_CLEAR_DIRTY_LOG: u64 = ioc(READ | WRITE, 0xc0, size_of::<kvm_clear_dirty_log>());
const KVM_RESET_DIRTY_RINGS: u64 = ioc(0, 0xc7, 0);
const KVM_GET_SREGS2: u64 = ioc(READ, 0xcc, size_of::<kvm_sregs2>());
const KVM_SET_SREGS2: u64 = ioc(WRITE, 0xcd, size_of::<kvm_sregs2>());
const KVM_GET_STATS_FD: u64 = ioc(0, 0xce, 0);
const KVM_IRQFD: u64 = ioc(WRITE, 0x76, size_of::<kvm_irqfd>());
const KVM_IOEVENTFD: u64 = ioc(WRITE, 0x79, size_of::<kvm_ioeventfd>());
const KVM_SET_DEVICE_ATTR: u64 = ioc(WRITE, 0xe1, size_of::<kvm_device_attr>());
const KVM_GET_DEVICE_ATTR: u64 = ioc(WRITE, 0xe2, size_of::<kvm_device_attr>());
const KVM_GET_XSAVE: u64 = ioc(READ, 0xa4, XSAVE_BASE_BYTES);
const KVM_SET_XSAVE: u64 = ioc(WRITE, 0xa5, XSAVE_BASE_BYTES);
const KVM_GET_XSAVE2: u64 = ioc(READ, 0xcf, XSAVE_BASE_BYTES);

const _: () = {
    assert!(KVM_RUN == 0xAE80);
    assert!(KVM_SET_SIGNAL_MASK == 0x4004_AE8B);
    assert!(offset_of!(SignalMask, set) == 4 && size_of::<SignalMask>() == 12);
    assert!(KVM_GET_STATS_FD == 0xAECE);
    assert!(KVM_GET_DIRTY_LOG == 0x4010_AE42);
    assert!(KVM_CLEAR_DIRTY_LOG == 0xC018_AEC0);
    assert!(KVM_RESET_DIRTY_RINGS == 0xAEC7);
    assert!(KVM_GET_SREGS2 == 0x8140_AECC && KVM_SET_SREGS2 == 0x4140_AECD);
    assert!(KVM_GET_XSAVE == 0x9000_AEA4 && KVM_SET_XSAVE == 0x5000_AEA5);
    assert!(KVM_GET_XSAVE2 == 0x9000_AECF);
    assert!(KVM_IRQFD == 0x4020_AE76 && KVM_IOEVENTFD == 0x4040_AE79);
    assert!(KVM_SET_DEVICE_ATTR == 0x4018_AEE1 && KVM_GET_DEVICE_ATTR == 0x4018_AEE2);
    assert!(offset_of!(kvm_dirty_log, __bindgen_anon_1) == 8);
    assert!(offset_of!(kvm_clear_dirty_log, num_pages) == 4);
    assert!(offset_of!(kvm_clear_dirty_log, first_page) == 8);
    assert!(offset_of!(kvm_clear_dirty_log, __bindgen_anon_1) == 16);
};

fn last_errno() -> Errno {
    let raw = std::io::Error::last_os_error().raw_os_error();
    raw.map_or(Errno::IO, Errno::from_raw_os_error)
}

/// A descriptor of a VM's statistics.
pub(super) fn stats_fd(vm: &VmFd) -> Result<OwnedFd, Errno> {
    // SAFETY: the call takes no argument.
    let fd = unsafe { libc::ioctl(vm.as_raw_fd(), KVM_GET_STATS_FD as _, 0) };
    if fd >= 0 {
        // SAFETY: the kernel has just made it, for us.
        return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    Err(last_errno())
}

/// # Safety
/// `argument` must fit `request` on `fd`: null, or valid for all bytes that the kernel reads and
/// writes.
unsafe fn ioctl(fd: &impl AsRawFd, request: u64, argument: *mut c_void) -> Result<(), Errno> {
    // The type of the request differs between C libraries. SAFETY: by this function's contract; the
    // descriptor is open as long as its owner is borrowed.
    if unsafe { libc::ioctl(fd.as_raw_fd(), request as _, argument) } >= 0 {
        return Ok(());
    }
    Err(last_errno())
}

/// `KVM_RUN`: enters the guest until it exits. The vCPU's shared page describes the exit.
///
/// # Errors
/// Of note: `EINTR` (a signal, or `immediate_exit`); `EFAULT` and `EHWPOISON` (unreachable memory,
/// with or without `KVM_EXIT_MEMORY_FAULT` in the page).
pub(super) fn run(vcpu: &VcpuFd) -> Result<(), Errno> {
    // SAFETY: KVM_RUN takes no argument. The guest reaches only the memory of the VM's slots, which
    // is guest memory that Rust never holds a reference to.
    unsafe { ioctl(vcpu, KVM_RUN, std::ptr::null_mut()) }
}

/// `struct kvm_signal_mask` with the kernel's set of 64 signals.
#[repr(C, packed(4))]
struct SignalMask {
    bytes: u32,
    set: u64,
}

/// `KVM_SET_SIGNAL_MASK`: the signals blocked inside `KVM_RUN`, in place of the thread's own mask.
/// `None` undoes it.
///
/// # Errors
/// None is known for a set of 8 bytes.
pub(super) fn set_signal_mask(vcpu: &VcpuFd, set: Option<u64>) -> Result<(), Errno> {
    let mut mask = SignalMask {
        bytes: size_of::<u64>() as u32,
        set: set.unwrap_or(0),
    };
    let argument = match set {
        Some(_) => (&raw mut mask).cast(),
        None => std::ptr::null_mut(),
    };
    // SAFETY: the kernel reads the length and as many bytes as it says, or nothing if null.
    unsafe { ioctl(vcpu, KVM_SET_SIGNAL_MASK, argument) }
}

/// `KVM_GET_DIRTY_LOG` of a slot of `pages` pages into `words`, one bit per page.
///
/// # Errors
/// `ENOENT`: no such slot, or it has no log.
///
/// # Panics
/// If `words` is not one word for each 64 pages: the kernel writes that many.
pub(super) fn get_dirty_log(
    vm: &VmFd,
    slot: u32,
    pages: u64,
    words: &mut [u64],
) -> Result<(), Errno> {
    assert_eq!(
        words.len() as u64,
        pages.div_ceil(64),
        "the bitmap does not fit slot {slot}"
    );
    let mut log = kvm_dirty_log {
        slot,
        ..Default::default()
    };
    log.__bindgen_anon_1.dirty_bitmap = words.as_mut_ptr().cast();
    // SAFETY: the kernel reads `log` and writes ALIGN(npages, 64) / 8 bytes, which `words` has.
    unsafe { ioctl(vm, KVM_GET_DIRTY_LOG, (&raw mut log).cast()) }
}

/// `KVM_CLEAR_DIRTY_LOG` on the slot's `pages` pages from `first`: clears and protects again those
/// whose bit is set in `words`.
///
/// # Errors
/// `EINVAL`: `first` is no multiple of 64, or `pages` is none and does not end the slot.
///
/// # Panics
/// If `words` is not one word for each 64 pages.
pub(super) fn clear_dirty_log(
    vm: &VmFd,
    slot: u32,
    first: u64,
    pages: u32,
    words: &[u64],
) -> Result<(), Errno> {
    assert_eq!(
        words.len() as u32,
        pages.div_ceil(64),
        "the bitmap does not fit {pages} pages"
    );
    let mut log = kvm_clear_dirty_log {
        slot,
        num_pages: pages,
        first_page: first,
        ..Default::default()
    };
    log.__bindgen_anon_1.dirty_bitmap = words.as_ptr().cast_mut().cast();
    // SAFETY: the kernel reads `log` and the bitmap of `pages` bits, rounded up to whole words. It
    // writes to neither.
    unsafe { ioctl(vm, KVM_CLEAR_DIRTY_LOG, (&raw mut log).cast()) }
}

/// `KVM_RESET_DIRTY_RINGS`: protects the pages of all entries that were handed back, and flushes
/// TLBs. Returns the number of entries. A pending signal makes it stop early, without an error.
///
/// # Errors
/// `EINVAL`: the VM has no rings.
pub(super) fn reset_dirty_rings(vm: &VmFd) -> Result<usize, Errno> {
    // SAFETY: the call takes no argument.
    let count = unsafe { libc::ioctl(vm.as_raw_fd(), KVM_RESET_DIRTY_RINGS as _, 0) };
    usize::try_from(count).map_err(|_| last_errno())
}

/// `KVM_GET_SREGS2`.
///
/// # Errors
/// `ENOTTY` where the capability is missing.
pub(super) fn get_sregs2(vcpu: &VcpuFd) -> Result<kvm_sregs2, Errno> {
    let mut sregs = kvm_sregs2::default();
    // SAFETY: the kernel writes one kvm_sregs2.
    unsafe { ioctl(vcpu, KVM_GET_SREGS2, (&raw mut sregs).cast()) }.map(|()| sregs)
}

/// `KVM_SET_SREGS2`.
///
/// # Errors
/// `EINVAL`: a value no CPU can have.
pub(super) fn set_sregs2(vcpu: &VcpuFd, sregs: &kvm_sregs2) -> Result<(), Errno> {
    // SAFETY: the kernel reads one kvm_sregs2.
    unsafe {
        ioctl(
            vcpu,
            KVM_SET_SREGS2,
            std::ptr::from_ref(sregs).cast_mut().cast(),
        )
    }
}

/// The XSAVE area (uncompacted layout) in `bytes` bytes: the answer of `KVM_CAP_XSAVE2`, or 4096.
///
/// # Errors
/// `ENOMEM`.
pub(super) fn get_xsave(vcpu: &VcpuFd, bytes: usize) -> Result<Vec<u32>, Errno> {
    let mut area = vec![0u32; bytes.max(XSAVE_BASE_BYTES) / 4];
    let request = if bytes > XSAVE_BASE_BYTES {
        KVM_GET_XSAVE2
    } else {
        KVM_GET_XSAVE
    };
    // SAFETY: KVM_GET_XSAVE writes 4096 bytes, KVM_GET_XSAVE2 as many as the capability says, which
    // the caller passes. `area` has at least as many.
    unsafe { ioctl(vcpu, request, area.as_mut_ptr().cast()) }.map(|()| area)
}

/// Sets the XSAVE area. `bytes` is the answer of `KVM_CAP_XSAVE2`, or 4096.
///
/// # Errors
/// `EINVAL`: it holds features that the guest does not have.
///
/// # Panics
/// If `area` is not `bytes` long: the kernel reads that many.
pub(super) fn set_xsave(vcpu: &VcpuFd, area: &[u32], bytes: usize) -> Result<(), Errno> {
    assert_eq!(area.len() * 4, bytes.max(XSAVE_BASE_BYTES));
    // SAFETY: the kernel reads 4096 bytes, or as many as the capability says. `area` has that many.
    unsafe { ioctl(vcpu, KVM_SET_XSAVE, area.as_ptr().cast_mut().cast()) }
}

/// `KVM_IRQFD`: each signal of `event` is an edge on the interrupt line `gsi`.
///
/// # Errors
/// `EINVAL`: the VM has no interrupt controllers.
pub(super) fn irqfd(vm: &VmFd, event: BorrowedFd<'_>, gsi: u32) -> Result<(), Errno> {
    let mut argument = kvm_irqfd {
        fd: event.as_raw_fd().cast_unsigned(),
        gsi,
        ..Default::default()
    };
    // SAFETY: the kernel reads one kvm_irqfd. It holds the eventfd itself from then on.
    unsafe { ioctl(vm, KVM_IRQFD, (&raw mut argument).cast()) }
}

/// `KVM_IOEVENTFD`: a store of 4 bytes to `gpa` signals `event`, and does not leave the guest.
///
/// # Errors
/// `EEXIST`: there is one at this address. `ENOSPC`: the VM has too many.
pub(super) fn ioeventfd(vm: &VmFd, event: BorrowedFd<'_>, gpa: u64) -> Result<(), Errno> {
    let mut argument = kvm_ioeventfd {
        addr: gpa,
        len: 4,
        fd: event.as_raw_fd(),
        ..Default::default()
    };
    // SAFETY: the kernel reads one kvm_ioeventfd. It holds the eventfd itself from then on.
    unsafe { ioctl(vm, KVM_IOEVENTFD, (&raw mut argument).cast()) }
}

fn tsc_offset_attribute(value: *mut u64) -> kvm_device_attr {
    kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: KVM_VCPU_TSC_OFFSET.into(),
        addr: value as u64,
        flags: 0,
    }
}

/// The difference of the guest's TSC and the host's (`KVM_VCPU_TSC_OFFSET`, Linux 5.16).
///
/// # Errors
/// When this kernel has no such attribute.
pub(super) fn tsc_offset(vcpu: &VcpuFd) -> Result<u64, Errno> {
    let mut value = 0;
    let mut attribute = tsc_offset_attribute(&raw mut value);
    // SAFETY: the kernel reads one kvm_device_attr, and writes the u64 at its address.
    unsafe { ioctl(vcpu, KVM_GET_DEVICE_ATTR, (&raw mut attribute).cast()) }.map(|()| value)
}

/// Sets the difference of the guest's TSC and the host's.
///
/// # Errors
/// When this kernel has no such attribute.
pub(super) fn set_tsc_offset(vcpu: &VcpuFd, offset: u64) -> Result<(), Errno> {
    let mut value = offset;
    let mut attribute = tsc_offset_attribute(&raw mut value);
    // SAFETY: the kernel reads one kvm_device_attr, and the u64 at its address.
    unsafe { ioctl(vcpu, KVM_SET_DEVICE_ATTR, (&raw mut attribute).cast()) }
}
