#![expect(unsafe_code, reason = "maps a file that outlives the process")]
//! The state of a served VM that must outlive the process: a ring of messages, two bitmaps and some
//! numbers, in a mapped file.
//!
//! **Guarantee.** A message is in the ring from the moment at which the kernel regards it as read
//! until what it says is recorded. A bit that was set stays set when the process is killed.
//!
//! **Mechanism.** The file lies on tmpfs by default, so nothing waits for a disk. `read(2)` writes
//! messages straight into the mapping. The pages of the ring are faulted in and locked, so the
//! kernel's copy cannot fail. One process at a time maps the file: that with the directory's lock,
//! or that which was given the descriptor.
//!
//! The layout, in native byte order, since no other machine reads it: 8 bytes of magic, 8 bytes
//! with the number of pages, numbers of the owner up to byte 4096; 128 messages of 32 bytes (4096
//! bytes); the words of the two bitmaps.

use crate::bits::Bits;
use pageferry_userfault::uffd::MESSAGE_BYTES;
use rustix::fs::{FallocateFlags, fallocate, fstat};
use rustix::mm::{MapFlags, ProtFlags, mlock, mmap, munmap};
use std::fs::File;
use std::io;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::AtomicU64;

const MAGIC: u64 = u64::from_le_bytes(*b"PFPAGER1");
/// The place of the ring.
const RING: usize = 4096;
/// The messages that one `read(2)` takes at most.
const MESSAGES: usize = 4096 / MESSAGE_BYTES;
/// The place of the bitmaps.
const BITS: usize = RING + MESSAGES * MESSAGE_BYTES;

/// The mapped file of one VM: what must outlive the process that serves it.
///
/// The pager keeps so which pages the VM has given back and has, and the messages that it has read.
#[derive(Debug)]
pub struct Shared {
    base: NonNull<u8>,
    bytes: usize,
    words: usize,
}

// SAFETY: the mapping is plain memory that stays mapped until the value is dropped. Its header and
// its bitmaps are atomics, and the ring needs `&mut` of a `Ring`.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// The exclusive right to a VM's ring. Its one thread that reads messages has it.
#[derive(Debug)]
pub struct Ring(());

/// The numbers of the owner.
const NUMBERS: usize = RING / 8 - 2;

impl Shared {
    /// Writes a new state into an empty file.
    ///
    /// # Errors
    /// When the file system has no room, or the kernel does not map it.
    pub fn create(file: &File, pages: u64) -> io::Result<(Self, Ring)> {
        let bytes = BITS + 2 * words(pages) * 8;
        // A mapped hole may have no room later, which would be SIGBUS.
        fallocate(file, FallocateFlags::empty(), 0, bytes as u64)?;
        let shared = Self::map(file, pages)?;
        shared
            .word(0)
            .store(MAGIC, std::sync::atomic::Ordering::Relaxed);
        shared
            .word(1)
            .store(pages, std::sync::atomic::Ordering::Relaxed);
        Ok((shared, Ring(())))
    }

    /// Maps the state of another process, which is gone.
    ///
    /// # Errors
    /// When it is another state, or the kernel does not map it.
    pub fn open(file: &File, pages: u64) -> io::Result<(Self, Ring)> {
        let expected = (BITS + 2 * words(pages) * 8) as u64;
        let found = fstat(file)?.st_size as u64;
        let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        if found != expected {
            return wrong(format!(
                "the state of {pages} pages has {found} bytes: expected {expected}"
            ));
        }
        let shared = Self::map(file, pages)?;
        let word = |index| {
            shared
                .word(index)
                .load(std::sync::atomic::Ordering::Relaxed)
        };
        if (word(0), word(1)) != (MAGIC, pages) {
            return wrong("the state is of another version or another VM".to_owned());
        }
        Ok((shared, Ring(())))
    }

