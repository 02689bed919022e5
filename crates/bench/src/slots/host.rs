//! Host address space for the slots, reserved once for the process and never touched.
//!
//! vm-memory's regions consist of mappings. One mapping without access and without memory behind it
//! serves all of them. So no figure includes a system call or a page fault.

use pageferry_addr::Hva;
use std::sync::OnceLock;
use vm_memory::MmapRegion;

/// The size of the reservation in bytes: room for [`super::input::SlotSet::MAX_SLOTS`] slots of the
/// largest size.
pub(crate) const RESERVED_BYTES: u64 = 8 << 30;

static RESERVATION: OnceLock<Option<MmapRegion<()>>> = OnceLock::new();

fn reservation() -> Option<&'static MmapRegion<()>> {
    RESERVATION
        .get_or_init(|| {
            MmapRegion::build(
                None,
                RESERVED_BYTES as usize,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            )
            .ok()
        })
        .as_ref()
}

/// The first address of the reservation, page-aligned. `None` if the system refuses the address
/// space.
pub(crate) fn base() -> Option<Hva> {
    reservation().map(|region| Hva(region.as_ptr() as u64))
}

/// A pointer to `bytes` bytes from `hva` on, if all of them are in the reservation.
pub(crate) fn pointer(hva: Hva, bytes: u64) -> Option<*mut u8> {
    let region = reservation()?;
    let offset = hva.checked_offset_from(Hva(region.as_ptr() as u64))?;
    (offset.checked_add(bytes)? <= RESERVED_BYTES)
        .then(|| region.as_ptr().wrapping_add(offset as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_reservation_has_pointers() {
        let base = base().expect("8 GiB of address space");
        assert!(base.is_page_aligned());
        assert!(pointer(base, RESERVED_BYTES).is_some());
        assert!(pointer(base, RESERVED_BYTES + 1).is_none());
        assert!(pointer(Hva(base.0 - 1), 1).is_none());
        assert!(pointer(Hva(base.0 + 4096), u64::MAX).is_none());
    }
}
