//! The text of a VMM's handshake with a pager: no panic, and what is taken lies within the memory
//! file and apart.

use pageferry_pager::parse_regions;

const FILE: u64 = 1 << 30;

pub(crate) fn run(bytes: &[u8]) {
    let Ok((regions, page_bytes)) = parse_regions(bytes, FILE) else {
        return;
    };
    assert!(page_bytes == 4096 || page_bytes == 2 << 20);
    let mut bytes = 0;
    for region in &regions {
        assert!(region.size > 0 && region.offset + region.size <= FILE);
        assert!(region.address.is_multiple_of(page_bytes));
        bytes += region.size;
    }
    // Regions that overlapped could be more than the file.
    assert!(bytes <= FILE);
}
