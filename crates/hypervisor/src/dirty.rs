//! Reading the dirty log. Why nothing is lost is argued in `revoke.rs`.

use crate::error::VmError;
use crate::log::{DirtyBy, DirtyLog, SlotLog};
use crate::region::SlotData;
use crate::revoke::{Worker, Writer};
use crate::slots::Memslots;
use crate::vm::{DirtyProtect, Vm};
use core::sync::atomic::Ordering;
use pageferry_addr::{Gfn, GfnRange};
use pageferry_memslot::Slot;

const BITS: usize = u64::BITS as usize;

impl<M: Memslots> Vm<M> {
    /// Fetches the dirty log of `slot`; gives how many pages it names. Unless [`DirtyProtect`] leaves that to
    /// [`clear_dirty_log`](Self::clear_dirty_log), it clears the log and protects the pages it names again.
    ///
    /// Bit `i` of word `w` is the slot's page `64 * w + i`, as in `KVM_GET_DIRTY_LOG`. When this returns, every
    /// write made before the call is in `into` or was in an earlier log. Where the log was cleared, every vCPU
    /// has lost its right to write the pages in `into` unnoticed; so who copies them now copies what was logged.
    ///
    /// # Errors
    /// If there is no such slot, it has no log, or `into` has another number of words than the log.
    pub fn get_dirty_log(&self, slot: u16, into: &mut [u64]) -> Result<u64, VmError> {
        if self.config().dirty_protect != DirtyProtect::ByGet {
            return self.read_dirty_log(slot, into);
        }
        let mut writer = self.shared.writer();
        let Writer { slots, worker, .. } = &mut *writer;
        let (slot, log) = log_of(slots, slot, into.len())?;
        let mut changed = harvest(slots, worker, slot, log);
        let mut pages = 0;
        worker.deferred(|worker| {
            let _held = slots.exclude();
            for (w, word) in into.iter_mut().enumerate() {
                *word = 0;
                // A load is cheaper than a swap, and most words are 0.
                if log.bits.words()[w].load(Ordering::Relaxed) != 0 {
                    *word = log.bits.take_word(w);
                    if log.by == DirtyBy::WriteProtection {
                        changed += protect(worker, slot, log, w, *word);
                    }
                    pages += u64::from(word.count_ones());
                }
            }
        });
        if pages != 0 && changed == 0 {
            // Who took the permission to store, in an entry that had none now, may not have flushed.
            self.shared.flush_writes();
        }
        Ok(pages)
    }

    /// Copies the dirty log of `slot` and leaves its bits; gives how many pages it names. Beside running vCPUs the copy
    /// may miss pages, but the log does not: the bits stay for the next call.
    ///
    /// # Errors
    /// As [`Vm::get_dirty_log`].
    pub fn read_dirty_log(&self, slot: u16, into: &mut [u64]) -> Result<u64, VmError> {
        let mut writer = self.shared.writer();
        let Writer { slots, worker, .. } = &mut *writer;
        let (slot, log) = log_of(slots, slot, into.len())?;
        harvest(slots, worker, slot, log);
        let mut pages = 0;
        for (word, bits) in into.iter_mut().zip(log.bits.words()) {
            *word = bits.load(Ordering::Acquire);
            pages += u64::from(word.count_ones());
        }
        Ok(pages)
    }

    /// Takes pages out of the dirty log of `slot` and protects them again, so that the next store to each is logged; as
    /// `KVM_CLEAR_DIRTY_LOG`. Bit `i` of word `w` of `clear` is the slot's page `first + 64 * w + i`. Gives how many
    /// of them the log had.
    ///
    /// When this returns, every vCPU has lost its right to write those pages unnoticed: copy them after it. Large pages
    /// that `clear` reaches are split, where [`DirtyProtect::InitiallySet`] has left any.
    ///
    /// # Errors
    /// If there is no such slot, it has no log, `first` is no multiple of 64, or `clear` reaches past the
    /// last word of the log. Nothing has changed then.
    pub fn clear_dirty_log(&self, slot: u16, first: u64, clear: &[u64]) -> Result<u64, VmError> {
        let mut writer = self.shared.writer();
        let Writer { slots, worker, .. } = &mut *writer;
        let id = slot;
        let (slot, log) = find_log(slots, id)?;
        let words = log.bits.words();
        let from = usize::try_from(first).unwrap_or(usize::MAX) / BITS;
        let reaches = from.checked_add(clear.len());
        if !first.is_multiple_of(BITS as u64) || reaches.is_none_or(|end| end > words.len()) {
            return Err(VmError::DirtyLogPart {
                slot: id,
                first,
                words: clear.len(),
                log: words.len(),
            });
        }
        let (mut pages, mut changed) = (0, 0);
        let splits = self.config().dirty_protect == DirtyProtect::InitiallySet;
        worker.deferred(|worker| {
            let _held = slots.exclude();
            let pages_left = slot.range.pages().saturating_sub(first);
            let reached = pages_left.min((clear.len() * BITS) as u64);
            if splits
                && let Some(part) = slot
                    .range
                    .start()
                    .checked_add(first)
                    .and_then(|first| GfnRange::new(first, reached))
            {
                // What was large when the log began is so still. A dirty bit is to speak of one page.
                let Ok(_) = worker.split(part, 1, &()) else {
                    unreachable!("the platform aborts where there is no memory");
                };
            }
            for (w, mask) in (from..).zip(clear) {
                if mask & words[w].load(Ordering::Relaxed) != 0 {
                    // First the bits, then the protection: see `revoke.rs`.
                    let taken = mask & words[w].fetch_and(!mask, Ordering::AcqRel);
                    changed += protect(worker, slot, log, w, taken);
                    pages += u64::from(taken.count_ones());
                }
            }
        });
        if pages != 0 && changed == 0 {
            self.shared.flush_writes();
        }
        Ok(pages)
    }