    fn map(file: &File, pages: u64) -> io::Result<Self> {
        let words = words(pages);
        let bytes = BITS + 2 * words * 8;
        // SAFETY: the kernel chooses an unused address.
        let base = unsafe {
            mmap(
                null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                file,
                0,
            )?
        };
        // SAFETY: the range was just mapped. A limit on locked memory is no failure: tmpfs has no
        // way to fail a page that is there, but under memory pressure.
        let _ = unsafe { mlock(base, BITS) };
        let base = NonNull::new(base.cast()).expect("a mapping does not begin at 0");
        Ok(Self { base, bytes, words })
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.atomics(0, 512)[index]
    }

    fn atomics(&self, at: usize, words: usize) -> &[AtomicU64] {
        assert!(at.is_multiple_of(8) && at + words * 8 <= self.bytes);
        // SAFETY: the range lies in the mapping, is aligned, and is accessed as atomics only. The
        // ring does not overlap it.
        unsafe { std::slice::from_raw_parts(self.base.add(at).cast().as_ptr(), words) }
    }

    /// A number of the owner, 0 at first.
    ///
    /// # Panics
    /// If `index` is above 509.
    #[must_use]
    pub fn number(&self, index: usize) -> &AtomicU64 {
        assert!(index < NUMBERS, "number {index} of {NUMBERS}");
        self.word(index + 2)
    }

    /// The place of a number in the file, in bytes.
    #[must_use]
    pub const fn place_of(index: usize) -> u64 {
        (index as u64 + 2) * 8
    }

    /// One of the two bitmaps.
    ///
    /// # Panics
    /// If `which` is neither 0 nor 1.
    #[must_use]
    pub fn bits(&self, which: usize) -> Bits<'_> {
        assert!(which < 2, "bitmap {which} of 2");
        Bits(self.atomics(BITS + which * self.words * 8, self.words))
    }

    /// The pages that the VM has given back. They are zero until it writes them.
    pub(crate) fn removed(&self) -> Bits<'_> {
        self.bits(0)
    }

    /// The pages that have been placed, and not given back since.
    pub(crate) fn placed(&self) -> Bits<'_> {
        self.bits(1)
    }

    /// Makes a slot of the ring zero, at this point of the program and not later.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn clear_message(&self, exclusive: &mut Ring, index: usize) {
        let slot = &raw mut self.messages(exclusive)[index];
        // SAFETY: the slot is borrowed exclusively.
        unsafe { slot.write_volatile([0; MESSAGE_BYTES]) };
    }

    /// The slots of the ring.
    pub fn messages<'a>(
        &'a self,
        _exclusive: &'a mut Ring,
    ) -> &'a mut [[u8; MESSAGE_BYTES]; MESSAGES] {
        // SAFETY: the range lies in the mapping. There is one `Ring` a mapping, and it is borrowed
        // exclusively. No other process has the directory's lock.
        unsafe { self.base.add(RING).cast().as_mut() }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: all borrows of the mapping have ended.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

fn words(pages: u64) -> usize {
    usize::try_from(pages.div_ceil(64)).expect("a VM's pages are counted in a usize")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    fn file() -> File {
        memfd_create("state", MemfdFlags::CLOEXEC).unwrap().into()
    }

    #[test]
    fn a_state_is_found_again() {
        let file = file();
        let (shared, mut ring) = Shared::create(&file, 100).unwrap();
        shared.removed().set(3..70);
        shared.placed().set(99..100);
        shared.messages(&mut ring)[127] = [7; MESSAGE_BYTES];
        drop(shared);
        let (shared, mut ring) = Shared::open(&file, 100).unwrap();
        assert_eq!((shared.removed().count(), shared.placed().count()), (67, 1));
        assert_eq!(shared.messages(&mut ring)[127], [7; MESSAGE_BYTES]);
        assert_eq!(shared.messages(&mut ring)[126], [0; MESSAGE_BYTES]);
    }

    #[test]
    fn a_state_of_something_else_is_refused() {
        let file = file();
        assert!(Shared::open(&file, 100).is_err(), "empty");
        drop(Shared::create(&file, 100).unwrap());
        assert!(Shared::open(&file, 1000).is_err(), "another size");
        assert!(Shared::open(&file, 101).is_err(), "another number of pages");
        rustix::io::pwrite(&file, b"PFPAGER0", 0).unwrap();
        assert!(Shared::open(&file, 100).is_err(), "another version");
    }
}
