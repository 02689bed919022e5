//! [`Userfaultfd::adopt`]: descriptors that another process, or another part of this one, opened.
//!
//! **Guarantee.** An adopted descriptor is a userfaultfd after its API handshake. Its features are
//! known, and are at least those that the caller needs.
//!
//! **Mechanism.** No ioctl tells the features. The kernel's record of the descriptor in
//! `/proc/thread-self/fdinfo` does (`userfaultfd_show_fdinfo` in `fs/userfaultfd.c`). `poll(2)`
//! reports an error before the handshake.

use super::error::AdoptError;
use super::fd::Userfaultfd;
use super::flags::Features;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use std::os::fd::{AsRawFd, OwnedFd};

/// The bit of the record that means "after the handshake" (`UFFD_FEATURE_INITIALIZED`). Linux
/// before 5.15 has none.
const INITIALIZED: Features = Features::from_bits(1 << 31);

impl Userfaultfd {
    /// Adopts the descriptor of a userfaultfd that has had its API handshake, with at least the
    /// features `needed`.
    ///
    /// A VMM may hand such a descriptor to a page server over a Unix socket (`SCM_RIGHTS`). All
    /// calls then work on the VMM's memory, but [`Userfaultfd::move_pages`] fails with `EINVAL`.
    /// [`Userfaultfd::copy`] takes its bytes from the page server. When the VMM has exited, calls
    /// fail with `ESRCH` ([`RangeError::is_process_gone`](super::RangeError::is_process_gone)).
    ///
    /// The descriptor becomes close-on-exec and non-blocking. The second property is shared with
    /// all its holders, and reading blocks if one of them takes it away.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::MISSING_SHMEM, |uffd| {
    /// // Stands for a descriptor that came over a Unix socket.
    /// let descriptor = uffd.as_fd().try_clone_to_owned()?;
    /// let adopted = Userfaultfd::adopt(descriptor, Features::MISSING_SHMEM)?;
    /// assert!(adopted.features().contains(Features::MISSING_SHMEM));
    ///
    /// let file = std::fs::File::open("/dev/null")?;
    /// let refused = Userfaultfd::adopt(file.into(), Features::empty());
    /// assert!(matches!(refused, Err(AdoptError::NotUserfaultfd)));
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// [`AdoptError`]: another kind of file, no handshake, a missing feature, or no `/proc`. The
    /// descriptor is closed then.
    pub fn adopt(fd: OwnedFd, needed: Features) -> Result<Self, AdoptError> {
        let failed = |call| move |errno| AdoptError::Failed { call, errno };
        let path = format!("/proc/thread-self/fdinfo/{}", fd.as_raw_fd());
        let record = std::fs::read_to_string(path).map_err(|error| AdoptError::Failed {
            call: "reading /proc/thread-self/fdinfo",
            errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
        })?;
        let enabled = features_in(&record).ok_or(AdoptError::NotUserfaultfd)?;

        fcntl_setfd(&fd, FdFlags::CLOEXEC).map_err(failed("fcntl(F_SETFD)"))?;
        let flags = fcntl_getfl(&fd).map_err(failed("fcntl(F_GETFL)"))?;
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK).map_err(failed("fcntl(F_SETFL)"))?;

        let mut watched = [PollFd::new(&fd, PollFlags::IN)];
        rustix::io::retry_on_intr(|| poll(&mut watched, Some(&Timespec::default())))
            .map_err(failed("poll"))?;
        if watched[0].revents().contains(PollFlags::ERR) {
            return Err(AdoptError::NoHandshake);
        }
        let missing = needed.difference(enabled);
        if !missing.is_empty() {
            return Err(AdoptError::MissingFeatures { missing, enabled });
        }
        Ok(Self::from_parts(fd, enabled))
    }
}

/// The features in the record of a userfaultfd, whose line is `API: aa:<features>:<ioctls>`.
fn features_in(record: &str) -> Option<Features> {
    let line = record
        .lines()
        .find_map(|line| line.strip_prefix("API:\taa:"))?;
    let (features, _) = line.split_once(':')?;
    let bits = u64::from_str_radix(features, 16).ok()?;
    Some(Features::from_bits(bits).difference(INITIALIZED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_has_the_features() {
        let record = "pos:\t0\nflags:\t02004000\nmnt_id:\t17\nino:\t36048\npending:\t0\ntotal:\t0\n\
                      API:\taa:80000420:80000000000001ff\n";
        assert_eq!(
            features_in(record),
            Some(Features::MISSING_SHMEM | Features::MINOR_SHMEM)
        );
    }

    #[test]
    fn other_records_have_none() {
        for record in [
            "",
            "pos:\t0\nflags:\t0100000\n",
            "API:\tab:0:0\n",
            "API:\taa:xyz:0\n",
            "API:\taa:12\n",
        ] {
            assert_eq!(features_in(record), None, "{record:?}");
        }
    }
}
