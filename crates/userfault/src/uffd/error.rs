//! The errors of a userfaultfd, with advice.

use super::Features;
use core::fmt;
use pageferry_addr::Hva;
use rustix::io::Errno;

/// The error of opening a userfaultfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// This process may use neither the system call nor the device.
    #[error(
        "this process may not open a userfaultfd that serves faults of the kernel (userfaultfd(2): {syscall}; \
         /dev/userfaultfd: {device}): run it as root or with CAP_SYS_PTRACE, or set the sysctl \
         vm.unprivileged_userfaultfd=1, or give it access to /dev/userfaultfd (a user-mode-only \
         userfaultfd needs none of this, but does not serve KVM)"
    )]
    NotPermitted {
        /// The error of the system call.
        syscall: Errno,
        /// The error of opening the device. `ENOENT` if there is none.
        device: Errno,
    },
    /// The kernel has no userfaultfd.
    #[error(
        "this kernel has no userfaultfd: Linux 4.11 or later with CONFIG_USERFAULTFD=y is needed \
         (a sandbox that hides the system call looks the same)"
    )]
    NotSupported,
    /// The kernel has userfaultfd with another or too old version of the API.
    #[error(
        "the kernel refused the userfaultfd API handshake ({0}): Linux 4.11 or later is needed"
    )]
    Handshake(Errno),
    /// The kernel lacks requested features.
    #[error("this kernel's userfaultfd lacks {}; it has {available}", .missing.with_versions())]
    MissingFeatures {
        /// The requested features that the kernel lacks.
        missing: Features,
        /// All features of the kernel.
        available: Features,
    },
    /// [`Features::EVENT_FORK`] was requested without the capability.
    #[error("fork events of a userfaultfd need CAP_SYS_PTRACE")]
    ForkEventsNotPermitted,
    /// Another error, such as no free descriptor or no memory.
    #[error("{call} failed: {errno}")]
    Failed {
        /// The call that failed.
        call: &'static str,
        /// Its error.
        errno: Errno,
    },
}

/// A call on a range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RangeOp {
    /// `UFFDIO_REGISTER`
    Register,
    /// `UFFDIO_UNREGISTER`
    Unregister,
    /// `UFFDIO_WAKE`
    Wake,
    /// `UFFDIO_COPY`
    Copy,
    /// `UFFDIO_ZEROPAGE`
    Zeropage,
    /// `UFFDIO_WRITEPROTECT`
    WriteProtect,
    /// `UFFDIO_CONTINUE`
    Continue,
    /// `UFFDIO_POISON`
    Poison,
}

impl fmt::Display for RangeOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Register => "UFFDIO_REGISTER",
            Self::Unregister => "UFFDIO_UNREGISTER",
            Self::Wake => "UFFDIO_WAKE",
            Self::Copy => "UFFDIO_COPY",
            Self::Zeropage => "UFFDIO_ZEROPAGE",
            Self::WriteProtect => "UFFDIO_WRITEPROTECT",
            Self::Continue => "UFFDIO_CONTINUE",
            Self::Poison => "UFFDIO_POISON",
        })
    }
}

/// A call on a range that stopped before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op} of {len:#x} bytes at {start} stopped after {done:#x} bytes: {errno}")]
pub struct RangeError {
    /// The call that failed.
    pub op: RangeOp,
    /// The first byte of the range.
    pub start: Hva,
    /// Its length in bytes.
    pub len: u64,
    /// The number of bytes from the start that are done and stay done. Unless the call was told
    /// otherwise, their sleepers were woken. Always 0 for calls that succeed or fail as a whole:
    /// register, unregister, wake, write-protect.
    pub done: u64,
    /// The kernel's error for the page at `start + done`.
    pub errno: Errno,
}

impl RangeError {
    /// Whether the page at `start + done` is already mapped or, for a poison marker, mapped or
    /// marked (`EEXIST`). The call changed nothing there, and woke no thread that sleeps on the
    /// page.
    #[must_use]
    pub fn is_already_there(&self) -> bool {
        self.errno == Errno::EXIST
    }

    /// Whether `UFFDIO_CONTINUE` found no page in the page cache at `start + done` (`EFAULT`).
    #[must_use]
    pub fn is_not_in_page_cache(&self) -> bool {
        self.op == RangeOp::Continue && self.errno == Errno::FAULT
    }

    /// Whether the range is not (or no longer) one registered mapping (`ENOENT`).
    #[must_use]
    pub fn is_not_registered(&self) -> bool {
        self.errno == Errno::NOENT
    }

    /// Whether the mappings are being changed (`EAGAIN`). The caller may repeat the call from
    /// `start + done` after it has read the event of that change.
    #[must_use]
    pub fn is_changing(&self) -> bool {
        self.errno == Errno::AGAIN
    }
}

impl From<RangeError> for std::io::Error {
    fn from(error: RangeError) -> Self {
        error.errno.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_what_to_do() {
        let text = OpenError::NotPermitted {
            syscall: Errno::PERM,
            device: Errno::ACCESS,
        }
        .to_string();
        for part in [
            "CAP_SYS_PTRACE",
            "vm.unprivileged_userfaultfd=1",
            "/dev/userfaultfd",
            "root",
            "KVM",
        ] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
        let text = OpenError::MissingFeatures {
            missing: Features::POISON,
            available: Features::MINOR_SHMEM,
        }
        .to_string();
        assert_eq!(
            text,
            "this kernel's userfaultfd lacks POISON (Linux 6.6); it has MINOR_SHMEM"
        );
    }

    #[test]
    fn a_range_error_keeps_the_errno() {
        let error = RangeError {
            op: RangeOp::Continue,
            start: Hva(0x7000),
            len: 0x3000,
            done: 0x1000,
            errno: Errno::EXIST,
        };
        assert!(error.is_already_there() && !error.is_not_in_page_cache());
        assert!(
            error.to_string().starts_with(
                "UFFDIO_CONTINUE of 0x3000 bytes at 0x7000 stopped after 0x1000 bytes"
            )
        );
        assert_eq!(
            std::io::Error::from(error).raw_os_error(),
            Some(libc::EEXIST)
        );
    }
}
