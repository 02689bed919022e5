//! A recording of a working set. Most inputs have a wrong checksum, so it is also put right.

use pageferry_pager::Recording;
use xxhash_rust::xxh3::xxh3_64;

pub(crate) fn run(bytes: &[u8]) {
    let _ = Recording::decode(bytes);
    let mut whole = bytes.to_vec();
    whole.extend_from_slice(&xxh3_64(bytes).to_le_bytes());
    if let Ok(recording) = Recording::decode(&whole) {
        // Version 1 is read, and not written.
        assert_eq!(Recording::decode(&recording.encode()), Ok(recording));
    }
}
