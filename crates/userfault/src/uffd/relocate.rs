//! `UFFDIO_MOVE`: pages that go from one address to another without a copy.
#![expect(unsafe_code, reason = "moving takes pages away from their old address")]

use super::abi::{self, UffdioCopy};
use super::fd::Userfaultfd;
use super::fill::Wake;
use super::range_error::{RangeError, RangeOp};
use super::retry::advance;
use super::sys;
use pageferry_addr::Hva;

/// The treatment of source pages that [`Userfaultfd::move_pages`] finds empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SourceHoles {
    /// The call stops there (`ENOENT`).
    Refuse,
    /// The call counts the page as moved. The destination page stays missing, and a thread that
    /// sleeps there faults again.
    Skip,
}

impl Userfaultfd {
    /// Moves the pages of `len` bytes from `src` to the missing pages from `dst` (Linux 6.8 and
    /// later). The kernel changes page tables and copies no bytes. Each page appears atomically.
    ///
    /// All three must be multiples of the page size, and `len` must not be 0. Source and
    /// destination are private anonymous memory of this process, each in one writable mapping, with
    /// the same protection. The destination must be registered with this userfaultfd.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::MOVE, |uffd| {
    /// # let memory = private(2)?;
    /// # // SAFETY: only this thread touches the pages, after they are present.
    /// # unsafe { uffd.register(memory, 2 * PAGE, RegisterMode::MISSING)? };
    /// # let staging = private(2)?;
    /// write(staging, 7);
    /// write(Hva(staging.0 + PAGE), 8);
    /// // SAFETY: `staging` is ours, and no reference into it exists.
    /// unsafe { uffd.move_pages(memory, staging, 2 * PAGE, SourceHoles::Refuse, Wake::Now)? };
    /// assert_eq!(read(memory), 7);
    /// assert_eq!(read(staging), 0); // the source is empty now
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// [`RangeError`], whose `start` is `dst`. The pages before `done` are moved and stay moved.
    ///
    /// - `ENOENT`: the source page at `done` is a hole and [`SourceHoles::Refuse`] was given. Or
    ///   one of the ranges is not mapped.
    /// - `EEXIST`: the destination page at `done` has contents.
    /// - `EBUSY`: the source page at `done` is pinned (by I/O, say), or another process shares it
    ///   since a fork. `MADV_DONTFORK` on the source prevents the second cause.
    /// - `EINVAL`: a range is not aligned or is empty, the mappings are not as above, or the
    ///   userfaultfd is another process's.
    /// - `EAGAIN`: an event of changed mappings waits to be read ([`RangeError::is_changing`]).
    /// - `EFAULT`: the source page at `done` has a marker or a memory error.
    /// - `ENOMEM`: no memory is free for page tables.
    ///
    /// # Safety
    /// 1. The caller owns the mapping of the source. The pages that the call moves are empty
    ///    afterwards: they read as zero, or fault if they are registered. So no Rust reference to
    ///    them may exist during the call. No code may rely on their contents later, such as an
    ///    allocator or the owner of a value in them.
    /// 2. If the source is registered for missing faults, a later touch of it sleeps. The program
    ///    must allow for that, as in (1) of [`Userfaultfd::register`].
    pub unsafe fn move_pages(
        &self,
        dst: Hva,
        src: Hva,
        len: u64,
        holes: SourceHoles,
        wake: Wake,
    ) -> Result<(), RangeError> {
        let holes = match holes {
            SourceHoles::Refuse => 0,
            SourceHoles::Skip => abi::MOVE_MODE_ALLOW_SRC_HOLES,
        };
        advance(RangeOp::Move, dst, len, self.retries(), |done| {
            let mut argument = UffdioCopy {
                dst: dst.0 + done,
                src: src.0 + done,
                len: len - done,
                mode: wake.mode() | holes,
                done: 0,
            };
            // SAFETY: the contract is this function's own. `done` bytes were moved before.
            let result = unsafe { sys::move_pages(self, &mut argument) };
            (result, argument.done)
        })
    }
}
