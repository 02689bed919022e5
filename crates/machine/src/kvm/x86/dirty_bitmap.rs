//! The dirty log by bitmap: one bit for each page of a slot.
//!
//! A harvest copies all bits, also those of clean pages: 32 KiB for each GiB of RAM.
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

use super::sys;
use crate::{MachineError, RamRegion};
use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, kvm_enable_cap,
};
use kvm_ioctls::VmFd;
use pageferry_userfault::PageBitmap;

/// The maximum words of one CLEAR: 64 Ki pages. It holds the MMU lock all the while.
const CLEAR_WORDS: usize = 1024;

/// The log of one VM.
pub(super) struct Bitmap {
    /// GET does not clear.
    manual: bool,
    /// The kernel's bitmap of a slot, kept for reuse.
    words: Vec<u64>,
}

impl Bitmap {
    /// Chooses that GET does not clear, where KVM has the choice.
    pub(super) fn enable(vm: &VmFd) -> Self {
        let offers = vm.check_extension_raw(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.into());
        // Bit 0 of the answer: GET does not clear the log, a second ioctl does. "Initially set" is
        // not used: every page would be dirty after the first harvest.
        let manual = offers & KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE as i32 != 0
            && vm
                .enable_cap(&kvm_enable_cap {
                    cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
                    args: [KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE.into(), 0, 0, 0],
                    ..Default::default()
                })
                .is_ok();
        Self {
            manual,
            words: Vec::new(),
        }
    }

    /// Adds the bits of all regions to `dirty`, and re-arms the log if `rearm`. Returns the number
    /// of pages that were not in `dirty`.
    pub(super) fn harvest(
        &mut self,
        vm: &VmFd,
        regions: &[RamRegion],
        dirty: &PageBitmap,
        rearm: bool,
    ) -> Result<usize, MachineError> {
        let words = &mut self.words;
        let mut newly = 0;
        for region in regions {
            let of_region = region.words();
            // The kernel writes all of it. Zeroing it before would lengthen the blackout.
            words.resize(of_region.len(), 0);
            sys::get_dirty_log(vm, region.slot, region.pages, words)
                .map_err(|e| MachineError::os("cannot read the dirty log", e))?;
            for (index, word) in of_region.zip(&*words).filter(|(_, word)| **word != 0) {
                newly += dirty.or_word(index, *word).count_ones() as usize;
            }
            if rearm && self.manual {
                clear_found(vm, region, words)?;
            }
        }
        Ok(newly)
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
