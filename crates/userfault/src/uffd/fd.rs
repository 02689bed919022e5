//! [`Userfaultfd`]: opening, and registering ranges.
#![expect(unsafe_code, reason = "registering a range is unsafe to call")]

use super::abi::{self, UffdioApi, UffdioRange, UffdioRegister};
use super::error::OpenError;
use super::flags::{Features, RangeIoctls, RegisterMode};
use super::range_error::{RangeError, RangeOp};
use super::sys;
use pageferry_addr::Hva;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The interface by which a userfaultfd was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenedBy {
    /// `userfaultfd(2)`.
    Syscall,
    /// `/dev/userfaultfd`.
    Device,
}

/// An open userfaultfd after its API handshake: close-on-exec and non-blocking.
///
/// It serves the memory of the process that opened it, even when another process holds it
/// ([`Userfaultfd::adopt`]). All addresses are those of that process.
///
/// Any thread may make any call at any time. The kernel orders them.
///
/// Dropping the last descriptor of it unregisters all its ranges. A thread that slept on a missing
/// page then continues *with the present contents*, zeros or half-received bytes. So it must
/// outlive the last missing page of every VM that it serves.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
    features: Features,
}

impl Userfaultfd {
    /// Opens a userfaultfd with `features`. It serves faults of user mode and of the kernel,
    /// including KVM's.
    ///
    /// Tries the system call, then `/dev/userfaultfd`.
    ///
    /// ```
    /// use pageferry_userfault::uffd::{Features, Userfaultfd};
    ///
    /// match Userfaultfd::open(Features::MISSING_SHMEM | Features::MINOR_SHMEM) {
    ///     Ok(uffd) => assert!(uffd.features().contains(Features::MINOR_SHMEM)),
    ///     Err(why) => println!("SKIPPED: {why}"), // the message says what would help
    /// }
    /// ```
    ///
    /// # Errors
    /// See [`OpenError`]: no permission, a missing feature, or a kernel without userfaultfd.
    pub fn open(features: Features) -> Result<Self, OpenError> {
        Self::open_as(features, false).map(|(uffd, ..)| uffd)
    }

