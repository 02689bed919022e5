#![expect(
    unsafe_code,
    reason = "rustix has no call that attaches to a tap device"
)]
//! A tap device of the host: what one side sends, the other receives.
//!
//! Source: Linux's `Documentation/networking/tuntap.rst`.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

/// An attached tap device. Frames are whole, without a header of the host.
pub struct Tap(File);

/// A descriptor whose every read and write is one frame, and does not block: one that is attached
/// already, or a socket of datagrams.
impl From<OwnedFd> for Tap {
    fn from(fd: OwnedFd) -> Self {
        Self(fd.into())
    }
}

impl Tap {
    /// Attaches to the tap device `name`. The kernel makes a missing one, which goes with this
    /// process.
    ///
    /// # Errors
    /// When the name is empty or longer than 15 bytes, `/dev/net/tun` cannot be opened, another
    /// process is attached, or this one may not.
    pub fn open(name: &str) -> io::Result<Self> {
        if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains(['/', '\0', '%']) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{name:?} is no name of a network device, expected 1 to 15 bytes"),
            ));
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun")?;
        let mut request = libc::ifreq {
            ifr_name: [0; libc::IFNAMSIZ],
            ifr_ifru: libc::__c_anonymous_ifr_ifru {
                ifru_flags: (libc::IFF_TAP | libc::IFF_NO_PI) as i16,
            },
        };
        for (into, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *into = byte as libc::c_char;
        }
        // SAFETY: the descriptor is open, and the request is one of the size that the call takes.
        match unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } {
            0 => Ok(Self(file)),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Receives a frame. `None` if there is none.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn receive(&self, into: &mut [u8]) -> io::Result<Option<usize>> {
        match (&self.0).read(into) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Sends a frame.
    ///
    /// # Errors
    /// Those of `write`.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        (&self.0).write(frame).map(drop)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
