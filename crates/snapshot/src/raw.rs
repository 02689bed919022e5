//! The id of a memory file that is not packed.

use crate::Progress;
use crate::error::PackError;
use crate::header::{PAGE_BYTES, SnapshotId};
use crate::input::Extents;
use crate::unpack::is_zero;
use std::fs::File;
use std::os::unix::fs::FileExt;
use xxhash_rust::xxh3::Xxh3;

/// The bytes that are read at once.
const STEP: usize = 1 << 20;

/// The id of the contents of a memory file: the XXH3-128 of its length, and of each page that is
/// not zero, behind its number. So holes and zeros count as the same. It reads all data of the file.
///
/// # Errors
/// When the file cannot be read, or `progress` cancels.
pub fn raw_id(file: &File, progress: &mut Progress<'_>) -> Result<SnapshotId, PackError> {
    let bytes = file.metadata().map_err(PackError::Read)?.len();
    let mut extents = Extents::new(file);
    let mut sum = Xxh3::new();
    sum.update(&bytes.to_le_bytes());
    let mut step = vec![0; STEP];
    for at in (0..bytes).step_by(STEP) {
        if progress(at, bytes).is_break() {
            return Err(PackError::Cancelled);
        }
        let part = &mut step[..(bytes - at).min(STEP as u64) as usize];
        if extents.of(at..at + part.len() as u64)?.is_empty() {
            continue;
        }
        file.read_exact_at(part, at).map_err(PackError::Read)?;
        for (page, bytes) in (at / PAGE_BYTES..).zip(part.chunks(PAGE_BYTES as usize)) {
            if !is_zero(bytes) {
                sum.update(&page.to_le_bytes());
                sum.update(bytes);
            }
        }
    }
    let _ = progress(bytes, bytes);
    Ok(SnapshotId(sum.digest128().to_le_bytes()))
}
