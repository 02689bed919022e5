#![expect(
    unsafe_code,
    reason = "passes on the contracts of sending from memory given by address"
)]
//! Sending on a connection.
//!
//! With TLS, a write is complete when the socket has taken the last encrypted byte.

use rustix::event::PollFlags;
use std::io::{self, IoSlice};
use std::os::fd::AsFd;

use super::raw::{Cursor, RawSlice, of_io_slices};
use super::tls::{STEP_BYTES, Sent};
use super::wait::Waiter;
use super::{ChannelError, Connection, Wait};

/// The most slices that one TLS step takes.
const STEP_SLICES: usize = 128;

impl Connection {
    /// Sends all of `bytes`.
    ///
    /// # Errors
    /// `TimedOut`, `Interrupted` (some bytes may have been sent), `Lost`, `Tls`.
    pub fn write_all(&self, bytes: &[u8], wait: &Wait<'_>) -> Result<(), ChannelError> {
        self.write_all_vectored(&[IoSlice::new(bytes)], wait)
    }

    /// Sends all slices, in order.
    ///
    /// # Errors
    /// Those of [`write_all`](Self::write_all).
    pub fn write_all_vectored(
        &self,
        slices: &[IoSlice<'_>],
        wait: &Wait<'_>,
    ) -> Result<(), ChannelError> {
        if self.tls.is_none() {
            // SAFETY: the slices are borrowed for the whole call.
            return unsafe { self.write_all_raw(of_io_slices(slices), wait) };
        }
        // With TLS, slices spare the copy that `write_all_raw` makes of memory in use.
        let mut position = Position { slices, offset: 0 };
        self.send_until(wait, |connection| {
            let mut session = connection.session().expect("a connection with TLS");
            let mut accepted = 0;
            let window = position.window();
            let sent = session.send_slices(connection.as_fd(), &window, &mut accepted)?;
            position.advance(accepted);
            Ok((sent, position.slices.is_empty()))
        })
    }

    /// Sends all pieces in order. A plain connection sends them without copying them first.
    ///
    /// # Errors
    /// Those of [`write_all`](Self::write_all).
    ///
    /// # Safety
    /// Each piece is mapped, readable memory and stays mapped until the call returns. Other threads
    /// may write it meanwhile. The peer then receives a mixture of old and new bytes, which fits no
    /// checksum.
    pub unsafe fn write_all_raw(
        &self,
        pieces: &[RawSlice],
        wait: &Wait<'_>,
    ) -> Result<(), ChannelError> {
        let mut cursor = Cursor::new(pieces);
        self.send_until(wait, |connection| {
            // SAFETY: the caller's contract is that of `send`.
            let sent = unsafe { connection.send(&mut cursor) }?;
            Ok((sent, cursor.left() == 0))
        })
    }

    /// Takes as many of `bytes` as there is room for, without waiting. Returns their number, 0 if
    /// there is no room. With TLS, some of them may stay in this process: until
    /// [`flush_pending`](Self::flush_pending) returns true.
    ///
    /// Callers that share the connection need a lock of their own around the message, since it may
    /// be taken in parts.
    ///
    /// # Errors
    /// [`ChannelError::Lost`], `Tls`.
    pub fn try_send(&self, bytes: &[u8], what: &'static str) -> Result<usize, ChannelError> {
        let pieces = [RawSlice::of(bytes)];
        let mut cursor = Cursor::new(&pieces);
        while cursor.left() > 0 {
            // SAFETY: `bytes` is borrowed for the whole call.
            match unsafe { self.send(&mut cursor) } {
                Ok(sent) if sent.blocked => break,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(ChannelError::from_io(what, error)),
            }
        }
        Ok(bytes.len() - cursor.left())
    }

    /// Sends bytes that an earlier call left in this process, without waiting. Returns true if none
    /// are left, which is always so without TLS.
    ///
    /// # Errors
    /// [`ChannelError::Lost`].
    pub fn flush_pending(&self, what: &'static str) -> Result<bool, ChannelError> {
        let Some(mut session) = self.session() else {
            return Ok(true);
        };
        match session.flush(self.as_fd()) {
            Ok(sent) => Ok(!sent.blocked),
            Err(error) => Err(ChannelError::from_io(what, error)),
        }
    }

    /// Calls `step` until it has nothing left and the socket has taken everything.
    fn send_until(
        &self,
        wait: &Wait<'_>,
        mut step: impl FnMut(&Self) -> io::Result<(Sent, bool)>,
    ) -> Result<(), ChannelError> {
        let mut waiter = Waiter::new(wait);
        loop {
            match step(self) {
                Ok((sent, all)) => {
                    if all && !sent.blocked {
                        return Ok(());
                    }
                    if sent.moved > 0 {
                        waiter.progressed();
                    }
                    if sent.blocked {
                        waiter.wait(self.as_fd(), PollFlags::OUT)?;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(ChannelError::from_io(wait.what, error)),
            }
        }
    }

    /// Sends a part of the pieces, without waiting.
    ///
    /// # Safety
    /// As in [`write_all_raw`](Self::write_all_raw).
    unsafe fn send(&self, cursor: &mut Cursor<'_>) -> io::Result<Sent> {
        if let Some(mut session) = self.session() {
            // SAFETY: the caller's contract is that of `send`.
            return unsafe { session.send(self.as_fd(), cursor) };
        }
        let nothing = Sent {
            moved: 0,
            blocked: false,
        };
        if cursor.left() == 0 {
            return Ok(nothing);
        }
        // SAFETY: as above.
        match unsafe { cursor.send(self.as_fd()) } {
            Ok(moved) => Ok(Sent { moved, ..nothing }),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Sent {
                blocked: true,
                ..nothing
            }),
            Err(error) => Err(error),
        }
    }
}

/// A position in a list of slices. The bytes before it were taken.
struct Position<'a> {
    slices: &'a [IoSlice<'a>],
    offset: usize,
}

impl<'a> Position<'a> {
    /// Returns the next slices, as many as one step takes.
    fn window(&self) -> Vec<IoSlice<'a>> {
        let mut offset = self.offset;
        let mut room = STEP_BYTES;
        let mut window = Vec::with_capacity(self.slices.len().min(STEP_SLICES));
        for slice in self.slices.iter().take(STEP_SLICES) {
            let rest = &slice[offset..];
            let rest = &rest[..rest.len().min(room)];
            room -= rest.len();
            offset = 0;
            window.push(IoSlice::new(rest));
        }
        window
    }

    fn advance(&mut self, bytes: usize) {
        self.offset += bytes;
        while let Some((first, rest)) = self.slices.split_first()
            && self.offset >= first.len()
        {
            self.offset -= first.len();
            self.slices = rest;
        }
    }
}
