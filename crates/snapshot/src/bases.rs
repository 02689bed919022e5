//! Opening files of snapshots, and finding the bases of a diff.
//!
//! **Guarantee.** A file counts as a base only if its header, whose checksum is the id, has the id
//! that the diff says, and the file has the length that the header says.
//!
//! **Mechanism.** A base is looked for by its name in each directory. If it has another name now,
//! the first bytes of the files there tell: at most 4096 for each directory.

use crate::blob::Blob;
use crate::details::Base;
use crate::error::OpenError;
use crate::header::{HEADER_BYTES, Header, SnapshotId};
use crate::input::open_input;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The most files of a directory that are looked into.
const MAX_FILES: usize = 4096;

/// An open file that holds chunks.
pub(crate) struct Source {
    pub(crate) file: Arc<dyn Blob>,
    pub(crate) path: PathBuf,
    pub(crate) header: Header,
    pub(crate) id: SnapshotId,
}

impl Source {
    pub(crate) fn open(path: &Path) -> Result<Self, OpenError> {
        let file = open_input(path).map_err(|why| OpenError::Io {
            file: path.to_owned(),
            why,
        })?;
        Self::of(Arc::new(file), path)
    }

    /// Reads the header of `file`, and checks its length.
    pub(crate) fn of(file: Arc<dyn Blob>, path: &Path) -> Result<Self, OpenError> {
        let io = |why| OpenError::Io {
            file: path.to_owned(),
            why,
        };
        let found = file.bytes().map_err(io)?;
        let mut bytes = vec![0; found.min(HEADER_BYTES as u64) as usize];
        file.read_exact_at(&mut bytes, 0).map_err(io)?;
        let (header, id) = Header::decode(&bytes, path)?;
        if found != header.file_bytes() {
            return Err(OpenError::Truncated {
                file: path.to_owned(),
                expected: header.file_bytes(),
                found,
            });
        }
        Ok(Self {
            file,
            path: path.to_owned(),
            header,
            id,
        })
    }
}

/// Opens a base of `file`, which `open` finds by its name.
pub(crate) fn find_by(
    base: &Base,
    file: &Path,
    open: &mut dyn FnMut(&OsStr) -> io::Result<Arc<dyn Blob>>,
) -> Result<Source, OpenError> {
    let path = file.with_file_name(&base.name);
    let found = open(&base.name).map_err(|why| OpenError::Io {
        file: path.clone(),
        why,
    })?;
    let source = Source::of(found, &path)?;
    if source.id == base.id {
        return Ok(source);
    }
    Err(OpenError::BaseWrong {
        file: file.to_owned(),
        base: path,
        found: source.id,
        expected: base.id,
    })
}

/// Finds a base of `file` in the directories.
pub(crate) fn find(base: &Base, file: &Path, directories: &[&Path]) -> Result<Source, OpenError> {
    let mut fault = None;
    for directory in directories {
        match Source::open(&directory.join(&base.name)) {
            Ok(source) if source.id == base.id => return Ok(source),
            Ok(other) => {
                fault.get_or_insert(OpenError::BaseWrong {
                    file: file.to_owned(),
                    base: other.path,
                    found: other.id,
                    expected: base.id,
                });
            }
            Err(OpenError::Io { why, .. }) if why.kind() == io::ErrorKind::NotFound => {}
            Err(why) => {
                fault.get_or_insert(why);
            }
        }
    }
    let renamed = directories.iter().find_map(|directory| {
        let files = std::fs::read_dir(directory).ok()?.take(MAX_FILES);
        // Nothing but regular files is opened: to open a device may already do something.
        files
            .filter_map(Result::ok)
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()))
            .filter_map(|entry| Source::open(&entry.path()).ok())
            .find(|source| source.id == base.id)
    });
    renamed.ok_or_else(|| {
        fault.unwrap_or_else(|| {
            let directories = directories.iter().map(|path| path.display().to_string());
            OpenError::BaseMissing {
                file: file.to_owned(),
                id: base.id,
                name: base.name.to_string_lossy().into_owned(),
                directories: directories.collect::<Vec<_>>().join(", "),
            }
        })
    })
}
