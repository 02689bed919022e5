//! The rules a request must obey, for any structure that keeps slots.
//!
//! Source: `kvm_set_memory_region` and `check_memory_region_flags` in Linux's
//! `virt/kvm/kvm_main.c`, and the KVM Userfault series for the flag `USERFAULT` and its bitmap. If
//! a request breaks several rules, the order of the checks gives the kernel's answer, `EINVAL` or
//! `EEXIST`.
//!
//! Two differences:
//! - The rules for the bitmap are stricter than in the series. A request must give one, in whole
//!   words, and cannot change it while the flag stays. The series ignores or adopts another bitmap,
//!   depending on the rest of the change.
//! - A request without a difference for a slot with guest_memfd does nothing, as in the series'
//!   third version. Kernels without the series refuse all requests for such slots.

use crate::{Limits, Request, Slot, SlotError, SlotFlags};
use pageferry_addr::{GfnRange, PAGE_MASK, PAGE_SHIFT};

/// The effect of an allowed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// It changes nothing.
    Nothing,
    /// It creates a slot at these frames.
    Create(GfnRange),
    /// It deletes its slot.
    Delete,
    /// It moves its slot to these frames.
    Move(GfnRange),
    /// It changes the flags of its slot.
    Flags,
}

/// Checks `request` against the present slots, and returns its effect.
///
/// `total_pages` is the number of pages of all slots in all address spaces. `by_id` returns the
/// slot of an address space and id. `overlap` returns id and frames of a slot that holds some of
/// the given frames and does not have the given id. `check` calls each at most once, and only for
/// address spaces and ids within `limits`.
///
/// # Errors
/// One [`SlotError`] for each rule.
pub fn check<'s, D: 's, E>(
    limits: &Limits,
    request: &Request<E>,
    total_pages: u64,
    by_id: impl FnOnce(u16, u16) -> Option<&'s Slot<D>>,
    overlap: impl FnOnce(u16, GfnRange, u16) -> Option<(u16, GfnRange)>,
) -> Result<Plan, SlotError> {
    let (space, id) = (request.address_space, request.id);
    check_flags(request.flags)?;
    check_place(limits, request)?;
    let old = by_id(space, id);
    if request.size == 0 {
        return match old {
            Some(_) => Ok(Plan::Delete),
            None => Err(SlotError::NothingToDelete {
                address_space: space,
                id,
            }),
        };
    }
    let range = check_range(limits, request)?;
    let plan = match old {
        None => {
            if total_pages.checked_add(range.pages()).is_none() {
                return Err(SlotError::TotalPagesOverflow {
                    total: total_pages,
                    pages: range.pages(),
                });
            }
            Plan::Create(range)
        }
        Some(old) => {
            check_same(old, request, range)?;
            if range != old.range {
                Plan::Move(range)
            } else if request.flags != old.flags {
                return Ok(Plan::Flags);
            } else {
                return Ok(Plan::Nothing);
            }
        }
    };
    if let Some((other, taken)) = overlap(space, range, id) {
        return Err(SlotError::Overlap {
            range,
            other,
            taken,
        });
    }
    // This comes after the overlap, because the kernel asks the architecture last
    // (`kvm_arch_prepare_memory_region`).
    if range.end() > limits.gfn_limit {
        return Err(too_high(limits, request));
    }
    Ok(plan)
}

fn too_high<E>(limits: &Limits, request: &Request<E>) -> SlotError {
    SlotError::GpaTooHigh {
        gpa: request.gpa,
        size: request.size,
        limit: limits.gfn_limit,
    }
}

fn check_flags(flags: SlotFlags) -> Result<(), SlotError> {
    let unknown = flags.without(SlotFlags::KNOWN);
    if unknown != SlotFlags::EMPTY {
        return Err(SlotError::UnknownFlags { unknown });
    }
    let kept = SlotFlags::GUEST_MEMFD | SlotFlags::USERFAULT;
    let refused = flags.without(kept);
    if flags.contains(SlotFlags::GUEST_MEMFD) && refused != SlotFlags::EMPTY {
        return Err(SlotError::GuestMemfdFlags { refused });
    }
    Ok(())
}

/// The rules for every request, including a deletion.
fn check_place<E>(limits: &Limits, request: &Request<E>) -> Result<(), SlotError> {
    let &Request { gpa, size, hva, .. } = request;
    if size & PAGE_MASK != 0 {
        return Err(SlotError::UnalignedSize { size });
    }
    if !gpa.is_page_aligned() {
        return Err(SlotError::UnalignedGpa { gpa });
    }
    if !hva.is_page_aligned() {
        return Err(SlotError::UnalignedHva { hva });
    }
    if hva.checked_add(size).is_none() {
        return Err(SlotError::HvaOverflow { hva, size });
    }
    if !is_canonical(hva.0, size) {
        return Err(SlotError::HvaNotCanonical { hva, size });
    }
    check_bitmap(request)?;
    if request.address_space >= limits.address_spaces {
        return Err(SlotError::NoSuchAddressSpace {
            address_space: request.address_space,
            count: limits.address_spaces,
        });
    }
    if request.id >= limits.max_slots {
        return Err(SlotError::IdTooLarge {
            id: request.id,
            max_slots: limits.max_slots,
        });
    }
    Ok(())
}

