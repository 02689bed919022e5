#![expect(
    unsafe_code,
    reason = "passes on the contracts of memory given by address"
)]
//! The TLS state of one connection.

use rustix::event::PollFlags;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::BorrowedFd;

use super::{STEP_BYTES, Sent, TlsError};
use crate::channel::raw::Cursor;
use crate::wire::{FirstBytes, HELLO_MAGIC};

/// The encrypted bytes that a new connection takes from the socket at once.
const SMALL_INBOUND_BYTES: usize = 4 << 10;
/// The same once the reader has read at least [`BULK_READ_BYTES`] at once.
const LARGE_INBOUND_BYTES: usize = 128 << 10;
/// A read of this length is one of pages in bulk.
const BULK_READ_BYTES: usize = 16 << 10;
/// The length of most records in bulk.
const RECORD_BYTES: usize = 16 << 10;
/// The label of the exporter, as both sides' proofs need it.
const EXPORTER_LABEL: &[u8] = b"EXPORTER-pageferry-6";

/// The TLS state of one connection.
pub(in crate::channel) struct Session {
    tls: rustls::Connection,
    /// Encrypted bytes of the peer. rustls has not taken those in `inbound[start..end]` yet.
    inbound: Vec<u8>,
    start: usize,
    end: usize,
    /// The number of decrypted bytes that the reader has not taken yet.
    plain: usize,
    /// The peer sends no more bytes after `plain`.
    ended: bool,
    /// An error of the socket, for the next read.
    failure: Option<io::Error>,
    /// The first bytes of the peer.
    first: Option<FirstBytes>,
    /// Plaintext on its way from memory that other threads may write.
    outbound: Vec<u8>,
}

impl Session {
    pub(in crate::channel) fn new(mut tls: rustls::Connection) -> Self {
        // The encrypted bytes of one step. They leave before the next step begins.
        tls.set_buffer_limit(Some(2 * STEP_BYTES));
        Self {
            tls,
            inbound: vec![0; SMALL_INBOUND_BYTES],
            start: 0,
            end: 0,
            plain: 0,
            ended: false,
            failure: None,
            first: None,
            outbound: Vec::new(),
        }
    }

