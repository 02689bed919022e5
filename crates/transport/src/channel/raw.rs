#![expect(
    unsafe_code,
    reason = "moves bytes between sockets and memory for which no reference may exist, and asks \
              sockets what rustix cannot ask"
)]
//! The moving of bytes, for memory given by address: two system calls, and copies for TLS. Two more
//! calls ask and tell sockets what no safe function does.
//!
//! A reference to guest memory would claim that no thread writes it. This is false while a guest
//! runs. So callers pass addresses and keep the contracts stated here.

#[cfg(feature = "tls")]
mod copies;

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd};

/// The most pieces in one system call: a Pages frame's head and all its runs. The kernel takes up
/// to 1024 (`UIO_MAXIOV`).
const PIECES: usize = 130;

/// A piece of memory by its address, laid out as the kernel's `struct iovec`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct RawSlice {
    /// Its first byte.
    pub start: *mut u8,
    /// Its length in bytes.
    pub len: usize,
}

const _: () = {
    assert!(size_of::<RawSlice>() == size_of::<libc::iovec>());
    assert!(core::mem::offset_of!(RawSlice, start) == core::mem::offset_of!(libc::iovec, iov_base));
    assert!(core::mem::offset_of!(RawSlice, len) == core::mem::offset_of!(libc::iovec, iov_len));
};

impl RawSlice {
    /// Returns the memory of a slice, for reading only.
    pub(super) const fn of(bytes: &[u8]) -> Self {
        Self {
            start: bytes.as_ptr().cast_mut(),
            len: bytes.len(),
        }
    }

    /// Returns the memory of a slice, for writing.
    pub(super) const fn of_mut(bytes: &mut [u8]) -> Self {
        Self {
            start: bytes.as_mut_ptr(),
            len: bytes.len(),
        }
    }
}

/// Views `slices` as raw pieces.
pub(super) const fn of_io_slices<'a>(slices: &'a [IoSlice<'_>]) -> &'a [RawSlice] {
    // SAFETY: std guarantees that an `IoSlice` has the ABI of `iovec`. `RawSlice` has the same
    // layout (asserted above). The lifetime is that of the borrow.
    unsafe { core::slice::from_raw_parts(slices.as_ptr().cast(), slices.len()) }
}

/// A position in a list of pieces. The bytes before it were moved.
pub(super) struct Cursor<'a> {
    pieces: &'a [RawSlice],
    offset: usize,
    left: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(pieces: &'a [RawSlice]) -> Self {
        Self {
            pieces,
            offset: 0,
            left: pieces.iter().map(|piece| piece.len).sum(),
        }
    }

    /// The number of bytes left to move.
    pub(super) const fn left(&self) -> usize {
        self.left
    }

    /// Moves the position by `bytes`.
    pub(super) fn advance(&mut self, bytes: usize) {
        self.left -= bytes;
        self.offset += bytes;
        while let Some((first, rest)) = self.pieces.split_first()
            && self.offset >= first.len
        {
            self.offset -= first.len;
            self.pieces = rest;
        }
    }

    /// Returns the next pieces, as many as one call takes.
    fn window(&self) -> ([libc::iovec; PIECES], usize) {
        let empty = libc::iovec {
            iov_base: core::ptr::null_mut(),
            iov_len: 0,
        };
        let mut window = [empty; PIECES];
        let mut offset = self.offset;
        for (place, piece) in window.iter_mut().zip(self.pieces) {
            *place = libc::iovec {
                iov_base: piece.start.wrapping_add(offset).cast(),
                iov_len: piece.len - offset,
            };
            offset = 0;
        }
        (window, self.pieces.len().min(PIECES))
    }

    /// Receives the bytes that have arrived into the pieces, without waiting. Returns 0 if the peer
    /// closed.
    ///
    /// # Safety
    /// Each piece is mapped writable memory that nothing else reads or writes during the call.
    pub(super) unsafe fn receive(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let (mut window, len) = self.window();
        let mut message = message(&mut window[..len]);
        // SAFETY: `message` points to `window`, which outlives the call. `window` points to the
        // memory of the caller's contract. The descriptor is open while it is borrowed.
        let moved = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        self.moved(moved)
    }

    /// Sends as many bytes as the socket takes, without waiting and without a signal.
    ///
    /// # Safety
    /// Each piece is mapped readable memory.
    pub(super) unsafe fn send(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let (mut window, len) = self.window();
        let message = message(&mut window[..len]);
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: as in `receive`.
        let moved = unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags) };
        self.moved(moved)
    }

    fn moved(&mut self, result: libc::ssize_t) -> io::Result<usize> {
        let bytes = usize::try_from(result).map_err(|_| io::Error::last_os_error())?;
        self.advance(bytes);
        Ok(bytes)
    }
}

/// The bytes that a stream socket has taken and the peer's kernel has not confirmed: `SIOCOUTQ` of
/// tcp(7) and unix(7). Zero if the kernel does not say.
pub(super) fn unacknowledged(fd: BorrowedFd<'_>) -> u64 {
    let mut bytes: libc::c_int = 0;
    // SAFETY: `TIOCOUTQ` is `SIOCOUTQ`, which writes an `int` to `bytes`. The descriptor is open
    // while it is borrowed.
    let told = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if told == 0 {
        u64::try_from(bytes).unwrap_or(0)
    } else {
        0
    }
}

/// Bounds the data of one packet in both directions: `TCP_MAXSEG` of tcp(7). It counts for a
/// connection that is opened later, and for those that a listener accepts.
pub(super) fn limit_segments(fd: BorrowedFd<'_>, bytes: u16) -> io::Result<()> {
    let bytes = libc::c_int::from(bytes);
    // SAFETY: the option is an `int`, which the kernel reads from `bytes`. The descriptor is open
    // while it is borrowed.
    let set = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_MAXSEG,
            (&raw const bytes).cast(),
            size_of_val(&bytes) as libc::socklen_t,
        )
    };
    if set == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Returns a message of these pieces, without an address and without control data.
fn message(window: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: all fields of `msghdr` are integers and pointers, for which zero is a valid value.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = window.as_mut_ptr();
    message.msg_iovlen = window.len() as _;
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_skips_whole_pieces_and_keeps_the_offset_in_the_next() {
        let (a, b, c) = ([0; 3], [0; 0], [0; 5]);
        let pieces = [RawSlice::of(&a), RawSlice::of(&b), RawSlice::of(&c)];
        let mut cursor = Cursor::new(&pieces);
        assert_eq!((cursor.left(), cursor.window().1), (8, 3));
        cursor.advance(4);
        let (window, len) = cursor.window();
        assert_eq!((cursor.left(), len, window[0].iov_len), (4, 1, 4));
        assert_eq!(window[0].iov_base.cast_const().cast(), &raw const c[1]);
        cursor.advance(4);
        assert_eq!((cursor.left(), cursor.window().1), (0, 0));
    }
}
