//! The system calls, with typed arguments. Calls that are always sound are safe functions.
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
    // SAFETY: a new userfaultfd serves no range. Only `register` adds one, and it is unsafe.
    unsafe { rustix::mm::userfaultfd(flags(user_mode_only)) }
}

/// The argument of `USERFAULTFD_IOC_NEW`: flags by value. Its result is a descriptor.
struct NewByDevice(UserfaultfdFlags);

// SAFETY: (1) USERFAULTFD_IOC_NEW takes its argument by value. So neither we nor the kernel follow
// the "pointer", and no memory of ours changes. (2) On success it returns a descriptor made for
// this call, which nobody else owns.
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
        // SAFETY: `out` is the result of a successful USERFAULTFD_IOC_NEW. See (2) above.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}

/// Opens `/dev/userfaultfd` (Linux 6.1 and later), which checks the file's mode instead of
/// capabilities.
pub(super) fn open_by_device(user_mode_only: bool) -> Result<OwnedFd, Errno> {
    let device = rustix::fs::open(
        "/dev/userfaultfd",
        OFlags::RDWR | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    // SAFETY: as in `open_by_syscall`. A file that is not this device answers ENOTTY.
    unsafe { ioctl(device, NewByDevice(flags(user_mode_only))) }
}

/// # Safety
/// The ioctl `OPCODE` takes a pointer to a `T`. The caller is responsible for any effect on memory
/// other than `*argument`.
unsafe fn call<const OPCODE: Opcode, T>(fd: BorrowedFd<'_>, argument: &mut T) -> Result<(), Errno> {
    // SAFETY: by contract `OPCODE` reads and writes one `T`. `argument` is one, borrowed
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
    // SAFETY: the ioctl reads and writes a `struct uffdio_register`. The caller is responsible for
    // later touches of the range.
    unsafe { call::<{ abi::UFFDIO_REGISTER }, _>(fd.as_fd(), argument) }
}

/// `UFFDIO_UNREGISTER`.
pub(super) fn unregister(fd: impl AsFd, mut range: abi::UffdioRange) -> Result<(), Errno> {
    // SAFETY: the ioctl reads a `struct uffdio_range`. Pages keep their contents, and empty ones
    // read as in any mapping: zeros, or the file's contents.
    unsafe { call::<{ abi::UFFDIO_UNREGISTER }, _>(fd.as_fd(), &mut range) }
}

/// `UFFDIO_WAKE`.
pub(super) fn wake(fd: impl AsFd, mut range: abi::UffdioRange) -> Result<(), Errno> {
    // SAFETY: the ioctl reads a `struct uffdio_range` and changes no memory. A woken thread repeats
    // its access.
    unsafe { call::<{ abi::UFFDIO_WAKE }, _>(fd.as_fd(), &mut range) }
}

/// `UFFDIO_WRITEPROTECT`.
pub(super) fn write_protect(
    fd: impl AsFd,
    mut argument: abi::UffdioWriteprotect,
) -> Result<(), Errno> {
    // SAFETY: the ioctl reads a `struct uffdio_writeprotect`. Contents stay. Writes to pages
    // registered for it may sleep, for which the caller of the registration is responsible.
    unsafe { call::<{ abi::UFFDIO_WRITEPROTECT }, _>(fd.as_fd(), &mut argument) }
}

/// `UFFDIO_MOVE`.
///
/// # Safety
/// As [`Userfaultfd::move_pages`](super::Userfaultfd::move_pages).
pub(super) unsafe fn move_pages(
    fd: impl AsFd,
    argument: &mut abi::UffdioCopy,
) -> Result<(), Errno> {
    // SAFETY: the ioctl reads and writes a `struct uffdio_move`. The caller is responsible for the
    // source, which loses its pages. The destination gets first contents, as in (3) of `copy`.
    unsafe { call::<{ abi::UFFDIO_MOVE }, _>(fd.as_fd(), argument) }
}

/// `UFFDIO_COPY` of `bytes` to `dst`. It also returns the field in which the kernel counts copied
/// bytes.
pub(super) fn copy(fd: impl AsFd, dst: u64, bytes: &[u8], mode: u64) -> (Result<(), Errno>, i64) {
    let mut argument = abi::UffdioCopy {
        dst,
        src: bytes.as_ptr().addr() as u64,
        len: bytes.len() as u64,
        mode,
        done: 0,
    };
    // SAFETY: (1) The ioctl reads and writes a `struct uffdio_copy`. (2) It reads `bytes`, which is
    // borrowed. (3) It writes only pages of registered ranges that have no contents yet. No thread
    // can have read them, as a touch of them sleeps.
    let result = unsafe { call::<{ abi::UFFDIO_COPY }, _>(fd.as_fd(), &mut argument) };
    (result, argument.done)
}

/// `UFFDIO_ZEROPAGE`, which is [`copy`] with zeros.
pub(super) fn zeropage(fd: impl AsFd, argument: &mut abi::UffdioFill) -> Result<(), Errno> {
    // SAFETY: as in (1) and (3) of `copy`.
    unsafe { call::<{ abi::UFFDIO_ZEROPAGE }, _>(fd.as_fd(), argument) }
}

/// `UFFDIO_CONTINUE`.
pub(super) fn continue_range(fd: impl AsFd, argument: &mut abi::UffdioFill) -> Result<(), Errno> {
    // SAFETY: the ioctl reads and writes a `struct uffdio_continue`. It maps only missing pages,
    // and only of the file that is mapped there.
    unsafe { call::<{ abi::UFFDIO_CONTINUE }, _>(fd.as_fd(), argument) }
}

/// `UFFDIO_POISON`.
pub(super) fn poison(fd: impl AsFd, argument: &mut abi::UffdioFill) -> Result<(), Errno> {
    // SAFETY: the ioctl reads and writes a `struct uffdio_poison`. It marks only pages that are not
    // mapped. A touch of such a page raises SIGBUS, which is no access to memory.
    unsafe { call::<{ abi::UFFDIO_POISON }, _>(fd.as_fd(), argument) }
}

/// `PAGEMAP_SCAN` of a pagemap, into `regions`.
pub(super) fn pagemap_scan(
    fd: impl AsFd,
    argument: &mut abi::PmScanArg,
    regions: &mut [abi::PageRegion],
) -> Result<(), Errno> {
    argument.size = size_of::<abi::PmScanArg>() as u64;
    argument.vec = regions.as_mut_ptr().expose_provenance() as u64;
    argument.vec_len = regions.len() as u64;
    // SAFETY: (1) The ioctl reads and writes a `struct pm_scan_arg`. (2) It writes at most
    // `vec_len` regions to `vec`, which are borrowed exclusively. (3) It changes no contents, as in
    // `write_protect`.
    unsafe { call::<{ abi::PAGEMAP_SCAN }, _>(fd.as_fd(), argument) }
}

/// Adopts the descriptor that a fork event carries.
///
/// # Safety
/// `raw` comes from a `UFFD_EVENT_FORK` message that was just read, and is adopted only once.
pub(super) unsafe fn adopt(raw: i32) -> OwnedFd {
    // SAFETY: the kernel opens the descriptor for the reader of the message. By contract that is
    // the caller.
    unsafe { OwnedFd::from_raw_fd(raw) }
}
