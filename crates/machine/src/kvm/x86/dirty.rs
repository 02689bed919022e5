//! The dirty log: the pages that vCPUs wrote since the last harvest.
//!
//! While a slot has a log, KVM write-protects its pages. The first write to a page faults, sets its
//! bit and lifts the protection. A *harvest* reads the bits. To re-arm, it also clears them and
//! protects the pages again.
//!
//! **The guest's page tables are in the log too**, on every host. Under shadow paging KVM sets
//! their accessed and dirty bits for the guest. Under NPT, and under EPT with accessed and dirty
//! bits, the CPU's page walks count as writes, even if there is no bit left to set (AMD64 APM
//! volume 2, "Nested Paging"; Intel SDM volume 3, "Accessed and Dirty Flags for EPT").
//!
//! **Nothing is lost.** With `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`:
//! 1. GET only copies the bitmap.
//! 2. CLEAR takes the bits *that it is given* out of the log, protects those pages, and flushes
//!    TLBs before it returns (`kvm_clear_dirty_log_protect` in `virt/kvm/kvm_main.c`).
//! 3. CLEAR is given exactly the bits that GET found. So a bit that appears between the two stays
//!    for the next harvest.
//! 4. A page that is found, and written again before CLEAR has flushed, is not logged a second
//!    time. It need not be, since it is in *this* harvest. The caller reads its bytes only after
//!    the harvest has returned, so after that write.
//! 5. A write after the flush faults, and sets the bit again.
//! 6. Bits are added to the caller's bitmap before they are cleared, so an error in between loses
//!    none.
//!
//! Without the capability, GET itself clears, protects and flushes. The same argument holds.
//!
//! Without re-arming, a harvest is GET alone: on a paused VM it copies the bitmap. The bits stay in
//! the log. If the VM resumes nevertheless, the next harvest reports them again. That is too much,
//! never too little.

use super::slots::Slots;
use super::sync::{AtomicBool, Ordering};
use super::sys;
use crate::{GuestRam, MachineError, RamRegion};
use kvm_ioctls::VmFd;
use pageferry_userfault::PageBitmap;
use std::sync::{Arc, Mutex, PoisonError};

/// The maximum words of one CLEAR: 64 Ki pages. It holds the MMU lock all the while.
const CLEAR_WORDS: usize = 1024;

/// The log of one VM.
pub(super) struct DirtyLog {
    /// GET does not clear.
    manual: bool,
    on: AtomicBool,
    /// The kernel's bitmap of a slot, kept for reuse. Its lock also serializes switches and
    /// harvests.
    words: Mutex<Vec<u64>>,
}

impl DirtyLog {
    pub(super) fn new(manual: bool) -> Self {
        Self {
            manual,
            on: AtomicBool::new(false),
            words: Mutex::new(Vec::new()),
        }
    }

    /// Starts or stops the log. KVM protects all pages and flushes before it returns.
    pub(super) fn switch(
        &self,
        vm: &VmFd,
        slots: &Slots,
        ram: &Arc<GuestRam>,
        on: bool,
    ) -> Result<(), MachineError> {
        let _turn = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        if self.on.load(Ordering::Acquire) == on {
            return Ok(());
        }
        for region in ram.layout().regions() {
            slots.set_log(vm, region, on)?;
        }
        ram.written.clear();
        self.on.store(on, Ordering::Release);
        Ok(())
    }

    /// See [`crate::Machine::harvest_dirty`].
    pub(super) fn harvest(
        &self,
        vm: &VmFd,
        ram: &GuestRam,
        dirty: &PageBitmap,
        rearm: bool,
    ) -> Result<usize, MachineError> {
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.on.load(Ordering::Acquire) {
            return Err(MachineError::WrongState("the dirty log is not on"));
        }
        if dirty.pages() as u64 != ram.pages() {
            return Err(MachineError::WrongState(
                "the bitmap is not of the machine's size",
            ));
        }
        let mut newly = 0;
        for region in ram.layout().regions() {
            let of_region = region.words();
            // The kernel writes all of it. Zeroing it before would lengthen the blackout.
            words.resize(of_region.len(), 0);
            sys::get_dirty_log(vm, region.slot, region.pages, &mut words)
                .map_err(|e| MachineError::os("cannot read the dirty log", e))?;
            for (index, word) in of_region.zip(&*words).filter(|(_, word)| **word != 0) {
                newly += dirty.or_word(index, *word).count_ones() as usize;
            }
            if rearm && self.manual {
                clear_found(vm, region, &words)?;
            }
        }
        Ok(newly + ram.written.harvest(dirty, rearm))
    }
}

/// Clears the bits of `words` in the kernel's log. Each CLEAR covers a piece that begins and ends
/// with a set bit.
fn clear_found(vm: &VmFd, region: &RamRegion, words: &[u64]) -> Result<(), MachineError> {
    for (chunk_index, chunk) in words.chunks(CLEAR_WORDS).enumerate() {
        let Some(start) = chunk.iter().position(|word| *word != 0) else {
            continue;
        };
        let end = chunk
            .iter()
            .rposition(|word| *word != 0)
            .map_or(start, |last| last + 1);
        // Whole words, except the slot's last: the kernel wants a multiple of 64 pages or the
        // slot's end.
        let first = ((chunk_index * CLEAR_WORDS + start) * 64) as u64;
        let pages = ((end - start) as u64 * 64).min(region.pages - first);
        sys::clear_dirty_log(vm, region.slot, first, pages as u32, &chunk[start..end])
            .map_err(|e| MachineError::os("cannot re-arm the dirty log", e))?;
    }
    Ok(())
}
