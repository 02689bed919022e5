//! Reading the dirty log. `revoke.rs` proves that no write is lost.

use crate::config::DirtyProtect;
use crate::dirty_log::{DirtyBy, DirtyLog};
use crate::error::VmError;
use crate::log::SlotLog;
use crate::platform::Worker;
use crate::region::SlotData;
use crate::slots::Memslots;
use crate::state::Writer;
use crate::vm::Vm;
use pageferry_addr::{Gfn, GfnRange};
use pageferry_memslot::Slot;

const BITS: usize = u64::BITS as usize;

impl<M: Memslots> Vm<M> {
    /// Fetches the dirty log of `slot`. Returns the number of pages in it. The call clears the log
    /// and protects those pages again, unless [`DirtyProtect`] leaves that to
    /// [`clear_dirty_log`](Self::clear_dirty_log).
    ///
    /// Bit `i` of word `w` is the slot's page `64 * w + i`, as in `KVM_GET_DIRTY_LOG`. When the
    /// call returns, every write made before it is in `into`, or was in an earlier log. If the call
    /// cleared the log, every later write to a page in `into` is logged again. So the caller can
    /// copy those pages now.
    ///
    /// # Errors
    /// If there is no such slot, it has no log, or the length of `into` differs from the log's.
    pub fn get_dirty_log(&self, slot: u16, into: &mut [u64]) -> Result<u64, VmError> {
        if self.config().dirty_protect != DirtyProtect::ByGet {
            return self.read_dirty_log(slot, into);
        }
        let mut writer = self.changes.lock();
        let Writer { slots, worker, .. } = &mut *writer;
        let (slot, log) = log_of(slots, slot, into.len())?;
        let mut changed = harvest(slots, worker, slot, log);
        let mut pages = 0;
        worker.deferred(|worker| {
            let _held = slots.exclude();
            for (w, word) in into.iter_mut().enumerate() {
                *word = 0;
                // A load is cheaper than a swap, and most words are 0.
                if log.bits.word(w) != 0 {
                    *word = log.bits.take_word(w, u64::MAX);
                    if log.by == DirtyBy::WriteProtection {
                        changed += protect(worker, slot, log, w, *word);
                    }
                    pages += u64::from(word.count_ones());
                }
            }
        });
        if pages != 0 && changed == 0 {
            // Every entry had lost its write permission before. The call that took it may not have
            // flushed.
            self.state.flush_writes();
        }
        Ok(pages)
    }

    /// Copies the dirty log of `slot` and leaves its bits. Returns the number of pages in it.
    ///
    /// While vCPUs run, the copy may miss pages. The log does not: its bits stay for the next call.
    ///
    /// # Errors
    /// The same as [`Vm::get_dirty_log`].
    pub fn read_dirty_log(&self, slot: u16, into: &mut [u64]) -> Result<u64, VmError> {
        let mut writer = self.changes.lock();
        let Writer { slots, worker, .. } = &mut *writer;
        let (slot, log) = log_of(slots, slot, into.len())?;
        harvest(slots, worker, slot, log);
        let mut pages = 0;
        for (w, word) in into.iter_mut().enumerate() {
            *word = log.bits.word(w);
            pages += u64::from(word.count_ones());
        }
        Ok(pages)
    }

    /// Calls `found` with the words of the dirty log of `slot` that are not 0, and their indices,
    /// in ascending order. It leaves the bits. It costs little where no page is dirty, unlike
    /// [`Vm::read_dirty_log`], and misses pages as that does.
    ///
    /// # Errors
    /// If there is no such slot, or it has no log.
    pub fn visit_dirty_log(
        &self,
        slot: u16,
        mut found: impl FnMut(usize, u64),
    ) -> Result<(), VmError> {
        let mut writer = self.changes.lock();
        let Writer { slots, worker, .. } = &mut *writer;
        let (slot, log) = find_log(slots, slot)?;
        harvest(slots, worker, slot, log);
        let mut at = 0;
        while let Some(page) = log.bits.next_set(at) {
            let word = page / BITS;
            found(word, log.bits.word(word));
            at = (word + 1) * BITS;
        }
        Ok(())
    }

    /// Takes pages out of the dirty log of `slot`, and protects them so that the next store to each
    /// is logged. This is `KVM_CLEAR_DIRTY_LOG`. Bit `i` of word `w` of `clear` is the slot's page
    /// `first + 64 * w + i`. Returns the number of those pages that were in the log.
    ///
    /// When the call returns, every later write to those pages is logged: copy them after it. It
    /// splits large pages that `clear` reaches, where [`DirtyProtect::InitiallySet`] has left any.
    ///
    /// # Errors
    /// - If there is no such slot, or it has no log.
    /// - If `first` is not a multiple of 64, or `clear` reaches past the last word of the log.
    ///
    /// Nothing has changed then.
    pub fn clear_dirty_log(&self, slot: u16, first: u64, clear: &[u64]) -> Result<u64, VmError> {
        let mut writer = self.changes.lock();
        let Writer { slots, worker, .. } = &mut *writer;
        let id = slot;
        let (slot, log) = find_log(slots, id)?;
        let words = log.bits.pages().div_ceil(BITS);
        let from = usize::try_from(first).unwrap_or(usize::MAX) / BITS;
        let reaches = from.checked_add(clear.len());
        if !first.is_multiple_of(BITS as u64) || reaches.is_none_or(|end| end > words) {
            return Err(VmError::DirtyLogPart {
                slot: id,
                first,
                words: clear.len(),
                log: words,
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
                // Pages that were large when the log began still are. A dirty bit must stand for
                // one page.
                let Ok(_) = worker.split(part, 1, &()) else {
                    unreachable!("the platform aborts where there is no memory");
                };
            }
            for (w, mask) in (from..).zip(clear) {
                if mask & log.bits.word(w) != 0 {
                    // The bits come before the protection; see `revoke.rs`.
                    let taken = log.bits.take_word(w, *mask);
                    changed += protect(worker, slot, log, w, taken);
                    pages += u64::from(taken.count_ones());
                }
            }
        });
        if pages != 0 && changed == 0 {
            self.state.flush_writes();
        }
        Ok(pages)
    }

    /// Protects the pages that were harvested from the vCPUs' dirty rings, and frees their entries
    /// in the rings. This is `KVM_RESET_DIRTY_RINGS`. Returns the number of those pages.
    ///
    /// When the call returns, every later write to those pages is logged: copy them after it. It
    /// skips pages whose slot no longer has them.
    pub fn reset_dirty_rings(&self) -> u64 {
        let mut writer = self.changes.lock();
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
            self.state.flush_writes();
        }
        pages
    }
}

/// Moves the entries' dirty bits to the log, and flushes if there were any. Returns their number.
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

/// Makes the tables log the next store to each page of `taken`, a word from the log. Returns the
/// number of changed entries. There must be no large page.
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
        // The stores that the bits report come before the flush. The caller copies the pages after
        // the flush.
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
