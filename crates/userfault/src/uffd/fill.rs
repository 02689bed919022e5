//! The calls that resolve faults: they make pages present, set markers, or wake threads.

use super::abi::{self, UffdioFill, UffdioRange};
use super::fd::Userfaultfd;
use super::range_error::{RangeError, RangeOp};
use super::retry::advance;
use super::sys;
use pageferry_addr::{Hva, PageSize};

/// The moment at which threads that sleep on a page are woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wake {
    /// The same call wakes them.
    Now,
    /// This call does not wake them (DONTWAKE). A later [`Userfaultfd::wake`] does, if any thread
    /// can sleep there.
    Later,
}

impl Wake {
    pub(super) fn mode(self) -> u64 {
        match self {
            Self::Now => 0,
            Self::Later => abi::MODE_DONTWAKE,
        }
    }
}

impl Userfaultfd {
    /// Copies `bytes` to the missing pages from `dst` and maps them. Each page appears atomically
    /// to threads that touch it. The length must be a multiple of the page size and not 0.
    ///
    /// The slice must not lie in missing memory. Otherwise the call fails with `EFAULT` or waits
    /// for a fault that no thread may resolve.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::empty(), |uffd| {
    /// # let memory = private(2)?;
    /// # // SAFETY: only this thread touches the pages, after they are present.
    /// # unsafe { uffd.register(memory, 2 * PAGE, RegisterMode::MISSING)? };
    /// uffd.copy(memory, &[7; 2 * 4096], Wake::Now)?;
    /// assert_eq!(read(memory), 7);
    ///
    /// let again = uffd.copy(memory, &[8; 4096], Wake::Now).unwrap_err();
    /// assert!(again.is_already_there());
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// [`RangeError`]. Among others `EEXIST`: the page at `done` has contents already.
    pub fn copy(&self, dst: Hva, bytes: &[u8], wake: Wake) -> Result<(), RangeError> {
        self.copy_with(dst, bytes, wake.mode())
    }

    /// Maps zeros at the missing pages of `len` bytes from `start`.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::empty(), |uffd| {
    /// # let memory = private(2)?;
    /// # // SAFETY: only this thread touches the pages, after they are present.
    /// # unsafe { uffd.register(memory, 2 * PAGE, RegisterMode::MISSING)? };
    /// uffd.zeropage(memory, 2 * PAGE, Wake::Now)?;
    /// assert_eq!(read(memory), 0);
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// [`RangeError`]. Among others `EEXIST` as in [`Userfaultfd::copy`], and `EINVAL` on
    /// hugetlbfs.
    pub fn zeropage(&self, start: Hva, len: u64, wake: Wake) -> Result<(), RangeError> {
        self.fill(RangeOp::Zeropage, start, len, wake.mode())
    }

    /// Maps the pages of `len` bytes from `start`. They must be in the page cache, written through
    /// another mapping of the same file. The call replaces poison markers.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::MISSING_SHMEM | Features::MINOR_SHMEM, |uffd| {
    /// # let (guest, alias) = shared(1)?;
    /// # // SAFETY: only this thread touches the pages, after they are present.
    /// # unsafe { uffd.register(guest, PAGE, RegisterMode::MISSING | RegisterMode::MINOR)? };
    /// write(alias, 7); // now the page is in the page cache
    /// uffd.continue_range(guest, PAGE, Wake::Now)?;
    /// assert_eq!(read(guest), 7);
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// [`RangeError`]. Among others `EEXIST` (the page at `done` is mapped already,
    /// [`RangeError::is_already_there`]) and `EFAULT` (it is not in the page cache,
    /// [`RangeError::is_not_in_page_cache`]).
    pub fn continue_range(&self, start: Hva, len: u64, wake: Wake) -> Result<(), RangeError> {
        self.fill(RangeOp::Continue, start, len, wake.mode())
    }

    /// Does a [`Userfaultfd::continue_range`] that skips pages which are mapped already. Returns
    /// the number of bytes that it mapped.
    ///
    /// `page` is the mapping's page size. [`Wake::Now`] wakes sleepers on *all* pages, including
    /// pages that other threads had mapped.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::MISSING_SHMEM | Features::MINOR_SHMEM, |uffd| {
    /// # let (guest, alias) = shared(2)?;
    /// # // SAFETY: only this thread touches the pages, after they are present.
    /// # unsafe { uffd.register(guest, 2 * PAGE, RegisterMode::MISSING | RegisterMode::MINOR)? };
    /// write(alias, 1);
    /// write(Hva(alias.0 + PAGE), 2);
    /// uffd.continue_range(guest, PAGE, Wake::Now)?;
    /// let newly = uffd.continue_unmapped(guest, 2 * PAGE, PageSize::Size4K, Wake::Now)?;
    /// assert_eq!(newly, PAGE); // the first page was mapped already
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// [`RangeError`] other than `EEXIST`.
    ///
    /// # Panics
    /// If `len` is not a multiple of `page`.
    pub fn continue_unmapped(
        &self,
        start: Hva,
        len: u64,
        page: PageSize,
        wake: Wake,
    ) -> Result<u64, RangeError> {
        self.fill_over(RangeOp::Continue, start, len, page, wake)
    }

