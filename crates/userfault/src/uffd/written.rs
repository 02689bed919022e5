//! [`WrittenPages`]: the pages that were written since they were protected.
//!
//! **Guarantee.** No write is lost: a page is reported and protected again in one step. A write
//! after that is reported by the next call.
//!
//! **Mechanism.** `PAGEMAP_SCAN` of `/proc/self/pagemap` (Linux 6.7 and later,
//! `Documentation/admin-guide/mm/pagemap.rst`), for ranges with asynchronous write protection.

use super::abi::{self, PageRegion, PmScanArg};
use super::range_error::{RangeError, RangeOp};
use super::sys;
use pageferry_addr::Hva;
use rustix::io::Errno;
use std::fs::File;
use std::io;

/// The number of runs of pages that one system call reports.
const REGIONS: usize = 64;

/// Reads which pages of this process were written, where
/// [`Features::WP_ASYNC`](super::Features::WP_ASYNC) records it.
#[derive(Debug)]
pub struct WrittenPages {
    pagemap: File,
}

impl WrittenPages {
    /// Opens `/proc/self/pagemap`.
    ///
    /// # Errors
    /// The error of opening it.
    pub fn open() -> io::Result<Self> {
        File::open("/proc/self/pagemap").map(|pagemap| Self { pagemap })
    }

    /// Reports the pages of `len` bytes from `start` that were written since they were protected,
    /// and protects them again. `each` gets the address and the length in bytes of each run of
    /// pages, in ascending order.
    ///
    /// The range is registered with [`RegisterMode::WP`](super::RegisterMode), by a userfaultfd
    /// with [`Features::WP_ASYNC`](super::Features::WP_ASYNC). The first round begins with
    /// [`Userfaultfd::write_protect`](super::Userfaultfd::write_protect) of the whole range. Until
    /// then a page that was never written may be reported too. Unmapped parts are skipped.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::WP_ASYNC, |uffd| {
    /// # let memory = private(8)?;
    /// // SAFETY: no touch of these pages sleeps, as they are registered for WP_ASYNC only.
    /// unsafe { uffd.register(memory, 8 * PAGE, RegisterMode::WP)? };
    /// uffd.write_protect(memory, 8 * PAGE)?;
    /// write(Hva(memory.0 + 3 * PAGE), 7);
    /// write(Hva(memory.0 + 4 * PAGE), 7);
    ///
    /// let mut written = Vec::new();
    /// let pages = WrittenPages::open()?;
    /// pages.take(memory, 8 * PAGE, |start, len| written.push((start.0 - memory.0, len)))?;
    /// assert_eq!(written, [(3 * PAGE, 2 * PAGE)]);
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// [`RangeError`]. The pages before `done` were reported and are protected. Those of the runs
    /// that `each` got are protected too. Among others `EPERM`: a mapping of the range is not
    /// registered as above. `EINVAL`: `start` is not aligned, or the range has huge pages other
    /// than of 2 MiB. `ENOTTY`: the kernel is older.
    pub fn take(
        &self,
        start: Hva,
        len: u64,
        mut each: impl FnMut(Hva, u64),
    ) -> Result<(), RangeError> {
        let mut done = 0;
        while done < len {
            let mut regions = [PageRegion::default(); REGIONS];
            let mut argument = PmScanArg {
                flags: abi::PM_SCAN_WP_MATCHING | abi::PM_SCAN_CHECK_WPASYNC,
                start: start.0 + done,
                end: start.0.saturating_add(len),
                category_mask: abi::PAGE_IS_WRITTEN,
                return_mask: abi::PAGE_IS_WRITTEN,
                ..PmScanArg::default()
            };
            let result = sys::pagemap_scan(&self.pagemap, &mut argument, &mut regions);
            // A call that fails may have reported pages too. Regions behind these are empty.
            for region in regions
                .iter()
                .take_while(|region| region.end > region.start)
            {
                each(Hva(region.start), region.end - region.start);
            }
            let walked = argument.walk_end.saturating_sub(start.0);
            let errno = match result {
                Ok(()) if walked > done => {
                    done = walked;
                    continue;
                }
                // The kernel stands still at a huge page that it cannot protect as a whole.
                Ok(()) => Errno::INVAL,
                Err(errno) => errno,
            };
            return Err(RangeError {
                op: RangeOp::Scan,
                start,
                len,
                done,
                errno,
            });
        }
        Ok(())
    }
}
