//! The errors of opening and of adopting a userfaultfd, with advice.

use super::Features;
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

/// The error of adopting a descriptor as a userfaultfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdoptError {
    /// The descriptor belongs to another kind of file.
    #[error(
        "the descriptor is no userfaultfd: expected one of userfaultfd(2) or /dev/userfaultfd, \
         after its API handshake"
    )]
    NotUserfaultfd,
    /// The userfaultfd has had no API handshake. It serves the memory of the process that opened
    /// it, so that process must choose the features.
    #[error(
        "the userfaultfd has had no API handshake: the process that opened it must call UFFDIO_API \
         before it hands the descriptor over"
    )]
    NoHandshake,
    /// The process that opened the userfaultfd did not request all needed features.
    #[error(
        "the userfaultfd was opened without {missing}: its features are {enabled}, and the process \
         that opens it must request all that are needed"
    )]
    MissingFeatures {
        /// The needed features that are not enabled.
        missing: Features,
        /// All enabled features.
        enabled: Features,
    },
    /// Another error, such as a process without `/proc`.
    #[error("{call} failed: {errno}")]
    Failed {
        /// The call that failed.
        call: &'static str,
        /// Its error.
        errno: Errno,
    },
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
}
