#![expect(unsafe_code, reason = "reads and writes memory given by address")]
//! Copies between a cursor's memory and a buffer, which TLS needs: it encrypts and decrypts there.

use super::Cursor;
use std::io;

impl Cursor<'_> {
    /// Lets `read` fill the rest of the current piece. Returns the number of bytes that it wrote.
    ///
    /// # Safety
    /// Each piece is mapped writable memory that nothing else reads or writes during the call, and
    /// to which no reference exists.
    pub(in crate::channel) unsafe fn fill(
        &mut self,
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let Some(piece) = self.pieces.first() else {
            return Ok(0);
        };
        let start = piece.start.wrapping_add(self.offset);
        // SAFETY: the rest of the piece is in mapped memory that nothing else uses (the caller's
        // contract). Mapped memory holds initialized bytes.
        let rest = unsafe { core::slice::from_raw_parts_mut(start, piece.len - self.offset) };
        let bytes = read(rest)?;
        self.advance(bytes);
        Ok(bytes)
    }

    /// Copies the next bytes into `buf`, without moving the position. Returns their number.
    ///
    /// # Safety
    /// Each piece is mapped readable memory.
    pub(in crate::channel) unsafe fn copy_out(&self, buf: &mut [u8]) -> usize {
        let (mut filled, mut offset) = (0, self.offset);
        for piece in self.pieces {
            let len = (piece.len - offset).min(buf.len() - filled);
            let start = piece.start.wrapping_add(offset);
            // SAFETY: `len` bytes from `start` lie in the piece.
            unsafe { copy_shared(start, &mut buf[filled..filled + len]) };
            filled += len;
            offset = 0;
            if filled == buf.len() {
                break;
            }
        }
        filled
    }
}

/// Copies memory that other threads may write meanwhile. `buf` then has a mixture of old and new
/// bytes.
///
/// # Safety
/// `from` is the start of mapped readable memory of `buf`'s length.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_shared(from: *const u8, buf: &mut [u8]) {
    // SAFETY: reads `buf`'s length from `from`, which the caller vouches for, and writes `buf`. The
    // compiler sees neither a load nor a reference of the shared memory, so a race is no more than
    // a mixture of bytes. The direction flag is clear by the ABI.
    unsafe {
        core::arch::asm!(
            "rep movsb",
            inout("rcx") buf.len() => _,
            inout("rsi") from => _,
            inout("rdi") buf.as_mut_ptr() => _,
            options(nostack, preserves_flags)
        );
    }
}

/// The same with atomic loads, which may race with writes.
///
/// # Safety
/// `from` is the start of mapped readable memory of `buf`'s length.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_shared(from: *const u8, buf: &mut [u8]) {
    use core::sync::atomic::{AtomicU8, Ordering};
    for (at, byte) in buf.iter_mut().enumerate() {
        // SAFETY: the byte lies in the memory of the caller's contract.
        let place = unsafe { AtomicU8::from_ptr(from.wrapping_add(at).cast_mut()) };
        *byte = place.load(Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::RawSlice;
    use super::*;

    #[test]
    fn bytes_are_copied_out_across_pieces_whatever_their_alignment() {
        let bytes: Vec<u8> = (0..100).collect();
        let (a, b) = bytes[1..].split_at(37);
        let pieces = [RawSlice::of(a), RawSlice::of(&[]), RawSlice::of(b)];
        let mut cursor = Cursor::new(&pieces);
        cursor.advance(5);
        for len in [0, 7, 50, 94] {
            let mut buf = vec![0; len];
            // SAFETY: the pieces are borrowed for the whole call.
            assert_eq!(unsafe { cursor.copy_out(&mut buf) }, len);
            assert_eq!(buf, bytes[6..6 + len]);
        }
        // SAFETY: as above.
        assert_eq!(unsafe { cursor.copy_out(&mut [0; 200]) }, 94);
    }

    #[test]
    fn a_cursor_is_filled_piece_by_piece() {
        let (mut a, mut b) = ([0; 3], [0; 5]);
        let pieces = [RawSlice::of_mut(&mut a), RawSlice::of_mut(&mut b)];
        let mut cursor = Cursor::new(&pieces);
        let mut lens = Vec::new();
        while cursor.left() > 0 {
            let read = |piece: &mut [u8]| {
                lens.push(piece.len());
                let len = piece.len().min(2);
                piece[..len].fill(lens.len() as u8);
                Ok(len)
            };
            // SAFETY: until the end of the loop, the arrays are only reached through `pieces`.
            unsafe { cursor.fill(read) }.unwrap();
        }
        assert_eq!(lens, [3, 1, 5, 3, 1]);
        assert_eq!((a, b), ([1, 1, 2], [3, 3, 4, 4, 5]));
    }
}
