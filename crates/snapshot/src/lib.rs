//! The memory of a VM snapshot as checksummed chunks, which a reader fetches one by one.
//!
//! **Guarantee.** Bytes that a reader gets are those that were packed. Damage to a file, any
//! flipped bit or lost end, is an error that names the chunk, its offset in memory, and the file. A
//! failure leaves no partial file. Memory is never held whole: a few MiB of chunks, and the index.
//!
//! **Mechanism.** A file has a header, the chunks ([`Kind`]), state files, an index in columns, and
//! details. Checksums form a tree: the id of a snapshot covers the details, these cover the index,
//! and the index covers the chunks. A diff's index names the file and the place of each chunk, also
//! of those in its bases. So a look-up costs the same at any depth. [`pack`] writes a file,
//! [`Snapshot`] reads it, [`unpack`] gives the memory file back. `docs/snapshot-format.md` of the
//! project has every byte.
//!
//! The checksums are xxh3. They find damage. They are no defence against someone who can write the
//! file.
//!
//! **Neighbours.** No crate of Pageferry is below. Above: `cli`, and servers of pages. This crate
//! must not know VMMs: states travel as opaque bytes.
//!
//! ```
//! use pageferry_snapshot::{Input, Options, Snapshot, pack};
//! use std::ops::ControlFlow;
//!
//! let dir = std::env::temp_dir().join(format!("pf-snapshot-doc-{}", std::process::id()));
//! std::fs::create_dir(&dir)?;
//! let memory = vec![7; 1 << 20];
//! std::fs::write(dir.join("memory"), &memory)?;
//!
//! let file = std::fs::File::open(dir.join("memory"))?;
//! let packed = dir.join("packed");
//! let figures = pack(Input::File(&file), &packed, Options::default(), &mut |_, _| {
//!     ControlFlow::Continue(())
//! })?;
//! assert_eq!((figures.chunks, figures.repeated), (16, 15));
//!
//! let snapshot = Snapshot::open(&packed)?;
//! let mut page = [0; 4096];
//! snapshot.read_at(12 * 4096, &mut page)?;
//! assert_eq!(page, [7; 4096]);
//! # std::fs::remove_dir_all(&dir)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bases;
mod blob;
mod codec;
mod columns;
mod details;
mod error;
mod figures;
mod header;
mod input;
mod output;
mod pack;
mod raw;
mod reader;
mod unpack;
mod verify;

pub use blob::Blob;
pub use codec::{Compression, Kind};
pub use details::{Base, Labels, State};
pub use error::{ChunkError, Fault, OpenError, PackError, StateError, UnpackError};
pub use figures::Figures;
pub use header::{MAX_MEMORY_BYTES, PAGE_BYTES, SnapshotId};
pub use input::open_input;
pub use pack::{Input, Options, StateFile, pack};
pub use raw::raw_id;
pub use reader::{Chunk, Snapshot};
pub use unpack::{What, unpack, write_state};
pub use verify::{Verified, verify};

/// Called with the bytes of memory that are done, and all. `Break` cancels the work.
pub type Progress<'a> = dyn FnMut(u64, u64) -> std::ops::ControlFlow<()> + 'a;

/// Runs the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