    /// Opens a userfaultfd that serves faults of user mode only. Any process may do so. A fault
    /// inside a system call or in KVM then fails (`EFAULT`) and is not reported.
    ///
    /// ```
    /// use pageferry_userfault::uffd::{Features, Userfaultfd};
    ///
    /// match Userfaultfd::open_user_mode_only(Features::empty()) {
    ///     Ok(uffd) => println!("{uffd:?}"),
    ///     Err(why) => println!("SKIPPED: {why}"),
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Userfaultfd::open`].
    pub fn open_user_mode_only(features: Features) -> Result<Self, OpenError> {
        Self::open_as(features, true).map(|(uffd, ..)| uffd)
    }

    /// Opens a userfaultfd. Also returns its interface, and all features of the kernel.
    pub(super) fn open_as(
        features: Features,
        user_mode_only: bool,
    ) -> Result<(Self, OpenedBy, Features), OpenError> {
        let (fd, opened_by) = open_descriptor(user_mode_only)?;
        match handshake(&fd, features) {
            Ok(available) => Ok((Self { fd, features }, opened_by, available)),
            Err(Errno::PERM) if features.contains(Features::EVENT_FORK) => {
                Err(OpenError::ForkEventsNotPermitted)
            }
            // EINVAL has two causes. A handshake without features tells them apart.
            Err(Errno::INVAL) if !features.is_empty() => {
                let (fd, _) = open_descriptor(user_mode_only)?;
                let available = handshake(&fd, Features::empty()).map_err(OpenError::Handshake)?;
                let missing = features.difference(available);
                Err(if missing.is_empty() {
                    OpenError::Handshake(Errno::INVAL)
                } else {
                    OpenError::MissingFeatures { missing, available }
                })
            }
            Err(errno) => Err(OpenError::Handshake(errno)),
        }
    }

    /// Wraps a descriptor of a userfaultfd that has had its handshake, with the enabled features.
    pub(super) fn from_parts(fd: OwnedFd, features: Features) -> Self {
        Self { fd, features }
    }

    /// The enabled features: those that were requested on opening. Those of an adopted userfaultfd
    /// are the kernel's record. The record also names features that others imply.
    #[must_use]
    pub fn features(&self) -> Features {
        self.features
    }

    /// Registers `len` bytes from `start` for the faults of `mode`. Returns the ioctls that the
    /// range allows.
    ///
    /// Both must be multiples of the mapping's page size. Registering a range again replaces its
    /// mode.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::empty(), |uffd| {
    /// # let memory = private(4)?;
    /// // SAFETY: no thread touches these four pages, and nothing else uses them.
    /// let ioctls = unsafe { uffd.register(memory, 4 * PAGE, RegisterMode::MISSING)? };
    /// assert!(ioctls.contains(RangeIoctls::COPY | RangeIoctls::ZEROPAGE));
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// `EINVAL`: the range is not aligned or not mapped, or the kind of mapping does not support
    /// `mode`. `EPERM`: the mapping is a shared file without write permission. `EBUSY`: another
    /// userfaultfd has the range. `ENOMEM`: no memory is free, or the process of the userfaultfd
    /// has exited.
    ///
    /// # Safety
    /// From now on, until the range is unregistered or unmapped:
    /// 1. A thread that touches a missing page of it, in user mode or by a system call, sleeps
    ///    until another thread resolves the fault. (On a poisoned page it gets SIGBUS.) The program
    ///    must allow for that: the thread that resolves the faults never touches the range. No
    ///    thread touches the range while it holds a lock that the resolving thread needs.
    /// 2. Calls of this userfaultfd give pages of the range their first contents. So no Rust
    ///    reference to such a page may exist that relies on it being zero.
    /// 3. The caller owns the mapping of the range, and keeps it as long as it is registered. A
    ///    range of another process is that process's affair.
    pub unsafe fn register(
        &self,
        start: Hva,
        len: u64,
        mode: RegisterMode,
    ) -> Result<RangeIoctls, RangeError> {
        let mut argument = UffdioRegister {
            range: UffdioRange {
                start: start.0,
                len,
            },
            mode: mode.bits(),
            ioctls: 0,
        };
        // SAFETY: the contract is this function's own.
        unsafe { sys::register(&self.fd, &mut argument) }
            .map_err(|errno| RangeError::whole(RangeOp::Register, start, len, errno))?;
        Ok(RangeIoctls::from_bits(argument.ioctls))
    }

    /// Ends the registration of `len` bytes from `start`.
    ///
    /// A thread that sleeps on a missing page of the range continues *with the present contents*,
    /// as if the userfaultfd were dropped. Poison markers stay.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::empty(), |uffd| {
    /// # let memory = private(1)?;
    /// # // SAFETY: nothing else uses the page.
    /// # unsafe { uffd.register(memory, PAGE, RegisterMode::MISSING)? };
    /// uffd.unregister(memory, PAGE)?;
    /// assert_eq!(read(memory), 0); // no fault is reported any more
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// `EINVAL`: the range is not aligned or not mapped. `ENOMEM`: the process of the userfaultfd
    /// has exited.
    pub fn unregister(&self, start: Hva, len: u64) -> Result<(), RangeError> {
        sys::unregister(
            &self.fd,
            UffdioRange {
                start: start.0,
                len,
            },
        )
        .map_err(|errno| RangeError::whole(RangeOp::Unregister, start, len, errno))
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Opens a descriptor, before its handshake.
fn open_descriptor(user_mode_only: bool) -> Result<(OwnedFd, OpenedBy), OpenError> {
    let syscall = match sys::open_by_syscall(user_mode_only) {
        Ok(fd) => return Ok((fd, OpenedBy::Syscall)),
        // A sandbox may refuse the call with either error and still offer the device.
        Err(errno @ (Errno::PERM | Errno::NOSYS)) => errno,
        Err(errno) => {
            return Err(OpenError::Failed {
                call: "userfaultfd(2)",
                errno,
            });
        }
    };
    match sys::open_by_device(user_mode_only) {
        Ok(fd) => Ok((fd, OpenedBy::Device)),
        Err(device @ (Errno::NOENT | Errno::NODEV | Errno::NXIO | Errno::PERM | Errno::ACCESS)) => {
            let no_device = !matches!(device, Errno::PERM | Errno::ACCESS);
            Err(if syscall == Errno::NOSYS && no_device {
                OpenError::NotSupported
            } else {
                OpenError::NotPermitted { syscall, device }
            })
        }
        Err(errno) => Err(OpenError::Failed {
            call: "/dev/userfaultfd",
            errno,
        }),
    }
}

/// Calls `UFFDIO_API`. Returns all features of the kernel.
fn handshake(fd: &OwnedFd, features: Features) -> Result<Features, Errno> {
    let mut argument = UffdioApi {
        api: abi::UFFD_API,
        features: features.bits(),
        ioctls: 0,
    };
    sys::api(fd, &mut argument)?;
    Ok(Features::from_bits(argument.features))
}
