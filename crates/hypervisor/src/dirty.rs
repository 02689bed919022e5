//! Reading the dirty log. Why nothing is lost is argued in `revoke.rs`.

use crate::error::VmError;
use crate::gate::Requests;
use crate::region::SlotData;
use crate::slots::Memslots;
use crate::vm::Vm;
use pageferry_addr::Gfn;
use pageferry_memslot::Slot;
use pageferry_userfault::PageBitmap;
use std::sync::Arc;

const BITS: usize = u64::BITS as usize;

impl<M: Memslots> Vm<M> {
    /// Fetches and clears the dirty log of `slot`, and protects the pages it names again; gives how many those are.
    ///
    /// Bit `i` of word `w` is the slot's page `64 * w + i`, as in `KVM_GET_DIRTY_LOG`. When this returns, every
    /// write made before the call is in `into` or was in an earlier log, and every vCPU has lost its right to
    /// write the pages in `into`; so who copies them now copies what was logged.
    ///
    /// # Errors
    /// If there is no such slot, it has no log, or `into` has another number of words than the log.
    pub fn get_dirty_log(&self, slot: u16, into: &mut [u64]) -> Result<u64, VmError> {
        let writer = self.shared.writer();
        let (slot, dirty) = log_of(&writer.slots, slot, into.len())?;
        let mut pages = 0;
        for (w, word) in into.iter_mut().enumerate() {
            *word = 0;
            // A load is cheaper than a swap, and most words are 0.
            if dirty.words()[w].load(core::sync::atomic::Ordering::Relaxed) != 0 {
                *word = dirty.take_word(w);
                let base = Gfn(slot.range.start().0 + (w * BITS) as u64);
                self.shared.tables.write_protect_mask(base, *word);
                pages += u64::from(word.count_ones());
            }
        }
        if pages != 0 {
            writer.vcpus.request(Requests::FLUSH_WRITES);
        }
        Ok(pages)
    }

    /// Copies the dirty log of `slot` and changes nothing; gives how many pages it names. For a VM whose vCPUs are
    /// all outside their guests: there is nothing to protect and nobody to flush. Beside running vCPUs the copy
    /// may miss pages, but the log does not: the bits stay for the next [`Vm::get_dirty_log`].
    ///
    /// # Errors
    /// As [`Vm::get_dirty_log`].
    pub fn read_dirty_log(&self, slot: u16, into: &mut [u64]) -> Result<u64, VmError> {
        let writer = self.shared.writer();
        let (_, dirty) = log_of(&writer.slots, slot, into.len())?;
        let mut pages = 0;
        for (word, bits) in into.iter_mut().zip(dirty.words()) {
            *word = bits.load(core::sync::atomic::Ordering::Acquire);
            pages += u64::from(word.count_ones());
        }
        Ok(pages)
    }
}

fn log_of<M: Memslots>(
    slots: &M,
    id: u16,
    words: usize,
) -> Result<(&Slot<SlotData>, &Arc<PageBitmap>), VmError> {
    let slot = slots.by_id(id).ok_or(VmError::NoSuchSlot(id))?;
    let dirty = slot.data.dirty.as_ref().ok_or(VmError::NoDirtyLog(id))?;
    let needed = dirty.pages().div_ceil(BITS);
    if words != needed {
        return Err(VmError::DirtyLogSize {
            slot: id,
            needed,
            given: words,
        });
    }
    Ok((slot, dirty))
}
