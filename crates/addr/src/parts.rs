//! The single accesses of a copy.

/// The bytes of the first access of a copy of `bytes` bytes at `address`: 1, 2, 4 or 8. It is the
/// largest that is naturally aligned there and fits.
///
/// A copy by these accesses tears no value: each naturally aligned part of 2, 4 or 8 bytes lies in
/// one of them.
///
/// ```
/// use pageferry_addr::first_access;
///
/// // Bytes 6 to 19, by accesses of 2, 8 and 4 bytes.
/// assert_eq!(first_access(6, 14), 2);
/// assert_eq!(first_access(8, 12), 8);
/// assert_eq!(first_access(16, 4), 4);
/// ```
///
/// # Panics
/// If `bytes` is 0.
#[must_use]
pub const fn first_access(address: u64, bytes: u64) -> u64 {
    let aligned = address.trailing_zeros();
    let fits = bytes.ilog2();
    let power = if aligned < fits { aligned } else { fits };
    1 << if power < 3 { power } else { 3 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_aligned_part_is_in_one_access() {
        for (start, bytes) in (0..16).flat_map(|start| (1..40).map(move |bytes| (start, bytes))) {
            let end = start + bytes;
            let mut accesses = [0; 64];
            let (mut at, mut count) = (start, 0);
            while at < end {
                let size = first_access(at, end - at);
                assert!(at % size == 0 && at + size <= end, "{size} bytes at {at}");
                (at..at + size).for_each(|byte| accesses[byte as usize] = count);
                (at, count) = (at + size, count + 1);
            }
            for size in [2, 4, 8] {
                for part in (0..64).step_by(size) {
                    let inside = start as usize <= part && part + size <= end as usize;
                    let one = accesses[part] == accesses[(part + size - 1).min(63)];
                    assert!(!inside || one, "{size} bytes at {part} of {start}..{end}");
                }
            }
        }
    }
}
