//! The states of a VM on disk, and the record of a session that outlives its process. Frames of the
//! wire format have checksums, which a file is given too.

use pageferry_migration::{Orphan, SavedVm};

pub(crate) fn run(bytes: &[u8]) {
    let mut file = b"PFSAVED\x02".to_vec();
    file.extend_from_slice(bytes);
    for bytes in [bytes, &file] {
        if let Ok(saved) = SavedVm::decode(bytes) {
            assert_eq!(saved.encode().expect("it was decoded"), bytes);
        }
    }
    let _ = Orphan::of(bytes);
    let mut record = b"PFRECVD\x01".to_vec();
    record.extend_from_slice(bytes);
    let _ = Orphan::of(&record);
}
