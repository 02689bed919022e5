//! Packs memory into a snapshot.
//!
//! **Guarantee.** The file appears whole or not at all, and never in the place of another. The same
//! memory and options give the same file, byte for byte. Chunks count as equal only after their
//! bytes are compared: a guest can choose bytes whose checksums are equal.
//!
//! **Mechanism.** Two workers read, hash and compress batches of chunks in turn ([`worker`]). This
//! thread takes their batches in order, finds repeated chunks, and writes ([`writer`]). A worker is
//! at most two batches ahead, so memory is bounded. The header is written last.

mod worker;
mod writer;

use crate::Progress;
use crate::blob::Blob;
use crate::codec::Compression;
use crate::details::{Base, Details, Labels, MAX_LABEL, State, is_file_name, is_state_name};
use crate::error::PackError;
use crate::figures::Figures;
use crate::header::{Geometry, HEADER_BYTES, Header, MAX_BASES, MAX_STATE_BYTES, MAX_STATES};
use crate::input::Extents;
use crate::output::Output;
use crate::reader::Snapshot;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::time::SystemTime;
use worker::{Known, Worker};
use writer::Writer;
use xxhash_rust::xxh3::xxh3_64;

/// Threads that compress.
const WORKERS: usize = 2;
/// Bytes of memory in a batch.
const BATCH: u32 = 4 << 20;
/// The longest run of pages of zeros in a sparse diff that may take the place of pages of the base.
/// A guest that clears huge pages of 2 MiB, and writes one page of each, has runs of 1022.
const MOST_ZEROED: u64 = 1024;
/// The size of chunks, unless the caller or a base says another.
const CHUNK_BYTES: u32 = 64 << 10;

/// The memory to pack. It must not change meanwhile: a file whose length or time of the last change
/// does is refused.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// A memory file: its bytes are those of guest memory, one after the other. It may be sparse.
    File(&'a File),
    /// A packed snapshot.
    Packed(&'a Snapshot),
    /// Memory that is in no file, without holes.
    Blob(&'a dyn Blob),
}

impl Input<'_> {
    /// The length, and the time of the last change.
    fn stamp(&self) -> Result<(u64, Option<SystemTime>), PackError> {
        match self {
            Self::File(file) => {
                let found = file.metadata().map_err(PackError::Read)?;
                Ok((found.len(), found.modified().ok()))
            }
            Self::Packed(snapshot) => Ok((snapshot.len(), None)),
            Self::Blob(blob) => Ok((blob.bytes().map_err(PackError::Read)?, None)),
        }
    }
}

/// A state file of a VMM to pack with the memory.
#[derive(Debug)]
pub struct StateFile {
    /// Its name: 1 to 64 letters, digits, `.`, `_` or `-`, not beginning with a point.
    pub name: String,
    /// The file, read from its position to its end: at most 16 MiB.
    pub file: File,
}

/// How to pack.
#[derive(Debug, Default)]
pub struct Options<'a> {
    /// The size of chunks in bytes: a power of two from 4 KiB to 1 MiB. Without it, the size of the
    /// base's chunks, or 64 KiB.
    pub chunk_bytes: Option<u32>,
    /// The compression.
    pub compression: Compression,
    /// The snapshot that the new one is a diff on.
    pub base: Option<&'a Snapshot>,
    /// Whether a hole of the input means "as in the base", as in the diff files of Firecracker.
    /// Otherwise it means zeros. Without a base it always does.
    pub holes_as_base: bool,
    /// Whether zeros of a sparse diff are sure to be the guest's. Otherwise a diff without a hole,
    /// and one with a long run of zeros over pages of the base, is refused: a copy that fills holes
    /// makes such files.
    pub zeros_are_data: bool,
    /// The labels.
    pub labels: Labels,
    /// The state files, at most 64.
    pub states: Vec<StateFile>,
}

/// Packs memory into a new file.
///
/// # Errors
/// When options do not fit each other, the memory or the base cannot be read, the file cannot be
/// written, or `progress` cancels. Then there is no file.
pub fn pack(
    input: Input<'_>,
    output: &Path,
    options: Options<'_>,
    progress: &mut Progress<'_>,
) -> Result<Figures, PackError> {
    let stamp = input.stamp()?;
    let geometry = geometry(stamp.0, &options)?;
    let bases = bases(options.base)?;
    check_names(&options)?;
    let failed = |why| PackError::Write {
        file: output.to_owned(),
        why,
    };
    let doubts = options.base.is_some() && options.holes_as_base && !options.zeros_are_data;
    if let Input::File(file) = input
        && doubts
        && !Extents::new(file).has_hole(stamp.0)?
    {
        return Err(PackError::NoHoles);
    }
    let most_zeroed = if doubts { MOST_ZEROED } else { u64::MAX };
    let to = Output::create(output).map_err(failed)?;
    let mut writer = Writer::new(&to.file, output, most_zeroed);
    writer.skip(HEADER_BYTES);
    pack_chunks(input, &geometry, &options, &mut writer, progress)?;
    if input.stamp()? != stamp {
        return Err(PackError::Changed);
    }
    let data_bytes = writer.figures.stored_bytes;
    let states = pack_states(options.states, &mut writer)?;
    let details = Details {
        sums: writer.index.sums(&geometry),
        bases,
        labels: options.labels,
        states,
    };
    writer.write_index()?;
    let bytes = details.encode();
    writer.write(&bytes)?;
    let header = Header {
        geometry,
        codecs: writer.codecs,
        bases: details.bases.len(),
        states: details.states.len(),
        data_bytes,
        state_bytes: details.states.iter().map(|state| state.bytes).sum(),
        details_bytes: bytes.len() as u64,
        details_sum: xxh3_64(&bytes),
    };
    let figures = writer.finish(&header.encode().0)?;
    to.finish().map_err(failed)?;
    Ok(figures)
}