    /// Marks the pages of `len` bytes from `start` as poisoned (Linux 6.6 and later). A thread that
    /// touches one gets SIGBUS with its address, at once and without an event. A system call gets
    /// `EFAULT`, and a vCPU of KVM leaves the guest with SIGBUS pending for its thread.
    ///
    /// The signal's code is `BUS_MCEERR_AR`. For a direct touch, a kernel without
    /// `CONFIG_MEMORY_FAILURE` uses `BUS_ADRERR` instead (x86: `do_sigbus` in
    /// `arch/x86/mm/fault.c`).
    ///
    /// A [`Userfaultfd::continue_range`] or [`Userfaultfd::copy`] over the marker removes it.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::POISON, |uffd| {
    /// # let memory = private(1)?;
    /// # // SAFETY: only this thread touches the pages, after they are present.
    /// # unsafe { uffd.register(memory, PAGE, RegisterMode::MISSING)? };
    /// uffd.poison(memory, PAGE, Wake::Now)?;
    /// uffd.copy(memory, &[7; 4096], Wake::Now)?; // replaces the marker
    /// assert_eq!(read(memory), 7);
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// [`RangeError`]. Among others `EEXIST`: the page at `done` is mapped or marked already.
    pub fn poison(&self, start: Hva, len: u64, wake: Wake) -> Result<(), RangeError> {
        self.fill(RangeOp::Poison, start, len, wake.mode())
    }

    /// Does a [`Userfaultfd::poison`] that skips pages which are mapped or marked already. Returns
    /// the number of bytes that it marked.
    ///
    /// The call also marks a page that was mapped before, if the kernel has dropped that mapping. A
    /// thread that touches the page gets SIGBUS. The thread must look up the page's state, and not
    /// assume that the page is missing.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::POISON, |uffd| {
    /// # let memory = private(2)?;
    /// # // SAFETY: only this thread touches the pages, after they are present.
    /// # unsafe { uffd.register(memory, 2 * PAGE, RegisterMode::MISSING)? };
    /// uffd.copy(memory, &[7; 4096], Wake::Now)?;
    /// let newly = uffd.poison_unmapped(memory, 2 * PAGE, PageSize::Size4K, Wake::Now)?;
    /// assert_eq!(newly, PAGE); // the first page has contents
    /// assert_eq!(read(memory), 7);
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// [`RangeError`] other than `EEXIST`.
    ///
    /// # Panics
    /// If `len` is not a multiple of `page`.
    pub fn poison_unmapped(
        &self,
        start: Hva,
        len: u64,
        page: PageSize,
        wake: Wake,
    ) -> Result<u64, RangeError> {
        self.fill_over(RangeOp::Poison, start, len, page, wake)
    }

    /// Wakes all threads that sleep on faults in `len` bytes from `start`. Each repeats its access.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::empty(), |uffd| {
    /// # let memory = private(1)?;
    /// # // SAFETY: only this thread touches the pages, after they are present.
    /// # unsafe { uffd.register(memory, PAGE, RegisterMode::MISSING)? };
    /// uffd.copy(memory, &[7; 4096], Wake::Later)?;
    /// uffd.wake(memory, PAGE)?; // a thread that slept on the page goes on
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// `EINVAL`: the range is not aligned or is empty.
    pub fn wake(&self, start: Hva, len: u64) -> Result<(), RangeError> {
        sys::wake(
            self,
            UffdioRange {
                start: start.0,
                len,
            },
        )
        .map_err(|errno| RangeError::whole(RangeOp::Wake, start, len, errno))
    }

    /// `UFFDIO_COPY` with the bits of `mode`.
    pub(super) fn copy_with(&self, dst: Hva, bytes: &[u8], mode: u64) -> Result<(), RangeError> {
        let len = bytes.len() as u64;
        advance(RangeOp::Copy, dst, len, self.retries(), |done| {
            let rest = &bytes[done as usize..]; // at most `len`, which came from a usize
            sys::copy(self, dst.0 + done, rest, mode)
        })
    }

    /// A call of the layout of `UFFDIO_ZEROPAGE`, with the bits of `mode`.
    pub(super) fn fill(
        &self,
        op: RangeOp,
        start: Hva,
        len: u64,
        mode: u64,
    ) -> Result<(), RangeError> {
        let call = match op {
            RangeOp::Zeropage => sys::zeropage,
            RangeOp::Continue => sys::continue_range,
            RangeOp::Poison => sys::poison,
            other => unreachable!("{other} does not fill"),
        };
        advance(op, start, len, self.retries(), |done| {
            let mut argument = UffdioFill {
                range: UffdioRange {
                    start: start.0 + done,
                    len: len - done,
                },
                mode,
                done: 0,
            };
            let result = call(self, &mut argument);
            (result, argument.done)
        })
    }

    fn fill_over(
        &self,
        op: RangeOp,
        start: Hva,
        len: u64,
        page: PageSize,
        wake: Wake,
    ) -> Result<u64, RangeError> {
        assert!(
            len.is_multiple_of(page.bytes()),
            "{op}: {len:#x} bytes are no multiple of the page size {:#x}",
            page.bytes()
        );
        let (mut passed, mut there) = (0, 0);
        loop {
            match self.fill(op, Hva(start.0 + passed), len - passed, wake.mode()) {
                Ok(()) => break,
                Err(stop) if stop.is_already_there() => {
                    there += page.bytes();
                    passed += stop.done + page.bytes();
                    if passed == len {
                        break;
                    }
                }
                Err(stop) => {
                    return Err(RangeError {
                        start,
                        len,
                        done: passed + stop.done,
                        ..stop
                    });
                }
            }
        }
        if wake == Wake::Now && there > 0 {
            // The call that mapped the skipped pages may not have woken their sleepers.
            self.wake(start, len)?;
        }
        Ok(len - there)
    }
}