    /// Continues the handshake without waiting. Returns `None` at its end, or the event to wait
    /// for.
    pub(in crate::channel) fn handshake(
        &mut self,
        fd: BorrowedFd<'_>,
    ) -> io::Result<Option<PollFlags>> {
        loop {
            if self.flush(fd)?.blocked {
                return Ok(Some(PollFlags::OUT));
            }
            if !self.tls.is_handshaking() {
                return Ok(None);
            }
            match self.advance(fd) {
                Ok(()) if self.ended => return Err(io::Error::other(TlsError::Ended)),
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(Some(PollFlags::IN));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns bytes that only the two ends of this connection know.
    pub(in crate::channel) fn exporter(&self) -> Result<[u8; 32], TlsError> {
        self.tls
            .export_keying_material([0; 32], EXPORTER_LABEL, None)
            .map_err(|error| TlsError::Broken(error.to_string()))
    }

    /// Whether the peer's certificate was checked.
    pub(in crate::channel) fn has_peer(&self) -> bool {
        !self.tls.is_handshaking() && self.tls.peer_certificates().is_some()
    }

    /// Returns the first DNS name in the peer's certificate, once the handshake has checked it.
    pub(in crate::channel) fn peer_dns_name(&self) -> Option<String> {
        let certificate = self.tls.peer_certificates()?.first()?;
        let parsed = webpki::EndEntityCert::try_from(certificate).ok()?;
        parsed.valid_dns_names().next().map(str::to_owned)
    }

    /// Whether a read may return bytes although the socket has none.
    pub(in crate::channel) const fn has_pending(&self) -> bool {
        self.plain > 0 || self.start < self.end || self.ended || self.failure.is_some()
    }

    /// Returns an error of the kind `WouldBlock` if a read would return no bytes and no error.
    pub(in crate::channel) fn look(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        match self.fill(fd) {
            Err(error) if !is_transient(&error) => {
                self.failure = Some(error);
                Ok(())
            }
            result => result.map(|_| ()),
        }
    }

    /// Decrypts until there is plaintext. Returns false if the peer has closed.
    fn fill(&mut self, fd: BorrowedFd<'_>) -> io::Result<bool> {
        while self.plain == 0 {
            if let Some(failure) = self.failure.take() {
                return Err(failure);
            }
            if self.ended {
                return Ok(false);
            }
            self.advance(fd)?;
        }
        Ok(true)
    }

    /// Receives plaintext into the pieces, at most about [`STEP_BYTES`]. Returns 0 if the peer
    /// closed.
    ///
    /// # Safety
    /// As in [`Cursor::receive`].
    pub(in crate::channel) unsafe fn receive(
        &mut self,
        fd: BorrowedFd<'_>,
        cursor: &mut Cursor<'_>,
    ) -> io::Result<usize> {
        if cursor.left() >= BULK_READ_BYTES && self.inbound.len() < LARGE_INBOUND_BYTES {
            self.inbound.resize(LARGE_INBOUND_BYTES, 0);
        }
        let mut moved = 0;
        while cursor.left() > 0 && moved < STEP_BYTES {
            match self.fill(fd) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) if moved == 0 => return Err(error),
                Err(error) => {
                    if !is_transient(&error) {
                        self.failure = Some(error);
                    }
                    break;
                }
            }
            let mut reader = self.tls.reader();
            // SAFETY: the caller's contract is that of `fill`.
            let taken = unsafe { cursor.fill(|piece| reader.read(piece)) }?;
            self.plain -= taken;
            moved += taken;
        }
        Ok(moved)
    }

    /// Encrypts and sends a part of the pieces, at most [`STEP_BYTES`], if nothing is left to send.
    ///
    /// # Safety
    /// As in [`Cursor::send`].
    pub(in crate::channel) unsafe fn send(
        &mut self,
        fd: BorrowedFd<'_>,
        cursor: &mut Cursor<'_>,
    ) -> io::Result<Sent> {
        let mut sent = self.flush(fd)?;
        if !sent.blocked && cursor.left() > 0 {
            self.outbound.resize(STEP_BYTES.min(cursor.left()), 0);
            // SAFETY: the caller's contract is that of `copy_out`.
            let copied = unsafe { cursor.copy_out(&mut self.outbound) };
            let accepted = self.tls.writer().write(&self.outbound[..copied])?;
            cursor.advance(accepted);
            let flushed = self.flush(fd)?;
            sent.moved += flushed.moved;
            sent.blocked = flushed.blocked;
        }
        Ok(sent)
    }

    /// Encrypts and sends a part of `slices`, if nothing is left to send. Adds the number of bytes
    /// accepted to `accepted`.
    pub(in crate::channel) fn send_slices(
        &mut self,
        fd: BorrowedFd<'_>,
        slices: &[IoSlice<'_>],
        accepted: &mut usize,
    ) -> io::Result<Sent> {
        let mut sent = self.flush(fd)?;
        if !sent.blocked && !slices.is_empty() {
            *accepted += self.tls.writer().write_vectored(slices)?;
            let flushed = self.flush(fd)?;
            sent.moved += flushed.moved;
            sent.blocked = flushed.blocked;
        }
        Ok(sent)
    }

    /// Sends encrypted bytes that are left.
    pub(in crate::channel) fn flush(&mut self, fd: BorrowedFd<'_>) -> io::Result<Sent> {
        let mut sent = Sent {
            moved: 0,
            blocked: false,
        };
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Socket(fd)) {
                Ok(bytes) => sent.moved += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    sent.blocked = true;
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(sent)
    }

    /// Tells the peer that no more bytes follow, if the socket has room for that.
    pub(in crate::channel) fn close_write(&mut self, fd: BorrowedFd<'_>) {
        self.tls.send_close_notify();
        // Without room, the peer sees the end of the socket alone.
        let _ = self.flush(fd);
    }

    /// Gives rustls about one record of the bytes that have arrived. Returns their number.
    ///
    /// rustls takes 4 KiB at once. A record mostly has 16 KiB, and looking at a part of it is in
    /// vain.
    fn feed(&mut self) -> io::Result<usize> {
        let mut taken = 0;
        while self.start < self.end && taken < RECORD_BYTES {
            match self.tls.read_tls(&mut &self.inbound[self.start..self.end]) {
                Ok(0) => break,
                Ok(bytes) => {
                    self.start += bytes;
                    taken += bytes;
                }
                // Its buffer is full: it must decrypt first.
                Err(_) if taken > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(taken)
    }

    /// Gives rustls the next encrypted bytes, from the socket if none are left.
    fn advance(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        if self.start == self.end {
            let (_, received) = recv(fd, &mut self.inbound[..], RecvFlags::DONTWAIT)?;
            (self.start, self.end) = (0, received);
            if received == 0 {
                self.ended = true;
                return Ok(());
            }
            if self.first.is_none() {
                self.first = Some(FirstBytes::new(&self.inbound[..received]));
            }
        }
        let taken = self.feed()?;
        if taken == 0 {
            // rustls takes nothing after the peer's close_notify.
            self.ended = true;
            return Ok(());
        }
        match self.tls.process_new_packets() {
            Ok(state) => {
                self.plain = state.plaintext_bytes_to_read();
                self.ended |= state.peer_has_closed();
                Ok(())
            }
            Err(error) => {
                // rustls has an alert for the peer. A peer that is gone needs none.
                let _ = self.flush(fd);
                let first = self.first.unwrap_or_else(|| FirstBytes::new(&[]));
                Err(io::Error::other(
                    match TlsError::from_rustls(error, first) {
                        TlsError::NotTls(first) if first.as_slice() == HELLO_MAGIC => {
                            TlsError::PeerIsPlain
                        }
                        error => error,
                    },
                ))
            }
        }
    }
}

impl core::fmt::Debug for Session {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Session")
            .field("handshaking", &self.tls.is_handshaking())
            .field("plain", &self.plain)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

/// Whether a retry may succeed.
fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

/// Writes to a socket without waiting and without a signal.
struct Socket<'a>(BorrowedFd<'a>);

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let mut none = SendAncillaryBuffer::default();
        Ok(sendmsg(self.0, slices, &mut none, flags)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
