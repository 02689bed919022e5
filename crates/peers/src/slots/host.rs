//! Host address space for the slots of a measurement: reserved once for the process, never touched.
//!
//! vm-memory's regions are made of mappings. One without access and without memory behind it stands
//! for all of them, so that no system call and no page fault is in any figure.

use crate::sync::OnceLock;
use pageferry_addr::Hva;
use vm_memory::MmapRegion;

/// How many bytes are reserved: room for [`crate::SlotSet::MAX_SLOTS`] slots at the widest.
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

/// The first address of the reservation, page-aligned; `None` where the system refuses so much
/// address space.
pub(crate) fn base() -> Option<Hva> {
    reservation().map(|region| Hva(region.as_ptr() as u64))
}

/// A pointer to `bytes` bytes from `hva` on, if the reservation holds them all.
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
