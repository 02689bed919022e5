//! What an implementation of [`Machine`](crate::Machine) needs of its memory.
//!
//! **Guarantee.** A machine that is built from these calls keeps the VMM's accesses right: they get
//! in only when the pages have their final bytes, and each write is in a harvest.
//!
//! **Mechanism.** [`GuestRam::arm`] and [`GuestRam::begin`] close and open the `gate`.
//! [`GuestRam::harvest_writes`] reads the log of the VMM's writes (`written`). The pages that vCPUs
//! write are no part of it, unless they use the accessor too.
//!
//! **Neighbours.** The soft engine is built from these calls, and KVM from the parts behind them.

use crate::{ArmOptions, GuestRam, MachineError};
use pageferry_addr::RamPage;
use pageferry_userfault::PageBitmap;
use std::sync::Arc;

impl GuestRam {
    /// Does the part of [`Machine::arm_userfault`](crate::Machine::arm_userfault) that concerns the
    /// VMM's accesses: they are refused until [`GuestRam::begin`], and from then on find missing
    /// pages by `missing`. `arm` arms the engine meanwhile, when no access is under way.
    ///
    /// # Errors
    /// As [`ArmOptions::check`]. When `missing` has not one bit for each page, the memory was armed
    /// before, or a device holds on to it for longer than a second. Or the error of `arm`, after
    /// which the memory is not armed.
    pub fn arm(
        &self,
        missing: &Arc<PageBitmap>,
        options: &ArmOptions,
        arm: impl FnOnce() -> Result<(), MachineError>,
    ) -> Result<(), MachineError> {
        options.check(self.pages(), self.backing())?;
        self.check_bits(missing)?;
        self.gate.arm(missing, arm)
    }

    /// Whether the memory was armed.
    #[must_use]
    pub fn is_armed(&self) -> bool {
        self.gate.missing().is_some()
    }

    /// The missing pages, once the memory was armed.
    #[must_use]
    pub fn missing(&self) -> Option<&PageBitmap> {
        self.gate.missing()
    }

    /// Lets the VMM's accesses in again: every page whose missing bit is clear has its final bytes.
    pub fn begin(&self) {
        self.gate.begin();
    }

    /// Checks that all pages have their final bytes, so that the VM may move on.
    ///
    /// # Errors
    /// When a migration to here has begun, and has not brought every page.
    pub fn check_whole(&self) -> Result<(), MachineError> {
        let here = self.try_read(RamPage(0), &mut []).is_ok();
        let missing = self.gate.missing().and_then(|missing| missing.next_set(0));
        if here && missing.is_none() {
            return Ok(());
        }
        Err(MachineError::WrongState(
            "pages of this VM are missing: wait until the migration that brings them is complete",
        ))
    }

    /// Does [`GuestRam::begin`], when no page is missing any more.
    ///
    /// # Errors
    /// When the memory is not armed, or a page is missing.
    pub fn disarm(&self) -> Result<(), MachineError> {
        let Some(missing) = self.gate.missing() else {
            return Err(MachineError::WrongState("userfault is not armed"));
        };
        if missing.next_set(0).is_some() {
            return Err(MachineError::WrongState("pages are still missing"));
        }
        self.begin();
        Ok(())
    }

    /// Forgets the VMM's earlier writes, when a dirty log begins.
    pub fn forget_writes(&self) {
        self.written.clear();
    }

    /// Adds the pages that the VMM wrote to `dirty`. Takes them out of the log if `rearm`, as
    /// [`Machine::harvest_dirty`](crate::Machine::harvest_dirty) says. Returns the number of pages
    /// that were not in `dirty`.
    ///
    /// # Errors
    /// When `dirty` has not one bit for each page.
    pub fn harvest_writes(&self, dirty: &PageBitmap, rearm: bool) -> Result<usize, MachineError> {
        self.check_bits(dirty)?;
        Ok(self.written.harvest(dirty, rearm))
    }

    fn check_bits(&self, bitmap: &PageBitmap) -> Result<(), MachineError> {
        if bitmap.pages() as u64 == self.pages() {
            return Ok(());
        }
        Err(MachineError::WrongState(
            "the bitmap has not one bit for each page of RAM",
        ))
    }
}
