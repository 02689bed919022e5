//! Guest memory for tests: one anonymous mapping.
#![expect(unsafe_code, reason = "maps memory and accesses it beside guests")]

use pageferry_addr::RamPage;
use pageferry_guest::PageBytes;

/// A mapping that stays for as long as this lives.
pub(crate) struct Memory {
    start: *mut u64,
    length: usize,
}

// SAFETY: the pointer is to a mapping of this process that stays until drop; accesses are volatile.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn new(length: u64) -> Self {
        let length = length as usize;
        // SAFETY: a new anonymous mapping replaces nothing.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        assert_ne!(
            start,
            libc::MAP_FAILED,
            "{}",
            std::io::Error::last_os_error()
        );
        Self {
            start: start.cast(),
            length,
        }
    }

    /// The address of the first byte.
    pub(crate) fn address(&self) -> u64 {
        self.start as u64
    }

    fn words(&self, page: RamPage) -> impl Iterator<Item = *mut u64> {
        let offset = page.byte_offset() as usize;
        assert!(offset < self.length, "{page:?} of {} bytes", self.length);
        let start = self.start.wrapping_add(offset / 8);
        (0..512).map(move |nth| start.wrapping_add(nth))
    }

    pub(crate) fn read(&self, page: RamPage) -> PageBytes {
        let mut bytes = [0; 4096];
        for (word, bytes) in self.words(page).zip(bytes.chunks_exact_mut(8)) {
            // SAFETY: aligned and inside the mapping.
            bytes.copy_from_slice(&unsafe { word.read_volatile() }.to_ne_bytes());
        }
        bytes
    }

    pub(crate) fn write(&self, page: RamPage, bytes: &PageBytes) {
        for (word, bytes) in self.words(page).zip(bytes.chunks_exact(8)) {
            let value = u64::from_ne_bytes(bytes.try_into().unwrap());
            // SAFETY: aligned and inside the mapping.
            unsafe { word.write_volatile(value) };
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length. A test that runs guests on the memory keeps it
        // alive meanwhile.
        unsafe { libc::munmap(self.start.cast(), self.length) };
    }
}
