//! [`Userfaultfd`]: opening, registering, reading events.
#![expect(
    unsafe_code,
    reason = "registering a range is unsafe to call, and adopting a descriptor is unsafe"
)]

use super::abi::{self, UffdioApi, UffdioRange, UffdioRegister};
use super::error::{OpenError, RangeError, RangeOp};
use super::event::{Event, Message};
use super::flags::{Features, RangeIoctls, RegisterMode};
use super::sys;
use pageferry_addr::Hva;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The interface by which a userfaultfd was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenedBy {
    /// `userfaultfd(2)`.
    Syscall,
    /// `/dev/userfaultfd`.
    Device,
}

/// An open userfaultfd after its API handshake: close-on-exec and non-blocking.
///
/// Any thread may make any call at any time. The kernel orders them.
///
/// Dropping it closes the descriptor. The kernel unregisters all its ranges, and a thread that
/// slept on a missing page continues *with the present contents*, zeros or half-received bytes. So
/// it must outlive the last missing page of every VM that it serves.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
    opened_by: OpenedBy,
    available: Features,
}

impl Userfaultfd {
    /// Opens a userfaultfd with `features`. It serves faults of user mode and of the kernel,
    /// including KVM's.
    ///
    /// Tries the system call, then `/dev/userfaultfd`.
    ///
    /// # Errors
    /// See [`OpenError`]: no permission, a missing feature, or a kernel without userfaultfd.
    pub fn open(features: Features) -> Result<Self, OpenError> {
        Self::open_as(features, false)
    }

    /// Opens a userfaultfd that serves faults of user mode only. Any process may do so. A fault
    /// inside a system call or in KVM then fails (`EFAULT`) and is not reported.
    ///
    /// # Errors
    /// As [`Userfaultfd::open`].
    pub fn open_user_mode_only(features: Features) -> Result<Self, OpenError> {
        Self::open_as(features, true)
    }

    fn open_as(features: Features, user_mode_only: bool) -> Result<Self, OpenError> {
        let (fd, opened_by) = open_descriptor(user_mode_only)?;
        match handshake(&fd, features) {
            Ok(available) => Ok(Self {
                fd,
                opened_by,
                available,
            }),
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

    /// All features of this kernel, including those that were not requested.
    #[must_use]
    pub fn available(&self) -> Features {
        self.available
    }

    /// The interface by which the userfaultfd was opened.
    #[must_use]
    pub fn opened_by(&self) -> OpenedBy {
        self.opened_by
    }

    /// Registers `len` bytes from `start` for the faults of `mode`. Returns the ioctls that the
    /// range allows.
    ///
    /// Both must be multiples of the mapping's page size. Registering a range again replaces its
    /// mode.
    ///
    /// # Errors
    /// `EINVAL`: the range is not aligned or not mapped, or the kind of mapping does not support
    /// `mode`. `EPERM`: the mapping is a shared file without write permission. `EBUSY`: another
    /// userfaultfd has the range. `ENOMEM`: no memory.
    ///
    /// # Safety
    /// From now on, until the range is unregistered or unmapped:
    /// 1. A thread that touches a missing page of it, in user mode or by a system call, sleeps
    ///    until another thread resolves the fault. (On a poisoned page it gets SIGBUS.) The program
    ///    must allow for that: the thread that resolves the faults never touches the range. No
    ///    thread touches the range while it holds a lock that the resolving thread needs.
    /// 2. Calls of this userfaultfd give pages of the range their first contents. So no Rust
    ///    reference to such a page may exist that relies on it being zero.
    /// 3. The caller owns the mapping of the range, and keeps it as long as it is registered.
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
            .map_err(|errno| at(RangeOp::Register, start, len, errno))?;
        Ok(RangeIoctls::from_bits(argument.ioctls))
    }

    /// Ends the registration of `len` bytes from `start`.
    ///
    /// A thread that sleeps on a missing page of the range continues *with the present contents*,
    /// as if the userfaultfd were dropped. Poison markers stay.
    ///
    /// # Errors
    /// `EINVAL`: the range is not aligned or not mapped.
    pub fn unregister(&self, start: Hva, len: u64) -> Result<(), RangeError> {
        sys::unregister(
            &self.fd,
            UffdioRange {
                start: start.0,
                len,
            },
        )
        .map_err(|errno| at(RangeOp::Unregister, start, len, errno))
    }

    /// Reads at most `limit` waiting events and appends them to `events`. Returns their number. It
    /// never blocks: without a waiting event it returns 0. To wait, poll the descriptor ([`AsFd`])
    /// for readability.
    ///
    /// # Errors
    /// The error of `read(2)`. Events that were appended before stay.
    pub fn read_events(&self, events: &mut Vec<Event>, limit: usize) -> Result<usize, Errno> {
        // This takes 2 KiB of stack.
        let mut buffer = [[0; abi::MSG_BYTES]; 64];
        let mut count = 0;
        while count < limit {
            let batch = buffer.len().min(limit - count);
            let read = self.read_batch(&mut buffer[..batch], |event| events.push(event))?;
            count += read;
            if read < batch {
                break;
            }
        }
        Ok(count)
    }

    /// Reads one event, or returns `None` if none waits. It never blocks.
    ///
    /// # Errors
    /// The error of `read(2)`.
    pub fn read_event(&self) -> Result<Option<Event>, Errno> {
        let mut event = None;
        self.read_batch(&mut [[0; abi::MSG_BYTES]], |read| event = Some(read))?;
        Ok(event)
    }

    /// Makes one `read(2)` of as many waiting messages as fit. Returns their number.
    fn read_batch(
        &self,
        buffer: &mut [[u8; abi::MSG_BYTES]],
        mut each: impl FnMut(Event),
    ) -> Result<usize, Errno> {
        let bytes = match rustix::io::retry_on_intr(|| {
            rustix::io::read(&self.fd, buffer.as_flattened_mut())
        }) {
            Ok(bytes) => bytes,
            Err(Errno::AGAIN) => return Ok(0),
            Err(errno) => return Err(errno),
        };
        let messages = &buffer[..bytes / abi::MSG_BYTES];
        for message in messages {
            each(match Message::decode(message) {
                Message::PageFault(fault) => Event::PageFault(fault),
                Message::Fork(raw) => Event::Fork {
                    // SAFETY: the message was just read, and this loop decodes each once.
                    child: unsafe { sys::adopt(raw) },
                },
                Message::Remap { from, to, len } => Event::Remap { from, to, len },
                Message::Remove { start, end } => Event::Remove { start, end },
                Message::Unmap { start, end } => Event::Unmap { start, end },
                Message::Unknown { event } => Event::Unknown { event },
            });
        }
        Ok(messages.len())
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The error of a call that succeeds or fails as a whole.
pub(super) fn at(op: RangeOp, start: Hva, len: u64, errno: Errno) -> RangeError {
    RangeError {
        op,
        start,
        len,
        done: 0,
        errno,
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
