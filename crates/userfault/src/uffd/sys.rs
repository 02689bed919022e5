//! The system calls, each with its arguments' types; what is sound to call by anyone is safe here.
#![expect(
    unsafe_code,
    reason = "system calls: opening a userfaultfd and its ioctls"
)]

use super::abi;
use core::ffi::c_void;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Updater, ioctl};
use rustix::mm::UserfaultfdFlags;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

fn flags(user_mode_only: bool) -> UserfaultfdFlags {
    let mode = if user_mode_only {
        abi::USER_MODE_ONLY
    } else {
        0
    };
    UserfaultfdFlags::CLOEXEC
        | UserfaultfdFlags::NONBLOCK
        | UserfaultfdFlags::from_bits_retain(mode)
}

/// `userfaultfd(2)`, close-on-exec and non-blocking.
pub(super) fn open_by_syscall(user_mode_only: bool) -> Result<OwnedFd, Errno> {
    // SAFETY: a new userfaultfd serves no range; serving one takes `register`, which is unsafe.
    unsafe { rustix::mm::userfaultfd(flags(user_mode_only)) }
}

/// The argument of `USERFAULTFD_IOC_NEW`: flags by value; its result: a descriptor.
struct NewByDevice(UserfaultfdFlags);

// SAFETY: (1) USERFAULTFD_IOC_NEW takes its argument by value, so the "pointer" is never followed,
// by us or by the kernel, and no memory of ours changes; (2) what it returns on success is a
// descriptor made for this call, which nobody else owns.
unsafe impl Ioctl for NewByDevice {
    type Output = OwnedFd;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        abi::USERFAULTFD_IOC_NEW
    }

    fn as_ptr(&mut self) -> *mut c_void {
        core::ptr::without_provenance_mut(self.0.bits() as usize)
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> Result<OwnedFd, Errno> {
        // SAFETY: `out` is the result of a successful USERFAULTFD_IOC_NEW; see (2) above.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}

/// Opens `/dev/userfaultfd` (Linux 6.1 and later), where a file's mode takes the place of
/// capabilities.
pub(super) fn open_by_device(user_mode_only: bool) -> Result<OwnedFd, Errno> {
    let device = rustix::fs::open(
        "/dev/userfaultfd",
        OFlags::RDWR | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    // SAFETY: as `open_by_syscall`; and a file that is no such device answers ENOTTY.
    unsafe { ioctl(device, NewByDevice(flags(user_mode_only))) }
}

/// # Safety
/// The ioctl `OPCODE` takes a pointer to a `T`, and its effect on memory other than `*argument` is
/// none or one that the caller answers for.
unsafe fn call<const OPCODE: Opcode, T>(fd: BorrowedFd<'_>, argument: &mut T) -> Result<(), Errno> {
    // SAFETY: by contract `OPCODE` reads and writes one `T`, which `argument` is, borrowed
    // exclusively.
    unsafe { ioctl(fd, Updater::<OPCODE, T>::new(argument)) }
}

/// `UFFDIO_API`.
pub(super) fn api(fd: impl AsFd, argument: &mut abi::UffdioApi) -> Result<(), Errno> {
    // SAFETY: UFFDIO_API reads and writes a `struct uffdio_api` and nothing else.
    unsafe { call::<{ abi::UFFDIO_API }, _>(fd.as_fd(), argument) }
}

/// `UFFDIO_REGISTER`.
///
/// # Safety
/// As [`Userfaultfd::register`](super::Userfaultfd::register).
pub(super) unsafe fn register(
    fd: impl AsFd,
    argument: &mut abi::UffdioRegister,
) -> Result<(), Errno> {
    // SAFETY: it reads and writes a `struct uffdio_register`; what touching the range does from now
    // on is the caller's contract.
    unsafe { call::<{ abi::UFFDIO_REGISTER }, _>(fd.as_fd(), argument) }
}

/// `UFFDIO_UNREGISTER`.
pub(super) fn unregister(fd: impl AsFd, mut range: abi::UffdioRange) -> Result<(), Errno> {
    // SAFETY: it reads a `struct uffdio_range`; pages keep their contents, and empty ones become
    // what they are in any mapping: zeros, or the file's contents.
    unsafe { call::<{ abi::UFFDIO_UNREGISTER }, _>(fd.as_fd(), &mut range) }
}

/// `UFFDIO_WAKE`.
pub(super) fn wake(fd: impl AsFd, mut range: abi::UffdioRange) -> Result<(), Errno> {
    // SAFETY: it reads a `struct uffdio_range` and changes no memory; a woken thread repeats its
    // access.
    unsafe { call::<{ abi::UFFDIO_WAKE }, _>(fd.as_fd(), &mut range) }
}

/// `UFFDIO_WRITEPROTECT`.
pub(super) fn write_protect(
    fd: impl AsFd,
    mut argument: abi::UffdioWriteprotect,
) -> Result<(), Errno> {
    // SAFETY: it reads a `struct uffdio_writeprotect`; contents stay, and writes to pages
    // registered for it may sleep, for which the caller of the registration answers.
    unsafe { call::<{ abi::UFFDIO_WRITEPROTECT }, _>(fd.as_fd(), &mut argument) }
}

/// `UFFDIO_COPY` of `bytes` to `dst`; also returns the field in which the kernel counts bytes
/// copied.
pub(super) fn copy(fd: impl AsFd, dst: u64, bytes: &[u8], mode: u64) -> (Result<(), Errno>, i64) {
    let mut argument = abi::UffdioCopy {
        dst,
        src: bytes.as_ptr().addr() as u64,
        len: bytes.len() as u64,
        mode,
        copy: 0,
    };
    // SAFETY: (1) it reads and writes a `struct uffdio_copy`; (2) it reads `bytes`, which is
    // borrowed; (3) it writes nothing but pages of registered ranges that have no contents yet,
    // which nobody can have read, as touching them sleeps.
    let result = unsafe { call::<{ abi::UFFDIO_COPY }, _>(fd.as_fd(), &mut argument) };
    (result, argument.copy)
}

/// `UFFDIO_ZEROPAGE`; as [`copy`] with zeros.
pub(super) fn zeropage(fd: impl AsFd, argument: &mut abi::UffdioFill) -> Result<(), Errno> {
    // SAFETY: as (1) and (3) of `copy`.
    unsafe { call::<{ abi::UFFDIO_ZEROPAGE }, _>(fd.as_fd(), argument) }
}

/// `UFFDIO_CONTINUE`.
pub(super) fn continue_range(fd: impl AsFd, argument: &mut abi::UffdioFill) -> Result<(), Errno> {
    // SAFETY: it reads and writes a `struct uffdio_continue`; it maps pages of the file that is
    // mapped there anyway, and only where none is mapped.
    unsafe { call::<{ abi::UFFDIO_CONTINUE }, _>(fd.as_fd(), argument) }
}

/// `UFFDIO_POISON`.
pub(super) fn poison(fd: impl AsFd, argument: &mut abi::UffdioFill) -> Result<(), Errno> {
    // SAFETY: it reads and writes a `struct uffdio_poison`; it marks only pages that are not
    // mapped, and touching one raises SIGBUS, which is no access to memory.
    unsafe { call::<{ abi::UFFDIO_POISON }, _>(fd.as_fd(), argument) }
}

/// Adopts the descriptor that a fork event carries.
///
/// # Safety
/// `raw` comes from an `UFFD_EVENT_FORK` message that was read just now and is adopted only once.
pub(super) unsafe fn adopt(raw: i32) -> OwnedFd {
    // SAFETY: the kernel opens the descriptor for the reader of the message, who by contract we
    // are.
    unsafe { OwnedFd::from_raw_fd(raw) }
}