    /// Protects the pages again that were harvested from the vCPUs' dirty rings, and makes room for others; gives how
    /// many those were. As `KVM_RESET_DIRTY_RINGS`.
    ///
    /// When this returns, every vCPU has lost its right to write those pages unnoticed: copy them after it. Pages of slots
    /// that have gone, moved, or shrunk meanwhile are passed over.
    pub fn reset_dirty_rings(&self) -> u64 {
        let mut writer = self.shared.writer();
        let Writer {
            slots,
            worker,
            rings,
            ..
        } = &mut *writer;
        let (mut pages, mut changed) = (0, 0);
        worker.deferred(|worker| {
            let _held = slots.exclude();
            for ring in rings {
                let reset = ring.reset(|slot, offset, mask| {
                    let slot = u16::try_from(slot).ok().and_then(|id| slots.by_id(id));
                    if let Some(slot) = slot
                        && offset < slot.range.pages()
                    {
                        let left = slot.range.pages() - offset;
                        let inside = if left < 64 { (1 << left) - 1 } else { u64::MAX };
                        let base = Gfn(slot.range.start().0 + offset);
                        changed += worker.log_by_fault_mask(base, mask & inside, &());
                    }
                });
                pages += u64::from(reset);
            }
        });
        if pages != 0 && changed == 0 {
            self.shared.flush_writes();
        }
        pages
    }
}

/// Brings what the entries know into the log, and flushes where that is anything; gives how many pages that were.
fn harvest<M: Memslots>(
    slots: &M,
    worker: &mut Worker,
    slot: &Slot<SlotData>,
    log: &DirtyLog,
) -> u64 {
    match log.by {
        DirtyBy::Bits => worker.deferred(|worker| {
            let _held = slots.exclude();
            worker.clear_dirty(slot.range, &SlotLog::of(slot))
        }),
        DirtyBy::WriteProtection => 0,
    }
}

/// Makes the next store to each of 64 pages tell, where `taken`, from the log, has its bit; gives how many pages' entries
/// changed. No large page is there.
fn protect(
    worker: &mut Worker,
    slot: &Slot<SlotData>,
    log: &DirtyLog,
    word: usize,
    taken: u64,
) -> u64 {
    let base = Gfn(slot.range.start().0 + (word * BITS) as u64);
    match log.by {
        DirtyBy::WriteProtection => worker.log_by_fault_mask(base, taken, &()),
        // Stores that the bits tell of come before the flush, and the caller copies the pages after it.
        DirtyBy::Bits => worker.clear_dirty_mask(base, taken, &()),
    }
}

fn find_log<M: Memslots>(slots: &M, id: u16) -> Result<(&Slot<SlotData>, &DirtyLog), VmError> {
    let slot = slots.by_id(id).ok_or(VmError::NoSuchSlot(id))?;
    let log = slot.data.dirty.as_ref().ok_or(VmError::NoDirtyLog(id))?;
    Ok((slot, log))
}

fn log_of<M: Memslots>(
    slots: &M,
    id: u16,
    words: usize,
) -> Result<(&Slot<SlotData>, &DirtyLog), VmError> {
    let (slot, log) = find_log(slots, id)?;
    let needed = log.bits.pages().div_ceil(BITS);
    if words != needed {
        return Err(VmError::DirtyLogSize {
            slot: id,
            needed,
            given: words,
        });
    }
    Ok((slot, log))
}
