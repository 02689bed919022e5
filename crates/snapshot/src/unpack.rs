//! Gives the files back that were packed.

use crate::Progress;
use crate::error::UnpackError;
use crate::header::{Geometry, PAGE_BYTES};
use crate::output::Output;
use crate::reader::Snapshot;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The files to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The whole memory, with all that is in bases. Pages of zeros become holes.
    Whole,
    /// The pages that were data in the packed file, or that differ from the base. All others become
    /// holes.
    Diff,
}

/// Writes memory to a new file, and returns the bytes written. The file has the length of memory.
///
/// # Errors
/// When a chunk is damaged, or the host refuses. Then there is no file.
pub fn unpack(
    snapshot: &Snapshot,
    output: &Path,
    what: What,
    progress: &mut Progress<'_>,
) -> Result<u64, UnpackError> {
    let failed = |why| UnpackError::Write {
        file: output.to_owned(),
        why,
    };
    let to = Output::create(output).map_err(failed)?;
    to.file.set_len(snapshot.len()).map_err(failed)?;
    let geometry = *snapshot.geometry();
    let mut chunk = vec![0; geometry.chunk_bytes as usize];
    let mut maps = Box::default();
    let mut written = 0;
    for index in 0..geometry.chunks() {
        let offset = geometry.offset(index);
        if progress(offset, snapshot.len()).is_break() {
            return Err(UnpackError::Cancelled);
        }
        let chunk = &mut chunk[..geometry.chunk_len(index)];
        let runs = match what {
            What::Whole if snapshot.row(index)?.kind == crate::Kind::Zero => continue,
            What::Whole => {
                snapshot.read_chunk(index, chunk)?;
                runs(chunk.len(), |page| {
                    let at = page * PAGE_BYTES as usize;
                    !is_zero(&chunk[at..][..PAGE_BYTES as usize])
                })
            }
            What::Diff => {
                let row = (index % Geometry::BLOCK) as usize;
                if row == 0 {
                    maps = snapshot.maps(index / Geometry::BLOCK)?;
                }
                let map = &maps[row * geometry.map_bytes()..][..geometry.map_bytes()];
                let runs = runs(chunk.len(), |page| map[page / 8] >> (page % 8) & 1 == 1);
                if !runs.is_empty() {
                    snapshot.read_chunk(index, chunk)?;
                }
                runs
            }
        };
        for run in runs {
            let at = offset + run.start as u64;
            to.file
                .write_all_at(&chunk[run.clone()], at)
                .map_err(failed)?;
            written += run.len() as u64;
        }
    }
    to.finish().map_err(failed)?;
    // The work is done: nothing can be cancelled any more.
    let _ = progress(snapshot.len(), snapshot.len());
    Ok(written)
}

/// Writes state `index` of a snapshot to a new file.
///
/// # Errors
/// When it is damaged, or the host refuses. Then there is no file.
///
/// # Panics
/// If there is no such state.
pub fn write_state(snapshot: &Snapshot, index: usize, output: &Path) -> Result<(), UnpackError> {
    let bytes = snapshot.read_state(index)?;
    let write = || {
        let to = Output::create(output)?;
        to.file.write_all_at(&bytes, 0)?;
        to.finish()
    };
    write().map_err(|why| UnpackError::Write {
        file: output.to_owned(),
        why,
    })
}

/// The runs of pages for which `is_data` holds, in bytes of a chunk of `len` bytes.
fn runs(len: usize, is_data: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
    let size = PAGE_BYTES as usize;
    let mut runs: Vec<Range<usize>> = Vec::new();
    for page in (0..len / size).filter(|page| is_data(*page)) {
        match runs.last_mut() {
            Some(run) if run.end == page * size => run.end += size,
            _ => runs.push(page * size..(page + 1) * size),
        }
    }
    runs
}

/// Whether all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<64>();
    words.iter().all(|word| *word == [0; 64]) && rest.iter().all(|byte| *byte == 0)
}