fn geometry(memory_bytes: u64, options: &Options<'_>) -> Result<Geometry, PackError> {
    let base = options.base.map(Snapshot::geometry);
    let chunk_bytes = match (options.chunk_bytes, base) {
        (Some(asked), Some(base)) if asked != base.chunk_bytes => {
            let base = base.chunk_bytes;
            return Err(PackError::BaseChunks { asked, base });
        }
        (Some(asked), _) => asked,
        (None, base) => base.map_or(CHUNK_BYTES, |base| base.chunk_bytes),
    };
    if let Some(base) = base.filter(|base| base.memory_bytes != memory_bytes) {
        return Err(PackError::BaseLength {
            found: memory_bytes,
            expected: base.memory_bytes,
        });
    }
    // With chunks of any possible size, the length must be possible.
    Geometry::new(memory_bytes, 1 << 20).map_err(|_| PackError::Length(memory_bytes))?;
    Geometry::new(memory_bytes, chunk_bytes).map_err(|_| PackError::ChunkBytes(chunk_bytes.into()))
}

/// The table of bases of a diff on `base`.
fn bases(base: Option<&Snapshot>) -> Result<Vec<Base>, PackError> {
    let Some(base) = base else {
        return Ok(Vec::new());
    };
    let below = base.bases();
    if below.len() >= MAX_BASES {
        return Err(PackError::TooDeep(below.len()));
    }
    let name = base.path().file_name();
    let name = name.filter(|name| is_file_name(name.as_encoded_bytes()));
    let name = name.ok_or_else(|| PackError::BaseName(base.path().to_owned()))?;
    let first = Base {
        id: base.id(),
        name: name.to_owned(),
    };
    Ok(std::iter::once(first)
        .chain(below.iter().cloned())
        .collect())
}

fn check_names(options: &Options<'_>) -> Result<(), PackError> {
    let labels = &options.labels;
    for (name, label) in [
        ("name of the VMM", &labels.vmm),
        ("version of the VMM", &labels.version),
        ("name of the CPU", &labels.cpu),
    ] {
        if label.len() > MAX_LABEL {
            return Err(PackError::Label(name, label.len()));
        }
    }
    let states = &options.states;
    if states.len() > MAX_STATES {
        return Err(PackError::States(states.len()));
    }
    for (at, state) in states.iter().enumerate() {
        let is_new = states[..at].iter().all(|other| other.name != state.name);
        if !is_state_name(&state.name) || !is_new {
            return Err(PackError::StateName(state.name.clone()));
        }
    }
    Ok(())
}

fn pack_states(files: Vec<StateFile>, writer: &mut Writer<'_>) -> Result<Vec<State>, PackError> {
    let mut states = Vec::new();
    for StateFile { name, file } in files {
        let mut bytes = Vec::new();
        if let Err(why) = file.take(MAX_STATE_BYTES + 1).read_to_end(&mut bytes) {
            return Err(PackError::StateRead { name, why });
        }
        if bytes.len() as u64 > MAX_STATE_BYTES {
            return Err(PackError::StateBytes(name));
        }
        writer.write(&bytes)?;
        states.push(State {
            name,
            bytes: bytes.len() as u64,
            sum: xxh3_64(&bytes),
        });
    }
    Ok(states)
}

fn pack_chunks(
    input: Input<'_>,
    geometry: &Geometry,
    options: &Options<'_>,
    writer: &mut Writer<'_>,
    progress: &mut Progress<'_>,
) -> Result<(), PackError> {
    let known = options.base.map_or(Ok(Known::default()), Known::of)?;
    let in_batch = u64::from(BATCH / geometry.chunk_bytes);
    let batches = geometry.chunks().div_ceil(in_batch);
    let range = |batch: u64| batch * in_batch..((batch + 1) * in_batch).min(geometry.chunks());
    std::thread::scope(|scope| {
        let mut results = Vec::new();
        for first in 0..WORKERS {
            let (to, from) = sync_channel(1);
            let mut worker = Worker::new(input, geometry, options, &known)?;
            std::thread::Builder::new()
                .name("pack".into())
                .spawn_scoped(scope, move || {
                    for batch in (first as u64..batches).step_by(WORKERS) {
                        let packed = worker.pack(range(batch));
                        let is_over = packed.is_err();
                        // The other side is gone if another worker failed, or the user cancelled.
                        if to.send(packed).is_err() || is_over {
                            return;
                        }
                    }
                })
                .map_err(PackError::Thread)?;
            results.push(from);
        }
        for batch in 0..batches {
            if progress(geometry.offset(range(batch).start), geometry.memory_bytes).is_break() {
                return Err(PackError::Cancelled);
            }
            let packed = results[batch as usize % WORKERS].recv();
            writer.add(&packed.expect("a worker sends each of its batches")?)?;
        }
        let _ = progress(geometry.memory_bytes, geometry.memory_bytes);
        Ok(())
    })
}
