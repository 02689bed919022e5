//! The kernel's part in the delivery of faults, as this module uses it.
//!
//! [`Watch`](super::watch::Watch) is the kernel itself. The model of the fault path has one of its
//! own (`model`). All calls are on the guest's mapping of pages of RAM. An entry of its page table
//! is empty, a marker, or maps the page of the page cache. A [`RangeError`] counts the bytes done
//! from the first of the pages.

use crate::MachineError;
use pageferry_addr::{PageSize, RamPage};
use pageferry_userfault::uffd::{RangeError, Wake};
use std::ops::Range;

/// The calls on the guest's mapping.
pub(in crate::kvm::x86) trait Kernel {
    /// Maps pages of the page cache at empty entries and over markers, and skips mapped pages.
    /// With [`Wake::Now`] it wakes the sleepers of all these pages, unless it stops half-way.
    fn continue_unmapped(
        &self,
        first: RamPage,
        pages: u64,
        size: PageSize,
        wake: Wake,
    ) -> Result<(), RangeError>;

    /// Fills holes of the page cache with zeros and maps them.
    fn zeropage(&self, first: RamPage, pages: u64, wake: Wake) -> Result<(), RangeError>;

    /// Fills a hole of the page cache with the bytes of a page, and maps it.
    fn copy(&self, page: RamPage, bytes: &[u8], wake: Wake) -> Result<(), RangeError>;

    /// Sets markers at empty entries, and skips others.
    fn poison_unmapped(
        &self,
        first: RamPage,
        pages: u64,
        size: PageSize,
        wake: Wake,
    ) -> Result<(), RangeError>;

    /// Wakes the threads that sleep on pages.
    fn wake(&self, first: RamPage, pages: u64) -> Result<(), RangeError>;

    /// Registers private memory, which pre-copy filled through the same mapping. Other memory is
    /// registered from the start.
    fn register_private(&self) -> Result<(), MachineError>;

    /// Ends the registration of all of RAM, and wakes all sleepers. Markers stay.
    fn unregister(&self) -> Result<(), RangeError>;

    /// Empties entries. The pages stay in the page cache with their bytes. Markers go.
    fn drop_mappings(&self, first: RamPage, pages: u64) -> Result<(), MachineError>;

    /// Whether each of these pages has a marker, or `None` if that cannot be told.
    fn markers(&self, pages: Range<u64>) -> Result<Option<Vec<bool>>, MachineError>;

    /// Maps a page as a touch does, where nothing is registered.
    fn populate(&self, page: RamPage) -> Result<(), MachineError>;
}