/// The size of the part of each half of the address space in which host memory can be: that of
/// 60-bit addresses. (Addresses of processors have up to 57 bits. The bits above are copies of the
/// highest, or tags, which the kernel refuses too: `access_ok`.)
pub(crate) const HALF: u64 = 1 << 59;

/// Whether `size` bytes from `hva` on lie in the lowest or the highest [`HALF`] of the address
/// space. The caller knows that they do not overflow.
#[inline]
pub(crate) const fn is_canonical(hva: u64, size: u64) -> bool {
    let half = HALF.wrapping_neg();
    hva + size.saturating_sub(1) < HALF || hva >= half
}

/// With `USERFAULT` the bitmap has bits for all pages, in whole words. A request that makes no slot
/// needs no bitmap.
fn check_bitmap<E>(request: &Request<E>) -> Result<(), SlotError> {
    let wanted = request.flags.contains(SlotFlags::USERFAULT) && request.size != 0;
    if !wanted {
        return Ok(());
    }
    let Some(bitmap) = request.userfault_bitmap else {
        return Err(SlotError::NoUserfaultBitmap { id: request.id });
    };
    let bytes = bitmap_bytes(request.size);
    if bitmap.0 % 8 != 0 {
        return Err(SlotError::UnalignedBitmap { bitmap });
    }
    if bitmap.checked_add(bytes).is_none() {
        return Err(SlotError::BitmapOverflow { bitmap, bytes });
    }
    Ok(())
}

/// The bytes of the words that hold a bit for each page of `size` bytes.
const fn bitmap_bytes(size: u64) -> u64 {
    (size >> PAGE_SHIFT).div_ceil(64) * 8
}

fn check_range<E>(limits: &Limits, request: &Request<E>) -> Result<GfnRange, SlotError> {
    let &Request { gpa, size, .. } = request;
    let pages = size >> PAGE_SHIFT;
    let range = GfnRange::new(gpa.gfn(), pages).ok_or_else(|| too_high(limits, request))?;
    let max_pages = limits.max_slot_pages;
    if pages > max_pages {
        return Err(SlotError::TooManyPages { pages, max_pages });
    }
    Ok(range)
}

/// The rules for a request about an existing slot. A slot with guest_memfd may change `USERFAULT`
/// and nothing else, as in the KVM Userfault series ("Allow late setting of KVM_MEM_USERFAULT on
/// guest_memfd memslot").
fn check_same<D, E>(old: &Slot<D>, request: &Request<E>, range: GfnRange) -> Result<(), SlotError> {
    let id = request.id;
    if range.pages() != old.range.pages() {
        return Err(SlotError::SizeChanged {
            id,
            old: old.range.pages(),
            new: range.pages(),
        });
    }
    if request.hva != old.hva {
        return Err(SlotError::HvaChanged {
            id,
            old: old.hva,
            new: request.hva,
        });
    }
    let free = SlotFlags::LOG_DIRTY_PAGES | SlotFlags::USERFAULT;
    let toggled = request.flags.difference(old.flags).without(free);
    if toggled != SlotFlags::EMPTY {
        return Err(SlotError::FixedFlags {
            id,
            old: old.flags,
            new: request.flags,
            toggled,
        });
    }
    if old.flags.contains(SlotFlags::GUEST_MEMFD) && range != old.range {
        return Err(SlotError::GuestMemfdMoved {
            id,
            old: old.range.start(),
            new: range.start(),
        });
    }
    check_same_bitmap(old, request)
}

/// The bitmap changes with the flag only: while the flag stays, a thread may wait on the bitmap.
fn check_same_bitmap<D, E>(old: &Slot<D>, request: &Request<E>) -> Result<(), SlotError> {
    let stays = request.flags.contains(SlotFlags::USERFAULT);
    match (old.userfault_bitmap(), request.userfault_bitmap) {
        (Some(old), Some(new)) if stays && old != new => Err(SlotError::BitmapChanged {
            id: request.id,
            old,
            new,
        }),
        _ => Ok(()),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::bitmap_bytes;

    #[test]
    fn bitmaps_are_whole_words() {
        assert_eq!(bitmap_bytes(0x1000), 8);
        assert_eq!(bitmap_bytes(64 * 0x1000), 8);
        assert_eq!(bitmap_bytes(65 * 0x1000), 16);
    }
}
