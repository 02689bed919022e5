//! Huge pages of the host: made of pages that have arrived, and counted.
//!
//! Pages of a migration come singly, so the host maps them singly. `MADV_COLLAPSE` (Linux 6.1)
//! makes one huge page of a complete 2 MiB range, without a change of its bytes. It maps the huge
//! page where it was asked to. Touches meanwhile wait for it. KVM learns that its mappings of the
//! range are gone, and maps the range anew at the next touch, as large as it can.
//!
//! A page of private memory that was only read counts as written.

#[cfg(any(feature = "kvm", feature = "soft"))]
mod collapse;

use crate::MachineError;
use pageferry_addr::{Hva, PAGE_SIZE};
use std::fs;

#[cfg(any(feature = "kvm", feature = "soft"))]
pub(crate) use collapse::{collapse, whole_range};

/// The result of [`Machine::collapse`](crate::Machine::collapse).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Collapsed {
    /// The host maps the range by huge pages.
    Huge,
    /// A page of the range is missing.
    Missing,
    /// A page of the range was never written. A huge page would take memory for it.
    Incomplete,
    /// The kernel did not do it now: it holds a page, or has no huge page free.
    Refused,
}

/// The bytes of these runs of pages that the host maps by huge pages.
pub(crate) fn host_bytes(runs: impl Iterator<Item = (Hva, u64)>) -> Result<u64, MachineError> {
    let smaps = fs::read_to_string("/proc/self/smaps")
        .map_err(|e| MachineError::os("cannot read the mappings of this process", e))?;
    let bytes =
        |(start, pages): (Hva, u64)| huge_bytes(&smaps, start.0, start.0 + pages * PAGE_SIZE);
    Ok(runs.map(bytes).sum())
}

/// The huge bytes of all mappings of `smaps` in a range of addresses.
fn huge_bytes(smaps: &str, start: u64, end: u64) -> u64 {
    let mut inside = false;
    let mut kib = 0;
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some((from, _)) = first.split_once('-') {
            let from = u64::from_str_radix(from, 16);
            inside = from.is_ok_and(|from| (start..end).contains(&from));
        } else if inside
            && matches!(
                first,
                "ShmemPmdMapped:" | "AnonHugePages:" | "Shared_Hugetlb:" | "Private_Hugetlb:"
            )
        {
            kib += words.next().and_then(|n| n.parse().ok()).unwrap_or(0);
        }
    }
    kib << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_huge_pages_of_the_mapping_count() {
        let smaps = "\
7f0000000000-7f0000400000 rw-s 00000000 00:01 7   /memfd:pageferry-ram (deleted)
Rss:                4096 kB
ShmemPmdMapped:     2048 kB
Shared_Hugetlb:        0 kB
7f0000400000-7f0000600000 rw-s 00400000 00:01 7   /memfd:pageferry-ram (deleted)
ShmemPmdMapped:        0 kB
Private_Hugetlb:    2048 kB
VmFlags: rd wr sh
AnonHugePages:      2048 kB
7f0000600000-7f0000800000 rw-s 00000000 00:01 7   /memfd:pageferry-ram (deleted)
ShmemPmdMapped:     2048 kB
";
        assert_eq!(
            huge_bytes(smaps, 0x7f00_0000_0000, 0x7f00_0060_0000),
            6 << 20
        );
        assert_eq!(
            huge_bytes(smaps, 0x7f00_0060_0000, 0x7f00_0080_0000),
            2 << 20
        );
        assert_eq!(huge_bytes("", 0, u64::MAX), 0);
    }
}
